"""Wan's transformer of videos: self-attention over all frames and cross-attention to a text.

Team Wan 2025; upstream: diffusers models/transformers/transformer_wan.py. Latents are b f h w c,
and patches of them tokens, frame by frame and row by row.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import normal

from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.inputs import check_tokens, check_video
from diffusax.models.layers.layers import LayerNorm, Linear, RMSNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.attention import attention
from diffusax.models.ops.layer_input import Tokens
from diffusax.models.ops.modulation import add_gated, modulate
from diffusax.models.ops.rotation import Rotation, rotate
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    GELUFeedForward,
    split_heads,
    within_range,
)
from diffusax.models.transformers.wan_embeddings import (
    PatchEmbedding,
    WanTimeTextImageEmbedding,
    WanTransformer3DConfig,
    grid,
    token_rotation,
    video,
)
from diffusax.runtime.devices.mesh import Rules
from diffusax.runtime.devices.splitting import split_tokens

WAN_RULES: Rules = (*TENSOR_RULES, (r"add_[kv]_proj\.(kernel|bias)", -1))
"""The tensor axis splits the heads and the feed-forwards' inner channels."""
KeysValues = tuple[jax.Array, jax.Array]


class Prefix(NamedTuple):
    """What cross-attention reads of a text and of images in each block, the same in all steps."""

    text: tuple[KeysValues, ...]
    """Keys and values, b s h d each; those of VACE's blocks stand behind the others."""
    images: tuple[KeysValues, ...]
    """Those of images, b i h d each; empty where the network reads none."""


class WanAttention(nnx.Module):
    """Attention with queries and keys normalised over all heads. x: b t c -> b t c."""

    def __init__(self, config: WanTransformer3DConfig, *, cross: bool, rngs: nnx.Rngs):
        c, eps = config.width, config.eps
        self.heads = config.num_attention_heads
        self.reads_together = () if cross else (("to_q", "to_k", "to_v"),)
        self.to_q, self.to_k, self.to_v = (Linear(c, c, rngs=rngs) for _ in range(3))
        self.to_out = nnx.List([Linear(c, c, rngs=rngs)])
        self.norm_q, self.norm_k = (RMSNorm(c, eps=eps, rngs=rngs) for _ in range(2))
        d = config.added_kv_proj_dim if cross else None
        self.add_k_proj = Linear(d, c, rngs=rngs) if d else None
        self.add_v_proj = Linear(d, c, rngs=rngs) if d else None
        self.norm_added_k = RMSNorm(c, eps=eps, rngs=rngs) if d else None

    def __call__(self, x: Tokens, rotation: Rotation) -> jax.Array:
        """Attends to all tokens. rotation: their positions, 1 t d/2."""
        q, k, v = split_heads(x, (self.to_q, self.to_k, self.to_v), 1)
        q, k = (self._in_heads(norm(y)) for norm, y in ((self.norm_q, q), (self.norm_k, k)))
        y = attention(rotate(q, rotation), rotate(k, rotation), self._in_heads(v))
        return self.to_out[0](y.reshape(*x.shape[:2], -1))

    def _in_heads(self, y: jax.Array) -> jax.Array:
        return y.reshape(*y.shape[:2], self.heads, -1)


class WanCrossAttention(WanAttention):
    """Attention to a text, and apart from it to images. x: b t c -> b t c."""

    def __init__(self, config: WanTransformer3DConfig, *, rngs: nnx.Rngs):
        super().__init__(config, cross=True, rngs=rngs)

    def __call__(  # type: ignore[override]
        self, x: jax.Array, text: KeysValues, images: KeysValues | None
    ) -> jax.Array:
        """Attends to what `read` and `read_images` return."""
        q = self._in_heads(self.norm_q(self.to_q(x)))
        y = attention(q, *text)
        if images is not None:
            y = y + attention(q, *images)
        return self.to_out[0](y.reshape(*x.shape[:2], -1))

    def read(self, text: jax.Array) -> KeysValues:
        """Returns the keys and values of a text, b s c."""
        return self._in_heads(self.norm_k(self.to_k(text))), self._in_heads(self.to_v(text))

    def read_images(self, tokens: jax.Array) -> KeysValues:
        """Returns the keys and values of images, b i c."""
        assert self.add_k_proj is not None
        assert self.add_v_proj is not None
        assert self.norm_added_k is not None
        k = self.norm_added_k(self.add_k_proj(tokens))
        return self._in_heads(k), self._in_heads(self.add_v_proj(tokens))


