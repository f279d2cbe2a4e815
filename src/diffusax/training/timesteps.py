"""Which timesteps a training run sees more of.

Upstream: diffusers examples/text_to_image/train_text_to_image_sdxl.py, generate_timestep_weights,
whose options these are.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

STRATEGIES = ("none", "earlier", "later", "range")


@dataclasses.dataclass(frozen=True)
class TimestepBiasConfig:
    """Timesteps drawn more often. The loss is not weighed to make up for it."""

    timestep_bias_strategy: str = "none"
    """none; earlier (the least noisy timesteps); later (the noisiest); range (begin to end)."""
    timestep_bias_multiplier: float = 1.0
    """How many times as often as the others."""
    timestep_bias_portion: float = 0.25
    """The share of all timesteps that earlier and later mean."""
    timestep_bias_begin: int = 0
    """The first timestep of range."""
    timestep_bias_end: int = 1000
    """The timestep after the last of range."""

    def __post_init__(self) -> None:
        if self.timestep_bias_strategy not in STRATEGIES:
            raise ValueError(
                f"timestep_bias_strategy={self.timestep_bias_strategy!r} is not known; use "
                f"{', '.join(STRATEGIES)}"
            )
        if self.timestep_bias_multiplier <= 0:
            raise ValueError(
                f"timestep_bias_multiplier must be positive (got {self.timestep_bias_multiplier}); "
                'for no bias, use timestep_bias_strategy="none"'
            )
        if not 0 < self.timestep_bias_portion <= 1:
            raise ValueError(
                "timestep_bias_portion must be above 0 and at most 1 "
                f"(got {self.timestep_bias_portion})"
            )
        if not 0 <= self.timestep_bias_begin < self.timestep_bias_end:
            raise ValueError(
                "timestep_bias_begin must be at least 0 and below timestep_bias_end "
                f"(got {self.timestep_bias_begin} and {self.timestep_bias_end})"
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
