"""Self-attention over the pixels of a map."""

import jax
from flax import nnx

from diffusax.models.layers import GroupNorm
from diffusax.models.transformer import Attention


class SpatialAttention(Attention):
    """Normalised self-attention over the pixels of a map, added to it. x: b h w c -> b h w c.

    Upstream: diffusers models/attention_processor.py, Attention with residual_connection.
    """

    def __init__(
        self,
        c: int,
        groups: int | None,
        *,
        heads: int = 1,
        head_dim: int | None = None,
        eps: float = 1e-6,
        output_scale_factor: float = 1.0,
        rngs: nnx.Rngs,
    ):
        """Builds the layers.

        groups: the groups of the norm; None for no norm. head_dim: the width of a head, c by
        default. output_scale_factor: the sum of the map and its attention is divided by it.
        """
        super().__init__(c, heads=heads, head_dim=head_dim or c, bias=True, rngs=rngs)
        self.group_norm = None if groups is None else GroupNorm(c, groups, eps=eps, rngs=rngs)
        self.output_scale_factor = output_scale_factor

    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        b, h, w, c = x.shape
        normed = x if self.group_norm is None else self.group_norm(x)
        y = super().__call__(normed.reshape(b, h * w, c), context)
        return (x + y.reshape(b, h, w, c)) / self.output_scale_factor