class WanTransformerBlock(nnx.Module):
    """Self-attention and a feed-forward layer, modulated by the time, and cross-attention between.

    x: b t c -> b t c.
    """

    def __init__(self, config: WanTransformer3DConfig, *, rngs: nnx.Rngs):
        c = config.width
        self.eps = config.eps
        self.attn1 = WanAttention(config, cross=False, rngs=rngs)
        self.attn2 = WanCrossAttention(config, rngs=rngs)
        self.norm2 = LayerNorm(c, eps=config.eps, rngs=rngs) if config.cross_attn_norm else None
        self.ffn = GELUFeedForward(c, config.ffn_dim, rngs=rngs)
        self.scale_shift_table = _table(6, c, rngs)

    def __call__(
        self,
        x: jax.Array,
        temb: jax.Array,
        rotation: Rotation,
        text: KeysValues,
        images: KeysValues | None,
    ) -> jax.Array:
        """Returns the next block's tokens.

        Args:
            x: b t c.
            temb: b 1 6 c, or b t 6 c where tokens have times of their own, float32.
            rotation: the positions of the tokens, 1 t d/2.
            text: see `Prefix`.
            images: see `Prefix`.
        """
        shift, scale, gate, ff_shift, ff_scale, ff_gate = _parts(self.scale_shift_table, temb, x)
        y = self.attn1(modulate(x, shift, scale, eps=self.eps), rotation)
        x = add_gated(x, gate, y)
        x = x + self.attn2(x if self.norm2 is None else self.norm2(x), text, images)
        y = self.ffn(modulate(x, ff_shift, ff_scale, eps=self.eps))
        return within_range(add_gated(x, ff_gate, y))


