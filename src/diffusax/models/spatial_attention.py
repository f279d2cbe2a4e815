"""Self-attention over the pixels of a map."""

import jax
from flax import nnx

from diffusax.models.layers import GroupNorm
from diffusax.models.transformer import Attention

_EPS = 1e-6


class SpatialAttention(Attention):
    """Single-head self-attention over the pixels of a map. x: b h w c -> b h w c."""

    def __init__(self, c: int, groups: int, *, rngs: nnx.Rngs):
        super().__init__(c, heads=1, head_dim=c, bias=True, rngs=rngs)
        self.group_norm = GroupNorm(c, groups, eps=_EPS, rngs=rngs)

    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        b, h, w, c = x.shape
        y = super().__call__(self.group_norm(x).reshape(b, h * w, c), context)
        return x + y.reshape(b, h, w, c)
