"""Opens the data set that a run's options name, and says which share of it this process reads."""

from collections.abc import Sequence

import jax

from diffusax.training.data.batches import DataConfig
from diffusax.training.data.sources import Source, open_source
from diffusax.training.data.streaming import StreamedSource


def open_data(config: DataConfig, columns: Sequence[str]) -> Source:
    """Opens the data set that the options name, with these columns.

    Raises:
        ValueError: there is no such data set, or a column is missing; lists those that exist.
    """
    if config.streaming and config.own_part:
        raise ValueError(
            "data.own_part cannot be with data.streaming, where all processes see the same data"
        )
    if not config.streaming:
        return open_source(config.path, columns)
    limit = int(config.streaming_cache * 1e9)
    return StreamedSource.open(config.path, columns, limit=limit, window=config.streaming_window)


def own_share(config: DataConfig) -> tuple[int, int]:
    """Returns (i, n): this process reads the i-th of n shares of the rows that it sees."""
    return (0, 1) if config.own_part else (jax.process_index(), jax.process_count())
