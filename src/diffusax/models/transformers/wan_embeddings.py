"""What Wan's transformer reads, as tokens: videos, times, texts and images; and its options.

Team Wan 2025; upstream: diffusers models/transformers/transformer_wan.py. Latents are b f h w c,
and patches of them tokens, frame by frame and row by row.
"""

import dataclasses
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.nn.initializers import lecun_normal, normal, zeros
from msgspec import Meta

from diffusax.boundary.config import Channels, Epsilon, Heads, Keyed, check_types
from diffusax.models.adapters.low_rank import Base, LowRank, Mixed
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.layers import LayerNorm, Linear
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.activations import approximate_gelu, gelu
from diffusax.models.ops.matmul import matmul
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import (
    rotation_at,
)

Patch = Annotated[tuple[Annotated[int, Meta(ge=1, le=16)], ...], Meta(min_length=3, max_length=3)]


@dataclasses.dataclass(frozen=True)
class WanTransformer3DConfig(Keyed):
    """The options of diffusers' WanTransformer3DModel."""

    class_name: ClassVar[str] = "WanTransformer3DModel"
    fixed: ClassVar[dict[str, Any]] = {"qk_norm": "rms_norm_across_heads"}
    # The converter's own, which diffusers' network does not read.
    ignored: ClassVar[frozenset[str]] = frozenset({"model_type", "add_img_emb"})

    patch_size: Patch = (1, 2, 2)
    """The frames, rows and columns of latents of a token."""
    num_attention_heads: Heads = 40
    attention_head_dim: Channels = 128
    in_channels: Channels = 16
    """The channels of the input: latents, and perhaps a mask and the latents of given frames."""
    out_channels: Channels | None = 16
    """The channels of the predicted latents; None for as many as in_channels."""
    text_dim: Channels = 4096
    """The width of the text encoder's hidden states."""
    freq_dim: Channels = 256
    """The sinusoids of a time."""
    ffn_dim: Channels = 13824
    num_layers: Annotated[int, Meta(ge=0, le=128)] = 40
    cross_attn_norm: bool = True
    eps: Epsilon = 1e-6
    image_dim: Channels | None = None
    """The width of CLIP's hidden states of an image; None for a network that reads none."""
    added_kv_proj_dim: Channels | None = None
    """The width of an image's tokens in cross-attention; None for a network that reads none."""
    rope_max_seq_len: Annotated[int, Meta(ge=1, le=2**20)] = 1024
    """The most tokens of a video along each axis."""
    pos_embed_seq_len: Annotated[int, Meta(ge=1, le=2**20)] | None = None
    """The tokens of the first and the last image together, which have embeddings of their places;
    None where they have none."""

    def __post_init__(self) -> None:
        check_types(self)
        if self.attention_head_dim % 2:
            raise ValueError(f"attention_head_dim={self.attention_head_dim} must be even")
        if (self.image_dim is None) != (self.added_kv_proj_dim is None):
            raise ValueError(
                "image_dim and added_kv_proj_dim must both be given or both be None (got "
                f"{self.image_dim} and {self.added_kv_proj_dim})"
            )

    @property
    def width(self) -> int:
        """The channels of tokens between the blocks."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def axes_dims(self) -> tuple[int, int, int]:
        """The channels of a head for the frame, the row and the column."""
        side = 2 * (self.attention_head_dim // 6)
        return self.attention_head_dim - 2 * side, side, side

    @property
    def predicted_channels(self) -> int:
        """The channels of the predicted latents."""
        return self.out_channels or self.in_channels


class PatchEmbedding(nnx.Module):
    """A linear layer of patches of a video, stored as a convolution. b f h w c -> b t d."""

    adapters: LowRank | Mixed | None = None
    """The layer's adapters, or those in training, while a network is traced with some."""

    def __init__(self, config: WanTransformer3DConfig, channels: int, *, rngs: nnx.Rngs):
        make, d = rngs.params, config.width
        shape = (*config.patch_size, channels, d)
        self.kernel = nnx.Param(shaped(lecun_normal())(make(), shape, jnp.float32))
        self.bias = nnx.Param(shaped(zeros)(make(), (d,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.kernel[...]
        bias: Any = self.bias[...]
        tokens = patches(x.astype(kernel.dtype), kernel.shape[:3])
        rows = kernel.reshape(-1, kernel.shape[-1])
        y = matmul(tokens, rows, bias)
        if (own := self.adapters) is None:
            return y
        own = own._replace(down=own.down.reshape(-1, own.down.shape[-1]))
        return y + own.linear(tokens, Base(y, rows, bias))


class TextProjection(nnx.Module):
    """Two linear layers with the approximate GELU between them. x: b s d -> b s c."""

    def __init__(self, d: int, c: int, *, rngs: nnx.Rngs):
        self.linear_1 = Linear(d, c, rngs=rngs)
        self.linear_2 = Linear(c, c, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_2(approximate_gelu(self.linear_1(x)))


class ExactGELU(nnx.Module):
    """A linear layer and the GELU. x: ... c -> ... d."""

    def __init__(self, c: int, d: int, *, rngs: nnx.Rngs):
        self.proj = Linear(c, d, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return gelu(self.proj(x))


class ImageFeedForward(nnx.Module):
    """A layer with GELU of the same width, and a layer to another. x: ... d -> ... c."""

    def __init__(self, d: int, c: int, *, rngs: nnx.Rngs):
        # The checkpoint numbers the layers 0 and 2; 1 is a dropout without parameters.
        self.net: Any = nnx.List([ExactGELU(d, d, rngs=rngs), None, Linear(d, c, rngs=rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.net[2](self.net[0](x))


class ImageEmbedding(nnx.Module):
    """CLIP's hidden states of images as tokens, (b n) i d -> b (n i) c for n images of a video.

    n is 2, for the first and the last frame, in a network with embeddings of places, and else 1.
    """

    def __init__(self, config: WanTransformer3DConfig, *, rngs: nnx.Rngs):
        d, c, places = config.image_dim, config.width, config.pos_embed_seq_len
        assert d is not None
        self.norm1 = LayerNorm(d, rngs=rngs)
        self.ff = ImageFeedForward(d, c, rngs=rngs)
        self.norm2 = LayerNorm(c, rngs=rngs)
        self.pos_embed = None if places is None else _places(places, d, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        if self.pos_embed is not None:
            places: Any = self.pos_embed[...]
            x = x.reshape(-1, 2 * x.shape[1], x.shape[2]) + places
        return self.norm2(self.ff(self.norm1(x)))


class WanTimeTextImageEmbedding(nnx.Module):
    """What the time, a text and images are to the blocks."""

    def __init__(self, config: WanTransformer3DConfig, *, rngs: nnx.Rngs):
        c = config.width
        self.channels = config.freq_dim
        self.time_embedder = TimestepEmbedding(config.freq_dim, c, rngs=rngs)
        self.time_proj = Linear(c, 6 * c, rngs=rngs)
        self.text_embedder = TextProjection(config.text_dim, c, rngs=rngs)
        reads = config.image_dim is not None
        self.image_embedder = ImageEmbedding(config, rngs=rngs) if reads else None

    def of_time(self, timestep: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the embedded time, b t c, and the blocks' modulations of it, b t 6 c, float32.

        timestep: b, where t is 1, or b t.
        """
        waves = timestep_embedding(timestep.reshape(-1), self.channels)
        times = waves.reshape(len(timestep), -1, self.channels)
        temb = self.time_embedder(times.astype(self.time_proj.kernel.get_value().dtype))
        each = self.time_proj(nnx.silu(temb)).reshape(*temb.shape[:2], 6, -1)
        return temb, each.astype(jnp.float32)


def _places(count: int, d: int, rngs: nnx.Rngs) -> nnx.Param[Any]:
    """Returns embeddings of the places of tokens, 1 count d."""
    make = shaped(normal(0.02))
    return nnx.Param(make(rngs.params(), (1, count, d), jnp.float32))


def grid(size: tuple[int, ...], config: WanTransformer3DConfig) -> tuple[int, int, int]:
    """Returns the frames, rows and columns of tokens of latents of a size, f h w.

    Raises:
        ValueError: patches do not divide it, or there are more than the network has positions for.
    """
    patch = config.patch_size
    if any(n % own for n, own in zip(size, patch)):
        raise ValueError(
            f"x must have frames, rows and columns that patches of {patch} divide (got {size})"
        )
    frames, rows, columns = (n // own for n, own in zip(size, patch))
    if max(frames, rows, columns) > config.rope_max_seq_len:
        raise ValueError(
            f"x must have at most {config.rope_max_seq_len} tokens along each axis (got "
            f"{frames}, {rows} and {columns})"
        )
    return frames, rows, columns


def token_rotation(size: tuple[int, int, int], config: WanTransformer3DConfig) -> Rotation:
    """Returns the rotations of tokens by their frame, row and column, 1 t d/2."""
    ids = np.stack(np.meshgrid(*map(np.arange, size), indexing="ij"), -1).reshape(-1, 3)
    return rotation_at(ids, config.axes_dims, 10000.0)


def patches(x: jax.Array, patch: tuple[int, ...]) -> jax.Array:
    """Cuts videos into patches. x: b f h w c -> b t (p q r c) for patches of p q r."""
    b, *size, c = x.shape
    (f, p), (h, q), (w, r) = ((n // own, own) for n, own in zip(size, patch))
    cut = x.reshape(b, f, p, h, q, w, r, c).transpose(0, 1, 3, 5, 2, 4, 6, 7)
    return cut.reshape(b, f * h * w, -1)


def video(x: jax.Array, size: tuple[int, int, int], patch: tuple[int, ...]) -> jax.Array:
    """Inverts `patches` for a grid of tokens. x: b t (p q r c) -> b f h w c."""
    cut = x.reshape(len(x), *size, *patch, -1).transpose(0, 1, 4, 2, 5, 3, 6, 7)
    return cut.reshape(len(x), *(n * own for n, own in zip(size, patch)), -1)
