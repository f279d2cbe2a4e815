"""Embeds timesteps and other scalars."""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.layers import Linear


def timestep_embedding(
    timesteps: jax.Array, dim: int, *, flip_sin_to_cos: bool = True, freq_shift: float = 0.0
) -> jax.Array:
    """Computes sinusoidal embeddings (Vaswani et al. 2017, 3.5). timesteps: b -> b dim, float32.

    Upstream: diffusers models/embeddings.py, get_timestep_embedding.
    """
    half = dim // 2
    frequencies = jnp.exp(
        -math.log(10000.0) * jnp.arange(half, dtype=jnp.float32) / (half - freq_shift)
    )
    angles = timesteps.astype(jnp.float32)[:, None] * frequencies
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    embedding = jnp.concatenate([cos, sin] if flip_sin_to_cos else [sin, cos], axis=-1)
    return jnp.pad(embedding, ((0, 0), (0, dim % 2)))


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
    frequencies = jnp.exp(-math.log(10000.0) / (half - 1) * jnp.arange(half, dtype=jnp.float32))
    angles = 1000.0 * scale.astype(jnp.float32)[:, None] * frequencies
    embedding = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
    return jnp.pad(embedding, ((0, 0), (0, dim % 2)))