class WanTransformer3DModel(nnx.Module):
    """Predicts the flow from videos to noise in latents, for a text and perhaps given frames."""

    config_class = WanTransformer3DConfig
    tensor_rules = WAN_RULES
    adapter_groups = (
        r".*\.attn\d\.(to_(q|k|v|out\.0)|add_(k|v)_proj)",
        r"blocks\..*",
    )
    # Some files have a norm that nothing reads, as in diffusers.
    ignored_keys = ("norm_added_q.weight",)
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""

    def __init__(self, config: WanTransformer3DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config.width
        self.patch_embedding = PatchEmbedding(config, config.in_channels, rngs=rngs)
        self.condition_embedder = WanTimeTextImageEmbedding(config, rngs=rngs)
        self.blocks = nnx.List(
            [WanTransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.proj_out = Linear(
            c, config.predicted_channels * math.prod(config.patch_size), rngs=rngs
        )
        self.scale_shift_table = _table(2, c, rngs)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        text: jax.Array | None = None,
        images: jax.Array | None = None,
        *,
        prefix: Prefix | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b f h w c, in the dtype of the parameters.

        Args:
            x: the latents, and what is given beside them, b f h w in_channels.
            timestep: b, from 1000 for noise to 0 for a video, or b t, for each token.
            text: the text encoder's hidden states, b s text_dim, all of which are read.
            images: CLIP's hidden states of the first image, b i image_dim, or of the first and the
                last, (2 b) i image_dim; None for a network that reads none.
            prefix: what `prefix` returned for text and images, which are left out then.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        prefix = self._known(text, images, prefix)
        return self._predict(x, timestep, prefix, gradient_checkpointing != "none")

    def _known(
        self, text: jax.Array | None, images: jax.Array | None, prefix: Prefix | None
    ) -> Prefix:
        if prefix is not None:
            return prefix
        if text is None:
            raise ValueError("text must be given, or the prefix of one")
        return self.prefix(text, images)

    def _predict(
        self,
        x: jax.Array,
        timestep: jax.Array,
        prefix: Prefix,
        remat: bool,
        control: Any = None,
    ) -> jax.Array:
        check_video("x", x, self.config.in_channels)
        size = grid(x.shape[1:4], self.config)
        if timestep.shape not in ((len(x),), (len(x), math.prod(size))):
            raise ValueError(
                f"timestep must have one number for each of {len(x)} videos, or one for each of "
                f"their {math.prod(size)} tokens (got shape {timestep.shape})"
            )
        temb, each = self.condition_embedder.of_time(timestep)
        rotation = token_rotation(size, self.config)
        tokens = split_tokens(self.patch_embedding(x))
        images = prefix.images or (None,) * len(prefix.text)
        known = list(zip(prefix.text, images, strict=True))

        def call(i: int, y: jax.Array) -> jax.Array:
            return rematerialized(self.blocks[i], remat)(y, each, rotation, *known[i])

        def first(y: jax.Array) -> tuple[jax.Array]:
            return (call(0, y),)

        def rest(y: jax.Array) -> jax.Array:
            # What a control adds is left out with the blocks that it adds to.
            gains = self._gains(control, tokens, each, rotation, known, remat)
            for i in range(len(self.blocks)):
                y = call(i, y) if i else y
                y = y + gains[i] if i in gains else y
            return y

        y = through_blocks(self, (tokens,), [first] if self.blocks else [], rest)
        shift, scale = _parts(self.scale_shift_table, temb.astype(jnp.float32)[:, :, None], y)
        y = self.proj_out(modulate(y, shift, scale, eps=self.config.eps))
        return video(y, size, self.config.patch_size)

    def prefix(self, text: jax.Array, images: jax.Array | None = None) -> Prefix:
        """Returns what cross-attention reads of a text and of images; arguments as of a call.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        config, embed = self.config, self.condition_embedder
        check_tokens("text", text, {config.text_dim})
        dtype = embed.time_proj.kernel.get_value().dtype
        tokens = embed.text_embedder(text.astype(dtype))
        attentions = [block.attn2 for block in self._readers()]
        of_text = tuple(own.read(tokens) for own in attentions)
        if embed.image_embedder is None:
            if images is not None:
                raise ValueError("images must be None: the network reads a text alone")
            return Prefix(of_text, ())
        if images is None:
            raise ValueError("images must be given to a network with image_dim")
        check_tokens("images", images, {config.image_dim or 0})
        seen = embed.image_embedder(images.astype(dtype))
        return Prefix(of_text, tuple(own.read_images(seen) for own in attentions))

    def _readers(self) -> list[WanTransformerBlock]:
        """Returns the blocks that read the text, in the order of `Prefix`."""
        return [*self.blocks]

    def _gains(self, *given: Any) -> dict[int, jax.Array]:
        """Returns what the outputs of blocks gain from a control, of which it reads none."""
        return {}


def _table(count: int, c: int, rngs: nnx.Rngs) -> nnx.Param[Any]:
    """Returns what is added to modulations that follow from the time, 1 count c."""
    make = shaped(normal(c**-0.5))
    return nnx.Param(make(rngs.params(), (1, count, c), jnp.float32))


def _parts(table: Any, temb: jax.Array, x: jax.Array) -> list[jax.Array]:
    """Returns a table with the time's part added, n arrays b t c in x's dtype.

    table: 1 n c; temb: b t n c, or b t 1 c for all.
    """
    rows: Any = table[...].astype(jnp.float32)
    found = (rows[:, None] + temb).astype(x.dtype)
    return [found[:, :, i] for i in range(found.shape[2])]
