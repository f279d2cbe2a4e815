"""The spatial transformer of Stable Diffusion's UNet."""

from typing import Any

import jax
from flax import nnx

from diffusax.models.adapters.image_prompts import LayerImagePrompts
from diffusax.models.layers.layers import Conv2d, GroupNorm, LayerNorm, Linear, SplitLinear, project
from diffusax.models.ops.activations import gated_gelu
from diffusax.models.ops.attention import attention
from diffusax.models.streaming import streamed
from diffusax.runtime.devices.mesh import Rule, Rules

TENSOR_RULES: Rules = (
    Rule(r"to_[qkv]\.(kernel|bias)", -1, "heads"),
    Rule(r"to_out\.0\.kernel", -2, "heads"),
    Rule(r"net\.0\.proj\.kernel", -1, widths="widths"),
    (r"net\.2\.kernel", -2),
)
"""The tensor axis splits the heads, and the feed-forward's inner channels."""
OLD_ATTENTION = (
    (".query.", ".to_q."),
    (".key.", ".to_k."),
    (".value.", ".to_v."),
    (".proj_attn.", ".to_out.0."),
)
"""The names of `SpatialAttention` before diffusers 0.15, when it had a class of its own."""
ADAPTER_GROUPS = (r".*\.attn\d\.to_(q|k|v|out\.0)", r".*\.?attentions\.\d+\..*")
"""The products of attention; all layers of the transformers."""


class Attention(nnx.Module):
    """Multi-head attention. x: b t c, context: b s k -> b t c. context None: self-attention."""

    image_prompts: LayerImagePrompts | None = None
    """The IP-Adapters of a cross-attention, while a UNet is traced with some."""
    keys_values: tuple[Any, Any] | None = None
    """The keys and values of a context while a network is traced with them, see `ContextKeys`."""

    def __init__(
        self,
        c: int,
        *,
        heads: int,
        head_dim: int,
        context_dim: int | None = None,
        bias: bool = False,
        rngs: nnx.Rngs,
    ):
        self.reads_together = () if context_dim else (("to_q", "to_k", "to_v"),)
        inner, context_dim = heads * head_dim, context_dim or c
        self.heads = heads
        self.to_q = Linear(c, inner, bias=bias, rngs=rngs)
        self.to_k = Linear(context_dim, inner, bias=bias, rngs=rngs)
        self.to_v = Linear(context_dim, inner, bias=bias, rngs=rngs)
        self.to_out = nnx.List([Linear(inner, c, rngs=rngs)])

    def __call__(self, x: jax.Array, context: jax.Array | None = None) -> jax.Array:
        if context is None:
            q, k, v = project(x, self.to_q, self.to_k, self.to_v)
        elif self.keys_values is None:
            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
        else:
            q, (k, v) = self.to_q(x), self.keys_values
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in (q, k, v))
        y = attention(q, k, v)
        if self.image_prompts is not None:
            y = y + self.image_prompts.attend(q)
        return self.to_out[0](y.reshape(*x.shape[:2], -1))


class GEGLU(nnx.Module):
    """A gated linear unit with exact GELU (Shazeer 2020). x: ... c -> ... d."""

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        self.proj = SplitLinear(c, (d, d), read_together=(1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h, gate = self.proj(x)
        return gated_gelu(gate, h)


class FeedForward(nnx.Module):
    """A GEGLU to four times the width, and a layer back. x: b t c -> b t c."""

    def __init__(self, c: int, *, rngs: nnx.Rngs):
        # The checkpoint numbers the layers 0 and 2; 1 is a dropout without parameters.
        self.net: Any = nnx.List([GEGLU(c, 4 * c, rngs=rngs), None, Linear(4 * c, c, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net[2](self.net[0](x))


class BasicTransformerBlock(nnx.Module):
    """Self-attention, cross-attention, feed-forward, each after a layer norm. x: b t c -> b t c.

    With `only_cross_attention` the first attention looks at the context too.
    """

    def __init__(
        self,
        c: int,
        *,
        heads: int,
        head_dim: int,
        context_dim: int,
        only_cross_attention: bool,
        rngs: nnx.Rngs,
    ):
        self.only_cross_attention = only_cross_attention
        self.norm1 = LayerNorm(c, rngs=rngs)
        self.attn1 = Attention(
            c,
            heads=heads,
            head_dim=head_dim,
            context_dim=context_dim if only_cross_attention else None,
            rngs=rngs,
        )
        self.norm2 = LayerNorm(c, rngs=rngs)
        self.attn2 = Attention(
            c, heads=heads, head_dim=head_dim, context_dim=context_dim, rngs=rngs
        )
        self.norm3 = LayerNorm(c, rngs=rngs)
        self.ff = FeedForward(c, rngs=rngs)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        x = x + self.attn1(self.norm1(x), context if self.only_cross_attention else None)
        x = x + self.attn2(self.norm2(x), context)
        return x + self.ff(self.norm3(x))


class Transformer2DModel(nnx.Module):
    """Transformer blocks over the pixels of a map. x: b h w c, context: b s k -> b h w c.

    Upstream: diffusers models/transformers/transformer_2d.py. SD 1.x projects in and out by 1x1
    convolutions, SD 2.x and SDXL by linear layers.
    """

    def __init__(
        self,
        c: int,
        *,
        heads: int,
        layers: int,
        context_dim: int,
        groups: int,
        use_linear_projection: bool,
        only_cross_attention: bool = False,
        rngs: nnx.Rngs,
    ):
        head_dim = c // heads
        self.norm = GroupNorm(c, groups, eps=1e-6, rngs=rngs)
        self.proj_in = _projection(c, heads * head_dim, use_linear_projection, rngs)
        self.transformer_blocks = nnx.List(
            [
                BasicTransformerBlock(
                    heads * head_dim,
                    heads=heads,
                    head_dim=head_dim,
                    context_dim=context_dim,
                    only_cross_attention=only_cross_attention,
                    rngs=rngs,
                )
                for _ in range(layers)
            ]
        )
        self.proj_out = _projection(heads * head_dim, c, use_linear_projection, rngs)

    def __call__(self, x: jax.Array, context: jax.Array) -> jax.Array:
        b, height, width, _ = x.shape
        # A 1x1 convolution and a linear layer over channels are the same product in this layout.
        h = self.proj_in(self.norm(x)).reshape(b, height * width, -1)
        for block in map(streamed, self.transformer_blocks):
            h = block(h, context)
        return x + self.proj_out(h.reshape(b, height, width, -1))


def _projection(c: int, d: int, linear: bool, rngs: nnx.Rngs) -> Linear | Conv2d:
    return Linear(c, d, rngs=rngs) if linear else Conv2d(c, d, 1, rngs=rngs)


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
