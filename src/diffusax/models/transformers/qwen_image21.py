"""Qwen-Image 2.1's transformer: a text, images to look at, and the image in one stream (Qwen 2026).

Tokens before the image see those before them and, of an image, all of its own. They are modulated
as at time zero, so that nothing of them changes from step to step: their keys and values are a
`Prefix`, which a run computes once. Upstream: diffusers
models/transformers/transformer_qwenimage21.py.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import CentredRMSNorm, Linear, RMSNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.activations import approximate_gelu, gated_silu
from diffusax.models.ops.attention import attention
from diffusax.models.ops.layer_input import LayerInput, Tokens
from diffusax.models.ops.matmul import apart, concatenate
from diffusax.models.ops.modulation import add_gated, scaled, scaled_layer_norm
from diffusax.models.ops.norms import normalized
from diffusax.models.ops.rotation import Rotation, rotate
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    rotary_positions,
    rotation_at,
    split_heads,
    within_range,
)
from diffusax.models.transformers.configs import QwenImage21Transformer2DConfig
from diffusax.runtime.devices.mesh import Rules
from diffusax.runtime.devices.splitting import split_tokens

_TIMES = 256
_THETA = 10000.0
_MOST_POSITIONS = 8192
_FARTHEST = 1024
"""The positions below zero, of which an image has at most so many in each direction."""

QWEN_IMAGE21_RULES: Rules = (
    *TENSOR_RULES,
    (r"img_mlp\.(proj|gate_layer)\.kernel", -1),
    (r"img_mlp\.out\.kernel", -2),
)
"""The tensor axis splits the heads, and the feed-forwards' inner channels."""


class Prefix(NamedTuple):
    """What a step reads of the tokens before the image."""

    keys: tuple[jax.Array, ...]
    """Those of each block, rotated, b s h d."""
    values: tuple[jax.Array, ...]
    """Those of each block, b s h d."""
    length: jax.Array
    """The number of tokens that are no padding, which comes last, b."""
    position: jax.Array
    """The position of the image behind them, b."""


class Segment(NamedTuple):
    """Tokens before the image that follow each other: a part of the text, or an image."""

    start: int
    end: int
    is_text: bool


class TimeEmbedding(nnx.Module):
    """Sinusoids, linear, SiLU, linear. timestep: b, from 1 for noise to 0 -> b c."""

    def __init__(self, c: int, *, bias: bool = False, rngs: nnx.Rngs):
        self.timestep_embedder = TimestepEmbedding(_TIMES, c, bias=bias, rngs=rngs)

    def __call__(self, timestep: jax.Array) -> jax.Array:
        return self.timestep_embedder(timestep_embedding(1000 * timestep, _TIMES))


