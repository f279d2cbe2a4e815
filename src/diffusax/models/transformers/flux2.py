"""FLUX.2's transformer: text and image tokens, first apart, then in one stream (BFL 2025).

Upstream: diffusers models/transformers/transformer_flux2.py.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import Linear, RMSNorm, SplitLinear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.activations import gated_silu
from diffusax.models.ops.layer_input import Tokens
from diffusax.models.ops.modulation import add_gated, gated_layer, modulate
from diffusax.models.ops.rotation import Rotation, rotate
from diffusax.models.streaming import streamed
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    JoinedLinear,
    JointAttention,
    Modulation,
    activations,
    rotation_at,
    within_range,
)
from diffusax.models.transformers.configs import Flux2Transformer2DConfig
from diffusax.models.transformers.references import KeysValues, attend
from diffusax.runtime.devices.mesh import Rule, Rules
from diffusax.runtime.devices.splitting import split_tokens

REFERENCE_TIMES = 10
"""The distance between images to look at on the first of the four axes of positions."""
_EPS = 1e-6

FLUX2_RULES: Rules = (
    *TENSOR_RULES,
    Rule(r"linear_in\.kernel", -1, widths="widths"),
    Rule(r"to_qkv_mlp_proj\.kernel", -1, widths="widths"),
    (r"linear_out\.kernel", -2),
    Rule(r"attn\.to_out\.kernel", -2, widths="widths"),
)
"""The tensor axis splits the heads, and the feed-forwards' inner channels."""


class Prefix(NamedTuple):
    """What a step reads of images to look at that were read before: keys and values of blocks."""

    double: tuple[KeysValues, ...]
    single: tuple[KeysValues, ...]


class TimeGuidanceEmbedding(nnx.Module):
    """Embeds the time and, for models that are told it, the guidance scale; their sum is b c."""

    def __init__(self, config: Flux2Transformer2DConfig, *, rngs: nnx.Rngs):
        self.channels, c = config.timestep_guidance_channels, config.width
        self.timestep_embedder = TimestepEmbedding(self.channels, c, bias=False, rngs=rngs)
        self.guidance_embedder = (
            TimestepEmbedding(self.channels, c, bias=False, rngs=rngs)
            if config.guidance_embeds
            else None
        )

    def __call__(self, timestep: jax.Array, guidance: jax.Array | None) -> jax.Array:
        """timestep: b, from 1 for noise to 0. guidance: b, the scale."""
        temb = self.timestep_embedder(timestep_embedding(1000 * timestep, self.channels))
        if self.guidance_embedder is None:
            return temb
        if guidance is None:
            raise ValueError("guidance must be given to a transformer with guidance_embeds")
        return temb + self.guidance_embedder(timestep_embedding(1000 * guidance, self.channels))


class Flux2FeedForward(nnx.Module):
    """A feed-forward layer gated by SiLU (Shazeer 2020). x: ... c -> ... c."""

    def __init__(self, c: int, inner: int, *, rngs: nnx.Rngs):
        self.linear_in = SplitLinear(c, (inner, inner), bias=False, rngs=rngs)
        self.linear_out = Linear(inner, c, bias=False, rngs=rngs)

    def __call__(self, x: Tokens) -> jax.Array:
        gate, h = self.linear_in(x)
        return self.linear_out(gated_silu(gate, h))


