"""Draws some timesteps more often than others.

Upstream: diffusers examples/text_to_image/train_text_to_image_sdxl.py, generate_timestep_weights,
whose options these are.
"""

import dataclasses
from typing import Annotated, ClassVar, Literal

import numpy as np
from msgspec import Meta

from diffusax.boundary.options import Count, Options


@dataclasses.dataclass(frozen=True)
class TimestepBiasConfig(Options):
    """Which timesteps are drawn more often. The loss has no weights that make up for it."""

    group: ClassVar[str] = "timestep_bias."

    strategy: Literal["none", "earlier", "later", "range"] = "none"
    """Which timesteps are drawn more often: none, earlier (the least noisy), later (the noisiest)
    or range (from begin to end)."""
    multiplier: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """The number of times as often as the others that they are drawn."""
    portion: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of all timesteps that earlier and later stand for."""
    begin: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The first timestep of range."""
    end: Count = 1000
    """The timestep after the last of range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.begin >= self.end:
            raise ValueError(
                f"timestep_bias.begin={self.begin} must be below timestep_bias.end={self.end}"
            )
        for name, strategies in _READ_BY.items():
            value = getattr(self, name)
            if value != getattr(type(self), name) and self.strategy not in strategies:
                raise ValueError(
                    f"timestep_bias.{name}={value} does nothing without timestep_bias.strategy="
                    f"{' or '.join(strategies)}; give both"
                )


_READ_BY = {
    "multiplier": ("earlier", "later", "range"),
    "portion": ("earlier", "later"),
    "begin": ("range",),
    "end": ("range",),
}
"""The strategies that read an option."""


def timestep_probabilities(config: TimestepBiasConfig, count: int) -> np.ndarray | None:
    """Returns the probability of each of `count` timesteps, float64; None where all are equal.

    Raises:
        ValueError: the range ends beyond the last timestep.
    """
    if config.strategy == "range" and config.end > count:
        raise ValueError(
            f"timestep_bias.end={config.end} is beyond the last of the {count} timesteps; it may "
            f"be {count} at most"
        )
    biased = round(config.portion * count)
    ranges = {
        "earlier": slice(biased),
        "later": slice(count - biased, None),
        "range": slice(config.begin, config.end),
    }
    if config.strategy == "none":
        return None
    weights = np.ones(count)
    weights[ranges[config.strategy]] *= config.multiplier
    return weights / weights.sum()
