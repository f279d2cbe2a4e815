"""Embeds timesteps and other scalars."""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.layers.layers import Linear

_PERIOD = 10000.0
"""The longest wave of the sinusoids, over 2 pi."""
_ROUNDED_OTHERWISE = {128: (12, 106), 160: (2, 15, 42), 192: (18, 103, 109, 159)}
"""The frequencies, of so many, that PyTorch rounds to the second nearest number.

Its exponential is MKL's, which does so with a few in a hundred: these on an AMD EPYC, others on
processors with AVX-512, where a frequency of ours differs then. The widths are those of
FLUX, Z-Image, Stable Diffusion and SDXL; at FLUX's guidance of 30 the twelfth alone is 4e-5 of an
image.
"""


def timestep_embedding(
    timesteps: jax.Array, dim: int, *, flip_sin_to_cos: bool = True, freq_shift: float = 0.0
) -> jax.Array:
    """Computes sinusoidal embeddings (Vaswani et al. 2017, 3.5). timesteps: b -> b dim, float32.

    Upstream: diffusers models/embeddings.py, get_timestep_embedding.
    """
    half = dim // 2
    steps = np.float32(-math.log(_PERIOD)) * np.arange(half, dtype=np.float32)
    otherwise = _ROUNDED_OTHERWISE.get(half, ()) if freq_shift == 0 else ()
    frequencies = _exp(steps / np.float32(half - freq_shift), otherwise)
    return _sinusoids(timesteps, frequencies, dim, flip_sin_to_cos=flip_sin_to_cos)


class TimestepEmbedding(nnx.Module):
    """Linear, SiLU, linear. x: b c -> b d; `condition` (b k) is projected and added to x first."""

    def __init__(
        self, c: int, d: int, *, cond_dim: int | None = None, bias: bool = True, rngs: nnx.Rngs
    ):
        self.linear_1 = Linear(c, d, bias=bias, rngs=rngs)
        self.cond_proj = Linear(cond_dim, c, bias=False, rngs=rngs) if cond_dim else None
        self.linear_2 = Linear(d, d, bias=bias, rngs=rngs)

    def __call__(self, x: jax.Array, condition: jax.Array | None = None) -> jax.Array:
        if self.cond_proj is not None and condition is not None:
            x = x + self.cond_proj(condition)
        return self.linear_2(nnx.silu(self.linear_1(x)))


def guidance_scale_embedding(scale: jax.Array, dim: int) -> jax.Array:
    """Embeds w = guidance_scale - 1 for distilled models. scale: b -> b dim, float32.

    Meng et al. 2023; upstream: pipeline_stable_diffusion.py, get_guidance_scale_embedding.
    """
    half = dim // 2
    step = np.float32(math.log(_PERIOD)) / np.float32(half - 1)
    frequencies = _exp(np.arange(half, dtype=np.float32) * -step)
    return _sinusoids(1000.0 * scale.astype(jnp.float32), frequencies, dim, flip_sin_to_cos=False)


def _exp(exponents: np.ndarray, otherwise: Sequence[int] = ()) -> np.ndarray:
    """Computes the exponential of float32 numbers, rounded to float32 as PyTorch rounds it.

    An angle is up to 100,000 times a frequency, so that the last digit of a frequency changes its
    sine by up to 0.006. It is computed on the host, because devices have exponentials of their own.

    otherwise: the places of those that are rounded to the second nearest number.
    """
    exact = np.exp(exponents.astype(np.float64))
    rounded = exact.astype(np.float32)
    for i in otherwise:
        beyond = np.float32(np.inf if exact[i] > rounded[i] else -np.inf)
        rounded[i] = np.nextafter(rounded[i], beyond)
    return rounded


def _sinusoids(
    values: jax.Array, frequencies: np.ndarray, dim: int, *, flip_sin_to_cos: bool
) -> jax.Array:
    """Returns the sines and cosines of values, b, times the frequencies: b dim, float32."""
    angles = values.astype(jnp.float32)[:, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    embedding = jnp.concatenate([cos, sin] if flip_sin_to_cos else [sin, cos], axis=-1)
    return jnp.pad(embedding, ((0, 0), (0, dim % 2)))
