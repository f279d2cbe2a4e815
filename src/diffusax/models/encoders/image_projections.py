"""The networks of IP-Adapters (Ye et al. 2023) that turn features of an image into tokens.

Their attributes have the names in IP-Adapters' files. Upstream: diffusers models/embeddings.py,
ImageProjection, IPAdapterFullImageProjection and IPAdapterPlusImageProjection.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal

from diffusax.models.layers.layers import LayerNorm, Linear
from diffusax.models.layers.rngs import shaped
from diffusax.models.network import Network
from diffusax.models.ops.activations import gelu
from diffusax.models.ops.attention import attention

TOKENS = 4
"""The tokens of an image in plain IP-Adapters."""
_HEAD_DIM = 64

Shapes = Mapping[str, tuple[int, ...]]
"""The shapes of a file's tensors by name, without the prefix image_proj."""


@dataclasses.dataclass(frozen=True)
class ImageProjectionConfig:
    """The widths of an image projection."""

    embed_dim: int
    """The width of the image encoder's features."""
    context_dim: int
    """The width of the tokens, which is that of the UNet's context."""
    tokens: int = TOKENS
    """The tokens of an image; a full projection has as many as features."""
    width: int = 0
    """The width inside a resampler."""
    inner: int = 0
    """The width of all heads of a resampler."""
    feed_forward: int = 0
    """The width of a resampler's feed-forward layers."""
    layers: int = 0
    """The number of a resampler's layers."""


