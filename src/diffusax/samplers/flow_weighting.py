"""Which noise levels flow matching is trained at, and what the errors there count for.

Upstream: diffusers training_utils.py, compute_density_for_timestep_sampling and
compute_loss_weighting_for_sd3, whose names these are (Esser et al. 2024, section 3.1).
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Scheme = Literal["logit_normal", "mode", "cosmap", "sigma_sqrt", "none"]
"""logit_normal and mode are densities of the levels. cosmap and sigma_sqrt are weights of levels
that are all drawn alike. none is neither."""


@dataclasses.dataclass(frozen=True)
class FlowWeighting:
    """The density of the training levels, and the weights of their errors."""

    scheme: Scheme = "logit_normal"
    logit_mean: float = 0.0
    """Of logit_normal: the mean of the logit of 1 - sigma, so that numbers below 0 mean more
    noise, as in diffusers."""
    logit_std: float = 1.0
    """Of logit_normal: the deviation of the logit."""
    mode_scale: float = 1.29
    """Of mode: how much more often levels in the middle are drawn, from -1 to 2 / (pi - 2)."""

    def sample(self, key: jax.Array) -> jax.Array:
        """Returns a random sigma from 0 to 1, without any shift."""
        if self.scheme == "logit_normal":
            drawn = jax.random.normal(key, dtype=jnp.float32)
            return jax.nn.sigmoid(self.logit_std * drawn - self.logit_mean)
        u = jax.random.uniform(key, dtype=jnp.float32)
        if self.scheme == "mode":
            return u + self.mode_scale * (jnp.cos(math.pi * u / 2) ** 2 - 1 + u)
        return u

    def weight(self, sigmas: jax.Array) -> jax.Array:
        """Returns what the errors at these levels count for, n."""
        if self.scheme == "sigma_sqrt":
            return sigmas**-2.0
        if self.scheme == "cosmap":
            return 2 / (math.pi * (1 - 2 * sigmas + 2 * sigmas**2))
        return jnp.ones_like(sigmas)
