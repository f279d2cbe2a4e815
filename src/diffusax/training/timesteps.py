"""Which timesteps a training run sees more of.

Upstream: diffusers examples/text_to_image/train_text_to_image_sdxl.py, generate_timestep_weights,
whose options these are.
"""

import dataclasses
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from diffusax.options import Count, Options


@dataclasses.dataclass(frozen=True)
class TimestepBiasConfig(Options):
    """Timesteps drawn more often. The loss is not weighed to make up for it."""

    timestep_bias_strategy: Literal["none", "earlier", "later", "range"] = "none"
    """Which timesteps are drawn more often: none, earlier (the least noisy), later (the noisiest)
    or range (from begin to end)."""
    timestep_bias_multiplier: Annotated[float, Meta(gt=0, le=1e6)] = 1.0
    """How many times as often as the others they are drawn."""
    timestep_bias_portion: Annotated[float, Meta(gt=0, le=1)] = 0.25
    """The share of all timesteps that earlier and later mean."""
    timestep_bias_begin: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The first timestep of range."""
    timestep_bias_end: Count = 1000
    """The timestep after the last of range."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.timestep_bias_begin >= self.timestep_bias_end:
            raise ValueError(
                f"timestep_bias_begin={self.timestep_bias_begin} must be below "
                f"timestep_bias_end={self.timestep_bias_end}"
            )


def timestep_probabilities(config: TimestepBiasConfig, count: int) -> np.ndarray | None:
    """How likely each of `count` timesteps is, float64; None where all are alike."""
    biased = round(config.timestep_bias_portion * count)
    ranges = {
        "earlier": slice(biased),
        "later": slice(count - biased, None),
        "range": slice(config.timestep_bias_begin, config.timestep_bias_end),
    }
    if config.timestep_bias_strategy == "none":
        return None
    weights = np.ones(count)
    weights[ranges[config.timestep_bias_strategy]] *= config.timestep_bias_multiplier
    return weights / weights.sum()


def draw_timestep(key: jax.Array, count: int, probabilities: np.ndarray | None) -> jax.Array:
    """A timestep from 0 to count - 1, a scalar int32."""
    if probabilities is None:
        return jax.random.randint(key, (), 0, count)
    below = jnp.asarray(np.cumsum(probabilities)[:-1], jnp.float32)
    drawn = jnp.searchsorted(below, jax.random.uniform(key), side="right")
    return drawn.astype(jnp.int32)
