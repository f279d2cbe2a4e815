"""The data set that a run's options name."""

from collections.abc import Sequence

from diffusax.training.data import DataConfig
from diffusax.training.sources import Source, open_source
from diffusax.training.streaming import StreamedSource


def open_data(config: DataConfig, columns: Sequence[str]) -> Source:
    """The rows that the options name, with these columns.

    Raises:
        ValueError: there is no such data set, or a column is missing; lists the ones there are.
    """
    if not config.streaming:
        return open_source(config.data, columns)
    limit = int(config.streaming_cache * 1e9)
    return StreamedSource.open(config.data, columns, limit=limit, window=config.streaming_window)