class Flux2TransformerBlock(nnx.Module):
    """Joint attention, then a feed-forward layer for image and text each. x: b t c, context: b s c.

    Shifts, scales and gates are those of all blocks.
    """

    def __init__(self, config: Flux2Transformer2DConfig, *, rngs: nnx.Rngs):
        c, heads = config.width, config.num_attention_heads
        self.attn = JointAttention(c, heads=heads, bias=False, eps=_EPS, rngs=rngs)
        self.ff = Flux2FeedForward(c, config.mlp_dim, rngs=rngs)
        self.ff_context = Flux2FeedForward(c, config.mlp_dim, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        context: jax.Array,
        of_x: Sequence[jax.Array],
        of_context: Sequence[jax.Array],
        rotation: Rotation,
        before: KeysValues | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the next block's tokens of image and text.

        Args:
            x: b t c.
            context: b s c.
            of_x: the shift, scale and gate of the image's attention, and of its feed-forward layer,
                b 1 c each.
            of_context: those of the text's.
            rotation: the positions of the text's tokens, then of the image's, b (s + t) d/2.
            before: the keys and values of images to look at that were read before.
        """
        shift, scale, gate, *x_rest = of_x
        c_shift, c_scale, c_gate, *context_rest = of_context
        h, c_h = self.attn(
            modulate(x, shift, scale),
            modulate(context, c_shift, c_scale),
            rotation,
            before=before,
        )
        x = gated_layer(self.ff, add_gated(x, gate, h), *x_rest)
        context = gated_layer(self.ff_context, add_gated(context, c_gate, c_h), *context_rest)
        return x, within_range(context)

    def of_references(
        self, x: jax.Array, of_x: Sequence[jax.Array], rotation: Rotation
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the next block's tokens of images that see themselves alone, and this one's keys
        and values. Arguments as those of a call.
        """
        shift, scale, gate, *rest = of_x
        y, read = self.attn.alone(modulate(x, shift, scale), rotation)
        return gated_layer(self.ff, add_gated(x, gate, y), *rest), read


class Flux2ParallelSelfAttention(nnx.Module):
    """Attention and feed-forward with common products (Dehghani et al. 2023). x: b t c -> b t c."""

    def __init__(self, config: Flux2Transformer2DConfig, *, rngs: nnx.Rngs):
        c, d, inner = config.width, config.attention_head_dim, config.mlp_dim
        self.head_dim = d
        widths = c, c, c, inner, inner
        # The feed-forward layer's halves are read together.
        self.to_qkv_mlp_proj = SplitLinear(
            c, widths, bias=False, read_together=(1, 1, 1, 2), rngs=rngs
        )
        self.norm_q = RMSNorm(d, eps=_EPS, rngs=rngs)
        self.norm_k = RMSNorm(d, eps=_EPS, rngs=rngs)
        self.to_out = JoinedLinear(c, inner, c, bias=False, rngs=rngs)

    def __call__(
        self, x: Tokens, rotation: Rotation, before: KeysValues | None = None
    ) -> jax.Array:
        """Returns what the tokens read. before: further keys and values."""
        return self.with_keys(x, rotation, before)[0]

    def with_keys(
        self, x: Tokens, rotation: Rotation, before: KeysValues | None = None
    ) -> tuple[jax.Array, KeysValues]:
        """Returns what the tokens read, and their keys and values. before: further ones."""
        *qkv, gate, h = self.to_qkv_mlp_proj(x)
        q, k, v = (y.reshape(*y.shape[:2], -1, self.head_dim) for y in qkv)
        q, k = rotate(self.norm_q(q), rotation), rotate(self.norm_k(k), rotation)
        y = attend(q, k, v, before).reshape(x.shape)
        return self.to_out(y, gated_silu(gate, h)), (k, v)


class Flux2SingleTransformerBlock(nnx.Module):
    """Attention and feed-forward side by side, shifted, scaled and gated as in all such blocks."""

    def __init__(self, config: Flux2Transformer2DConfig, *, rngs: nnx.Rngs):
        self.attn = Flux2ParallelSelfAttention(config, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        modulation: Sequence[jax.Array],
        rotation: Rotation,
        before: KeysValues | None = None,
    ) -> jax.Array:
        """Returns the next block's tokens, b t c.

        modulation: shift, scale and gate, b 1 c each. before: see `Flux2TransformerBlock`.
        """
        shift, scale, gate = modulation
        y = self.attn(modulate(x, shift, scale), rotation, before)
        return within_range(add_gated(x, gate, y))

    def of_references(
        self, x: jax.Array, modulation: Sequence[jax.Array], rotation: Rotation
    ) -> tuple[jax.Array, KeysValues]:
        """Returns the next block's tokens and this one's keys and values; see a call."""
        shift, scale, gate = modulation
        y, read = self.attn.with_keys(modulate(x, shift, scale), rotation)
        return within_range(add_gated(x, gate, y)), read


class Flux2Transformer2DModel(nnx.Module):
    """Predicts the flow from images to noise in latents, for a text and images to look at."""

    config_class = Flux2Transformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = FLUX2_RULES
    adapter_groups = (
        r".*\.attn\.(to_(q|k|v|out|out\.0|add_out|qkv_mlp_proj)|add_(q|k|v)_proj)",
        r"(single_)?transformer_blocks\..*",
    )

    def __init__(self, config: Flux2Transformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, options = config.width, dict[str, Any](bias=False, rngs=rngs)
        self.time_guidance_embed = TimeGuidanceEmbedding(config, rngs=rngs)
        self.double_stream_modulation_img = Modulation(c, 6, **options)
        self.double_stream_modulation_txt = Modulation(c, 6, **options)
        self.single_stream_modulation = Modulation(c, 3, **options)
        self.x_embedder = Linear(config.in_channels, c, **options)
        self.context_embedder = Linear(config.joint_attention_dim, c, **options)
        self.transformer_blocks = nnx.List(
            [Flux2TransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        count = config.num_single_layers
        self.single_transformer_blocks = nnx.List(
            [Flux2SingleTransformerBlock(config, rngs=rngs) for _ in range(count)]
        )
        self.norm_out = Modulation(c, 2, **options)
        self.proj_out = Linear(c, config.out_channels or config.in_channels, **options)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        *,
        guidance: jax.Array | None = None,
        references: Sequence[jax.Array] = (),
        prefix: Prefix | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c, each of which is a token.
            timestep: b, from 1 for noise to 0 for an image.
            context: the text's hidden states, b s joint_attention_dim.
            guidance: b, the guidance scale, for a transformer with guidance_embeds.
            references: the latents of images to look at, b h' w' c each.
            prefix: what `prefix` returned for images to look at, which are left out then.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        check_map("x", x, self.config.in_channels)
        check_rows(x, timestep=timestep, context=context)
        b, h, w, c = x.shape
        maps = x, *(reference.astype(x.dtype) for reference in references)
        tokens = jnp.concatenate([y.reshape(b, -1, c) for y in maps], axis=1)
        sizes = enumerate((y.shape[1], y.shape[2]) for y in maps)
        images = (image_ids(*size, REFERENCE_TIMES * i) for i, size in sizes)
        ids = np.concatenate([text_ids(context.shape[1]), *images])
        rotation = rotation_at(ids, self.config.axes_dims_rope, self.config.rope_theta)
        remat = gradient_checkpointing != "none"
        given = tokens, timestep, context, rotation, guidance
        y = self.predict_tokens(*given, prefix=prefix, remat=remat)
        return y[:, : h * w].reshape(b, h, w, -1)

    def prefix(self, references: Sequence[jax.Array]) -> Prefix:
        """Returns what steps read of images to look at that see themselves alone, at time zero.

        Upstream: transformer_flux2.py, _flux2_kv_causal_attention.

        Args:
            references: the latents of at least one image, b h w c each.

        Raises:
            ValueError: one has another number of channels.
        """
        ids, maps = list[np.ndarray](), list[jax.Array]()
        for i, y in enumerate(references, 1):
            check_map("references", y, self.config.in_channels)
            ids.append(image_ids(y.shape[1], y.shape[2], REFERENCE_TIMES * i))
            maps.append(y.reshape(y.shape[0], -1, y.shape[-1]))
        rotation = rotation_at(
            np.concatenate(ids), self.config.axes_dims_rope, self.config.rope_theta
        )
        x = split_tokens(self.x_embedder(jnp.concatenate(maps, axis=1)))
        # A row for each image, as adapters have weights of their own for each.
        temb = self.time_guidance_embed(jnp.zeros(x.shape[0], jnp.float32), None)
        ((of_images, of_both),) = activations(temb, 2)
        modulation, read = self.double_stream_modulation_img(of_images), list[Any]()
        for block in self.transformer_blocks:
            x, own = streamed(block.of_references)(x, modulation, rotation)
            read.append(own)
        modulation, read_single = self.single_stream_modulation(of_both), list[Any]()
        for single in self.single_transformer_blocks:
            x, own = streamed(single.of_references)(x, modulation, rotation)
            read_single.append(own)
        return Prefix(tuple(read), tuple(read_single))

    def predict_tokens(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        rotation: Rotation,
        guidance: jax.Array | None = None,
        *,
        prefix: Prefix | None = None,
        remat: bool = False,
    ) -> jax.Array:
        """Returns the prediction for latents at any positions, b t c.

        Args:
            x: b t c.
            timestep: see a call.
            context: see a call.
            rotation: the positions of the text's tokens, then of x's, b (s + t) d/2, or
                1 (s + t) d/2.
            guidance: see a call.
            prefix: see a call.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        check_tokens("x", x, {self.config.in_channels})
        check_tokens("context", context, {self.config.joint_attention_dim})
        s = context.shape[1]
        temb = self.time_guidance_embed(timestep, guidance)
        ((*each, last),) = activations(temb, 4)
        of_x = self.double_stream_modulation_img(each[0])
        of_context = self.double_stream_modulation_txt(each[1])
        of_both = self.single_stream_modulation(each[2])
        x, context = map(split_tokens, (self.x_embedder(x), self.context_embedder(context)))
        before, before_single = prefix or (itertools.repeat(None), itertools.repeat(None))

        def double(block: Any, known: Any, x: jax.Array, context: jax.Array) -> Any:
            given = x, context, of_x, of_context, rotation, known
            return rematerialized(block, remat)(*given)

        def last_blocks(x: jax.Array, context: jax.Array) -> jax.Array:
            joined = split_tokens(jnp.concatenate([context, x], axis=1))
            for single, known in zip(self.single_transformer_blocks, before_single):
                joined = rematerialized(single, remat)(joined, of_both, rotation, known)
            return joined[:, s:]

        pairs = zip(self.transformer_blocks, before)
        steps = [functools.partial(double, *pair) for pair in pairs]
        x = through_blocks(self, (x, context), steps, last_blocks)
        scale, shift = self.norm_out(last)
        return self.proj_out(modulate(x, shift, scale))


def image_ids(rows: int, columns: int, time: int = 0) -> np.ndarray:
    """Returns the positions of an image's tokens on the four axes, (rows columns) 4.

    time: zero for the image that is generated, and 10, 20 and so on for those that it looks at.
    """
    index = np.arange(rows * columns)
    return np.stack([0 * index + time, index // columns, index % columns, 0 * index], axis=1)


def text_ids(length: int) -> np.ndarray:
    """Returns the positions of a text's tokens on the four axes, length 4."""
    return np.arange(length)[:, None] * np.array([0, 0, 0, 1])