class ImageProjection(nnx.Module):
    """A linear layer to four tokens, and a norm. The embedding of an image, b e -> b 4 d."""

    hidden = False
    """Whether it reads the encoder's hidden states instead of its embedding."""

    def __init__(self, config: ImageProjectionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.proj = Linear(config.embed_dim, config.tokens * config.context_dim, rngs=rngs)
        self.norm = LayerNorm(config.context_dim, rngs=rngs)

    def __call__(self, image_embeds: jax.Array) -> jax.Array:
        x = self.proj(image_embeds)
        return self.norm(x.reshape(x.shape[0], self.config.tokens, -1))


class FullImageProjection(nnx.Module):
    """Two layers for each hidden state of an image, b s e -> b s d."""

    hidden = True

    def __init__(self, config: ImageProjectionConfig, *, rngs: nnx.Rngs):
        e, d = config.embed_dim, config.context_dim
        self.config = config
        # The checkpoint's number 1 is a GELU without parameters.
        layers = [
            Linear(e, e, rngs=rngs), None, Linear(e, d, rngs=rngs), LayerNorm(d, rngs=rngs)
        ]  # fmt: skip
        self.proj: Any = nnx.List(layers)

    def __call__(self, image_embeds: jax.Array) -> jax.Array:
        first, _, second, norm = self.proj
        return norm(second(gelu(first(image_embeds))))


class PerceiverAttention(nnx.Module):
    """Attention of latents to an image and to themselves. x: b s c, latents: b t c -> b t c."""

    def __init__(self, config: ImageProjectionConfig, *, rngs: nnx.Rngs):
        c, inner = config.width, config.inner
        self.norm1 = LayerNorm(c, rngs=rngs)
        self.norm2 = LayerNorm(c, rngs=rngs)
        self.to_q = Linear(c, inner, bias=False, rngs=rngs)
        self.to_kv = Linear(c, 2 * inner, bias=False, rngs=rngs)
        self.to_out = Linear(inner, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, latents: jax.Array) -> jax.Array:
        latents = self.norm2(latents)
        both = jnp.concatenate([self.norm1(x), latents], axis=1)
        k, v = jnp.split(self.to_kv(both), 2, axis=-1)
        q, k, v = (y.reshape(*y.shape[:2], -1, _HEAD_DIM) for y in (self.to_q(latents), k, v))
        return self.to_out(attention(q, k, v).reshape(*latents.shape[:2], -1))


class PlusImageProjection(nnx.Module):
    """A resampler (Alayrac et al. 2022): learned latents that attend to an image's hidden states.

    b s e -> b t d.
    """

    hidden = True
    # A few files have diffusers' names.
    legacy_names = (
        (".attn.to_", ".0.to_"),
        (".ln0.", ".0.norm1."),
        (".ln1.", ".0.norm2."),
        (".ff.0.", ".1.0."),
        (".ff.1.net.0.proj.", ".1.1."),
        (".ff.1.net.2.", ".1.3."),
    )

    def __init__(self, config: ImageProjectionConfig, *, rngs: nnx.Rngs):
        c, f = config.width, config.feed_forward
        self.config = config
        latents = shaped(normal(c**-0.5))(rngs.params(), (1, config.tokens, c), jnp.float32)
        self.latents = nnx.Param(latents)
        self.proj_in = Linear(config.embed_dim, c, rngs=rngs)
        self.proj_out = Linear(c, config.context_dim, rngs=rngs)
        self.norm_out = LayerNorm(config.context_dim, rngs=rngs)
        blocks = []
        for _ in range(config.layers):
            # The checkpoint's number 2 is a GELU without parameters.
            feed_forward = [
                LayerNorm(c, rngs=rngs),
                Linear(c, f, bias=False, rngs=rngs),
                None,
                Linear(f, c, bias=False, rngs=rngs),
            ]
            attention_layer = PerceiverAttention(config, rngs=rngs)
            blocks.append(nnx.List([attention_layer, nnx.List(feed_forward)]))
        self.layers: Any = nnx.List(blocks)

    def __call__(self, image_embeds: jax.Array) -> jax.Array:
        x = self.proj_in(image_embeds)
        latents = jnp.broadcast_to(self.latents[...], (x.shape[0], *self.latents.shape[1:]))
        for attend, (norm, first, _, second) in self.layers:
            latents = attend(x, latents) + latents
            latents = second(gelu(first(norm(latents)))) + latents
        return self.norm_out(self.proj_out(latents))


def projection_of(shapes: Shapes) -> Network:
    """Returns the network of an IP-Adapter's image projection, by the tensors in its file.

    Raises:
        ValueError: the tensors are of a FaceID adapter, or of none that is known.
    """
    if "perceiver_resampler.proj_in.weight" in shapes or (
        "norm.weight" in shapes and "proj.2.weight" in shapes
    ):
        raise ValueError(
            "it is a FaceID adapter, which diffusax does not support: it reads a face "
            "recognition's features; use an IP-Adapter that reads CLIP's, such as plus-face"
        )
    if any(0 in shape for shape in shapes.values()):
        raise ValueError("a tensor of its image projection is empty")
    try:
        if "proj.weight" in shapes:
            wide, embed_dim = shapes["proj.weight"]
            config = ImageProjectionConfig(embed_dim, wide // TOKENS)
            return Network(ImageProjection, config)
        if "proj.3.weight" in shapes:
            context_dim, embed_dim = shapes["proj.2.weight"]
            return Network(FullImageProjection, ImageProjectionConfig(embed_dim, context_dim))
        return Network(PlusImageProjection, _resampler(shapes))
    except (KeyError, ValueError, IndexError):
        raise ValueError("its image projection is none that diffusax knows") from None


def _resampler(shapes: Shapes) -> ImageProjectionConfig:
    _, tokens, width = shapes["latents"]
    _, embed_dim = shapes["proj_in.weight"]
    context_dim, _ = shapes["proj_out.weight"]
    attends = "0.attn" if "layers.0.attn.to_q.weight" in shapes else "0.0"
    expands = "0.ff.1.net.0.proj" if "layers.0.ff.1.net.0.proj.weight" in shapes else "0.1.1"
    inner, _ = shapes[f"layers.{attends}.to_q.weight"]
    feed_forward, _ = shapes[f"layers.{expands}.weight"]
    layers = 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers."))
    if inner % _HEAD_DIM or not 0 < layers <= len(shapes):
        raise ValueError("its heads are not 64 wide")
    return ImageProjectionConfig(embed_dim, context_dim, tokens, width, inner, feed_forward, layers)
