"""What Krea 2's text goes through before it stands beside an image.

The blocks after that have the same attention and feed-forward layers.

Upstream: diffusers models/transformers/transformer_krea2.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.layers.layers import CentredRMSNorm, Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.activations import approximate_gelu, gated_silu
from diffusax.models.ops.rotation import Rotation, rotate
from diffusax.models.transformers.configs import Krea2Transformer2DConfig
from diffusax.models.transformers.references import KeysValues, attend


class Krea2Attention(nnx.Module):
    """Self-attention with normalised queries and keys, and a gate of its output. x: b t c -> b t c.

    Each head of keys serves several heads of queries (Ainslie et al. 2023).
    """

    def __init__(self, c: int, *, heads: int, key_heads: int, eps: float, rngs: nnx.Rngs):
        d, options = c // heads, dict[str, Any](bias=False, rngs=rngs)
        self.heads, self.key_heads = heads, key_heads
        self.to_q = Linear(c, c, **options)
        self.to_k = Linear(c, d * key_heads, **options)
        self.to_v = Linear(c, d * key_heads, **options)
        self.to_gate = Linear(c, c, **options)
        self.norm_q = CentredRMSNorm(d, eps=eps, rngs=rngs)
        self.norm_k = CentredRMSNorm(d, eps=eps, rngs=rngs)
        self.to_out = nnx.List([Linear(c, c, **options)])

    def __call__(
        self,
        x: jax.Array,
        lengths: jax.Array | None = None,
        rotation: Rotation | None = None,
        *,
        window: int | None = None,
        before: KeysValues | None = None,
    ) -> jax.Array:
        """Attends to tokens.

        Args:
            x: b t c.
            lengths: how many of the first tokens are attended to, b; None for all of them.
            rotation: the tokens' positions; None for none.
            window: the number of tokens that follow each other and attend to each other alone;
                None for all.
            before: further keys and values, which all tokens attend to.
        """
        return self.with_keys(x, lengths, rotation, window=window, before=before)[0]

    def with_keys(
        self,
        x: jax.Array,
        lengths: jax.Array | None = None,
        rotation: Rotation | None = None,
        *,
        window: int | None = None,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, KeysValues]:
        """Returns what tokens read, and their keys, rotated, and values; see a call."""
        b, t, c = x.shape
        d = c // self.heads
        q, k, v = (layer(x).reshape(b, t, -1, d) for layer in (self.to_q, self.to_k, self.to_v))
        q, k = self.norm_q(q), self.norm_k(k)
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if window is not None:
            q, k, v = (y.reshape(-1, window, *y.shape[2:]) for y in (q, k, v))
        y = attend(q, k, v, before, lengths).reshape(b, t, c)
        return self.to_out[0](y * nnx.sigmoid(self.to_gate(x))), (k, v)


class SwiGLU(nnx.Module):
    """A feed-forward layer gated by SiLU (Shazeer 2020). x: ... c -> ... c."""

    def __init__(self, c: int, inner: int, *, rngs: nnx.Rngs):
        self.gate = Linear(c, inner, bias=False, rngs=rngs)
        self.up = Linear(c, inner, bias=False, rngs=rngs)
        self.down = Linear(inner, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(gated_silu(self.gate(x), self.up(x)))


class Krea2TextFusionBlock(nnx.Module):
    """Attention and feed-forward, each after a norm. x: b t c -> b t c."""

    def __init__(self, config: Krea2Transformer2DConfig, *, rngs: nnx.Rngs):
        c, eps = config.text_hidden_dim, config.norm_eps
        self.norm1 = CentredRMSNorm(c, eps=eps, rngs=rngs)
        self.norm2 = CentredRMSNorm(c, eps=eps, rngs=rngs)
        heads, key_heads = config.text_num_attention_heads, config.text_num_key_value_heads
        self.attn = Krea2Attention(c, heads=heads, key_heads=key_heads, eps=eps, rngs=rngs)
        self.ff = SwiGLU(c, config.text_intermediate_size, rngs=rngs)

    def __call__(
        self, x: jax.Array, lengths: jax.Array | None, window: int | None = None
    ) -> jax.Array:
        """Returns the next block's tokens, b t c. See `Krea2Attention`."""
        x = x + self.attn(self.norm1(x), lengths, window=window)
        return x + self.ff(self.norm2(x))


class Krea2TextFusion(nnx.Module):
    """Makes one hidden state of several of each token, and lets tokens attend to each other."""

    def __init__(self, config: Krea2Transformer2DConfig, *, rngs: nnx.Rngs):
        def blocks(count: int) -> nnx.List[Krea2TextFusionBlock]:
            return nnx.List([Krea2TextFusionBlock(config, rngs=rngs) for _ in range(count)])

        self.layerwise_blocks = blocks(config.num_layerwise_text_blocks)
        self.projector = Linear(config.num_text_layers, 1, bias=False, rngs=rngs)
        self.refiner_blocks = blocks(config.num_refiner_text_blocks)

    def __call__(self, x: jax.Array, lengths: jax.Array, *, remat: bool = False) -> jax.Array:
        """Returns the text, b s d.

        Args:
            x: l hidden states of each token, b s l d.
            lengths: the number of tokens that are not padding, b.
            remat: whether gradients compute the activations of blocks again.
        """
        b, s, count, d = x.shape
        x = x.reshape(b, s * count, d)
        for block in self.layerwise_blocks:
            own = rematerialized(lambda y, block=block: block(y, None, count), remat)
            x = own(x)
        x = self.projector(jnp.swapaxes(x.reshape(b, s, count, d), 2, 3))[..., 0]
        for block in self.refiner_blocks:
            x = rematerialized(block, remat)(x, lengths)
        return x


class Krea2TextProjection(nnx.Module):
    """A norm, linear, approximate GELU, linear. x: b s d -> b s c."""

    def __init__(self, d: int, c: int, *, eps: float, rngs: nnx.Rngs):
        self.norm = CentredRMSNorm(d, eps=eps, rngs=rngs)
        self.linear_1 = Linear(d, c, rngs=rngs)
        self.linear_2 = Linear(c, c, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(approximate_gelu(self.linear_1(self.norm(x))))