class TextProjection(nnx.Module):
    """A norm and two layers with the approximate GELU between them. x: ... d -> ... c."""

    def __init__(self, d: int, c: int, *, eps: float, rngs: nnx.Rngs):
        self.text_norm = CentredRMSNorm(d, eps=eps, rngs=rngs)
        self.in_layer = Linear(d, c, bias=False, rngs=rngs)
        self.out_layer = Linear(c, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out_layer(approximate_gelu(self.in_layer(self.text_norm(x))))


class FeedForward(nnx.Module):
    """A feed-forward layer gated by SiLU (Shazeer 2020). x: ... c -> ... c."""

    def __init__(self, c: int, inner: int, *, rngs: nnx.Rngs):
        self.proj = Linear(c, inner, bias=False, rngs=rngs)
        self.gate_layer = Linear(c, inner, bias=False, rngs=rngs)
        self.out = Linear(inner, c, bias=False, rngs=rngs)

    def __call__(self, x: Tokens) -> jax.Array:
        return self.out(gated_silu(self.gate_layer(x), self.proj(x)))


class PrefixAttention(nnx.Module):
    """Attention whose queries, keys and values are asked for apart. x: b t c."""

    reads_together = (("to_q", "to_k", "to_v"),)

    def __init__(self, config: QwenImage21Transformer2DConfig, *, rngs: nnx.Rngs):
        c, d = config.width, config.attention_head_dim
        self.heads = config.num_attention_heads
        self.to_q = Linear(c, c, bias=False, rngs=rngs)
        self.to_k = Linear(c, c, bias=False, rngs=rngs)
        self.to_v = Linear(c, c, bias=False, rngs=rngs)
        self.to_out = nnx.List([Linear(c, c, bias=False, rngs=rngs)])
        self.norm_q = RMSNorm(d, eps=config.eps, rngs=rngs)
        self.norm_k = RMSNorm(d, eps=config.eps, rngs=rngs)

    def __call__(
        self,
        x: Tokens,
        rotation: Rotation,
        before: tuple[jax.Array, jax.Array],
        length: jax.Array,
    ) -> jax.Array:
        """Returns what the tokens read of themselves and of those before them, b t c.

        before, length: see `QwenImage21TransformerBlock`.
        """
        q, k, v = self.heads_of(x, rotation)
        # Padding comes last, so that lengths say what is seen.
        keys, values = (concatenate(pair, axis=1) for pair in zip((k, v), before))
        return self.join(attention(q, keys, values, key_lengths=length + x.shape[1]))

    def heads_of(self, x: Tokens, rotation: Rotation) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns rotated queries and keys, and values, b t h d each."""
        q, k, v = split_heads(x, (self.to_q, self.to_k, self.to_v), self.heads)
        return rotate(self.norm_q(q), rotation), rotate(self.norm_k(k), rotation), v

    def join(self, y: jax.Array) -> jax.Array:
        """Returns what the last layer makes of the heads, b t h d -> b t c."""
        return self.to_out[0](y.reshape(*y.shape[:2], -1))


class QwenImage21TransformerBlock(nnx.Module):
    """Attention and a feed-forward layer, scaled and gated as in all blocks."""

    def __init__(self, config: QwenImage21Transformer2DConfig, *, rngs: nnx.Rngs):
        c = config.width
        self.eps = config.eps
        self.attn = PrefixAttention(config, rngs=rngs)
        self.img_mlp = FeedForward(c, c * config.mlp_ratio, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        modulation: Sequence[jax.Array],
        rotation: Rotation,
        before: tuple[jax.Array, jax.Array],
        length: jax.Array,
    ) -> jax.Array:
        """Returns the next block's tokens of the image, which see all that is no padding.

        Args:
            x: b t c.
            modulation: scale and gate of attention, and of the feed-forward layer, b 1 c each.
            rotation: the image's positions.
            before: the keys and values of the tokens before the image, b s h d.
            length: how many of these are no padding, b.
        """
        scale, gate, *rest = modulation
        y = self.attn(self._scaled(x, scale), rotation, before, length)
        return self._finish(x, gate, y, rest)

    def of_prefix(
        self,
        x: jax.Array,
        modulation: Sequence[jax.Array],
        rotation: Rotation,
        segments: Sequence[Segment],
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the next block's tokens before the image, and this one's keys and values.

        Args:
            x: b s c.
            modulation: see a call.
            rotation: the positions of x.
            segments: what the tokens are, in order.
        """
        scale, gate, *rest = modulation
        q, k, v = self.attn.heads_of(self._scaled(x, scale), rotation)
        parts = [_attend_before(q, k, v, segment) for segment in segments]
        y = self.attn.join(jnp.concatenate(parts, axis=1))
        return self._finish(x, gate, y, rest), k, v

    def _scaled(self, x: jax.Array, scale: jax.Array) -> LayerInput:
        return scaled_layer_norm(x, 1 + scale, eps=self.eps)

    def _finish(
        self, x: jax.Array, gate: jax.Array, y: jax.Array, rest: Sequence[jax.Array]
    ) -> jax.Array:
        x = add_gated(x, jnp.tanh(gate), y)
        scale, gate = rest
        return within_range(add_gated(x, jnp.tanh(gate), self.img_mlp(self._scaled(x, scale))))


def _attend_before(q: jax.Array, k: jax.Array, v: jax.Array, segment: Segment) -> jax.Array:
    """Returns what a segment's tokens read: those before it, its own before them or, of an image,
    all of its own.
    """
    start, end, is_text = segment
    given = q[:, start:end], k[:, :end], v[:, :end]
    if not is_text:
        return attention(*given)
    if start == 0:
        return attention(*given, causal=True)
    later = np.arange(end) > np.arange(start, end)[:, None]
    bias = jnp.where(later, jnp.float32(-jnp.inf), jnp.float32(0))
    return attention(*given, bias=jnp.broadcast_to(bias, (q.shape[2], *bias.shape)))


class ScaledNorm(nnx.Module):
    """A layer norm scaled by the time. x: b t c, active: b c, see `activations` -> b t c."""

    def __init__(self, c: int, *, eps: float, rngs: nnx.Rngs):
        self.eps = eps
        self.linear = Linear(c, c, bias=False, rngs=rngs)

    def __call__(self, x: jax.Array, active: jax.Array) -> jax.Array:
        return scaled(normalized(x, eps=self.eps), 1 + self.linear(active)[:, None])


class QwenImage21Transformer2DModel(nnx.Module):
    """Predicts the flow from images to noise in latents, for a text and images to look at."""

    config_class = QwenImage21Transformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = QWEN_IMAGE21_RULES
    adapter_groups = (r".*\.attn\.to_(q|k|v|out\.0)", r"transformer_blocks\..*")

    def __init__(self, config: QwenImage21Transformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config.width
        self.time_text_embed = TimeEmbedding(c, rngs=rngs)
        self.txt_in = TextProjection(config.context_in_dim, c, eps=config.eps, rngs=rngs)
        self.img_in = Linear(config.in_channels, c, bias=False, rngs=rngs)
        # The checkpoint has the layer after an activation, which is number 0.
        self.modulation: Any = nnx.List([None, Linear(c, 4 * c, bias=False, rngs=rngs)])
        self.transformer_blocks = nnx.List(
            [QwenImage21TransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm_out = ScaledNorm(c, eps=config.eps, rngs=rngs)
        out = config.out_channels or config.in_channels
        self.proj_out = Linear(c, out, bias=False, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array | None = None,
        lengths: jax.Array | None = None,
        *,
        references: Sequence[tuple[jax.Array, jax.Array]] = (),
        prefix: Prefix | None = None,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c, each of which is a token.
            timestep: b, from 1 for noise to 0 for an image.
            context: see `prefix`; None where its result is given.
            lengths: see `prefix`.
            references: see `prefix`.
            prefix: what `prefix` returned for the others, which are left out then.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, or needs more positions than there are.
        """
        check_map("x", x, self.config.in_channels)
        remat = gradient_checkpointing != "none"
        if prefix is None:
            if context is None or lengths is None:
                raise ValueError("context and lengths must be given where prefix is not")
            check_rows(x, timestep=timestep, context=context, lengths=lengths)
            prefix = self.prefix(context, lengths, references, remat=remat)
        b, h, w, c = x.shape
        rotation = self._image_rotation(prefix, h, w)
        temb = self.time_text_embed(timestep)
        of_blocks, last = apart(nnx.silu(temb), 2)
        modulation = self._modulation(of_blocks)
        y = split_tokens(self.img_in(x.reshape(b, h * w, c)))

        def call(block: Any, before: tuple[jax.Array, jax.Array], y: jax.Array) -> Any:
            given = y, modulation, rotation, before, prefix.length
            return (rematerialized(block, remat)(*given),)

        pairs = zip(self.transformer_blocks, zip(prefix.keys, prefix.values))
        steps = [functools.partial(call, *pair) for pair in pairs]
        y = through_blocks(self, (y,), steps, lambda y: y)
        return self.proj_out(self.norm_out(y, last)).reshape(b, h, w, -1)

    def prefix(
        self,
        context: jax.Array,
        lengths: jax.Array,
        references: Sequence[tuple[jax.Array, jax.Array]] = (),
        *,
        remat: bool = False,
    ) -> Prefix:
        """Returns what steps read of the text and of images to look at.

        Args:
            context: the text encoder's hidden states of the text behind the images, b s
                context_in_dim, without the places of images.
            lengths: the number of them that are not padding, b.
            references: for each image the hidden states of the text before it, b s'
                context_in_dim, and its latents, b h w c.
            remat: whether gradients compute the activations of blocks again.

        Raises:
            ValueError: an input has another shape, or needs more positions than there are.
        """
        check_tokens("context", context, {self.config.context_in_dim})
        # What stands in padding is never attended to, but must be finite.
        seen = jnp.arange(context.shape[1]) < lengths[:, None]
        parts = list(itertools.chain.from_iterable(map(self._of_reference, references)))
        parts.append(self.txt_in(jnp.where(seen[..., None], context, 0)))
        x = jnp.concatenate(parts, axis=1)
        segments = list(_segments([part.shape[1] for part in parts]))
        rotation, position = self._prefix_rotation(parts, references)
        # A row for each image, as adapters have weights of their own for each.
        still = nnx.silu(self.time_text_embed(jnp.zeros(context.shape[0], jnp.float32)))
        modulation, keys, values = self._modulation(still), list[Any](), list[Any]()
        for block in self.transformer_blocks:
            of_prefix = functools.partial(block.of_prefix, segments=segments)
            x, k, v = rematerialized(of_prefix, remat)(x, modulation, rotation)
            keys.append(k)
            values.append(v)
        known = x.shape[1] - context.shape[1] + lengths
        return Prefix(tuple(keys), tuple(values), known, position + lengths)

    def _modulation(self, active: jax.Array) -> list[jax.Array]:
        """Returns scale and gate of attention, and of feed-forward layers, b 1 c each."""
        return jnp.split(self.modulation[1](active)[:, None], 4, axis=-1)

    def _of_reference(self, reference: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        """Returns the tokens of an image to look at and of the text before it, b t c each."""
        text, latents = reference
        check_tokens("the text before an image", text, {self.config.context_in_dim})
        check_map("references", latents, self.config.in_channels)
        tokens = latents.reshape(latents.shape[0], -1, latents.shape[-1])
        return self.txt_in(text), self.img_in(tokens)

    def _prefix_rotation(
        self, parts: Sequence[jax.Array], references: Sequence[tuple[jax.Array, jax.Array]]
    ) -> tuple[Rotation, int]:
        """Returns the rotations of the tokens before the image, 1 s d/2, and where the text behind
        the last image to look at begins.
        """
        position, ids = 0, list[np.ndarray]()
        for text, latents in references:
            h, w = latents.shape[1:3]
            ids.append(text_ids(position, text.shape[1]))
            position += text.shape[1]
            ids.append(image_ids(position, h, w))
            position += max(h, w)
        ids.append(text_ids(position, parts[-1].shape[1]))
        axes = np.concatenate(ids)
        _check_positions(int(axes.min()), int(axes.max()))
        return rotation_at(axes, self.config.axes_dims_rope, _THETA), position

    def _image_rotation(self, prefix: Prefix, h: int, w: int) -> Rotation:
        """Returns the rotations of the image's tokens, b (h w) d/2."""
        position, axes = prefix.position, image_ids(0, h, w).T
        shape = position.shape[0], h * w
        rows, columns = (jnp.broadcast_to(axis, shape) for axis in axes[1:])
        # An image to look at moves what follows by less than the number of its tokens.
        last = max(prefix.keys[0].shape[1], int(axes.max()))
        ids = jnp.broadcast_to(position[:, None], shape), rows, columns
        first = int(axes.min())
        _check_positions(first, last)
        dims, lengths = self.config.axes_dims_rope, (last + 1 - first,) * 3
        return rotary_positions(ids, lengths, dims, _THETA, first=first)


def _check_positions(first: int, last: int) -> None:
    """Raises ValueError unless there are positions from the first to the last."""
    if last >= _MOST_POSITIONS or first < -_FARTHEST:
        raise ValueError(
            f"the text and the images need the positions {first} to {last}, and there are "
            f"{-_FARTHEST} to {_MOST_POSITIONS - 1}; use a shorter prompt, or fewer or smaller "
            "images"
        )


def text_ids(position: int, length: int) -> np.ndarray:
    """Returns the positions of a text's tokens on the three axes, length 3."""
    return np.repeat(np.arange(position, position + length)[:, None], 3, axis=1)


def image_ids(position: int, h: int, w: int) -> np.ndarray:
    """Returns the positions of an image's tokens, whose middle is zero, (h w) 3."""
    index = np.arange(h * w)
    rows, columns = index // w - (h - h // 2), index % w - (w - w // 2)
    return np.stack([0 * index + position, rows, columns], axis=1)


def _segments(lengths: Sequence[int]) -> Iterator[Segment]:
    """Returns the segments of such lengths, text and images in turns."""
    ends = itertools.accumulate(lengths)
    for i, (end, length) in enumerate(zip(ends, lengths)):
        yield Segment(end - length, end, is_text=i % 2 == 0)
