"""FLUX.1's transformer: text and image tokens, first apart, then in one stream (BFL 2024).

Upstream: diffusers models/transformers/transformer_flux.py.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.embeddings import TimestepEmbedding, timestep_embedding
from diffusax.models.layers.inputs import check_rows, check_tokens, check_width
from diffusax.models.layers.layers import Linear
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.activations import approximate_gelu
from diffusax.models.ops.modulation import add_gated, gated_layer, modulate
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    GELUFeedForward,
    JoinedLinear,
    JointAttention,
    Modulation,
    RotaryAttention,
    activations,
    rotation_at,
    within_range,
)
from diffusax.models.transformers.configs import FluxConfig, FluxTransformer2DConfig
from diffusax.runtime.devices.mesh import Rule, Rules
from diffusax.runtime.devices.splitting import split_tokens

PATCH = 2
"""Latents per token, in each direction."""
_TIMES = 256
_THETA = 10000.0

FLUX_RULES: Rules = (
    *TENSOR_RULES,
    (r"proj_mlp\.(kernel|bias)", -1),
    Rule(r"single_transformer_blocks\.\d+\.proj_out\.kernel", -2, widths="widths"),
)
"""The tensor axis splits the heads, and the feed-forwards' inner channels."""


def image_rotation(dims: Sequence[int], text: int, *images: tuple[int, int]) -> Rotation:
    """Returns the rotations of a text's tokens and of images' that follow it, 1 t d/2.

    Texts stand at zero, the tokens of the i-th image at (i, row, column).

    Args:
        dims: the channels of a head for each of these axes.
        text: the number of the text's tokens.
        *images: the rows and columns of tokens of each image.
    """
    ids = [np.zeros((text, 3), np.int32)]
    for i, shape in enumerate(images):
        rows, columns = np.indices(shape).reshape(2, -1)
        ids.append(np.stack([np.full_like(rows, i), rows, columns], axis=-1).astype(np.int32))
    return token_rotation(dims, np.concatenate(ids))


def token_rotation(dims: Sequence[int], ids: np.ndarray) -> Rotation:
    """Returns the rotations of tokens at given positions, t 3 integers -> 1 t d/2."""
    return rotation_at(ids, dims, _THETA)


class TimeTextEmbedding(nnx.Module):
    """Embeds the time, the guidance scale and the text's pooled output, b d; their sum is b c."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        c = config.width
        self.timestep_embedder = TimestepEmbedding(_TIMES, c, rngs=rngs)
        self.guidance_embedder = (
            TimestepEmbedding(_TIMES, c, rngs=rngs) if config.guidance_embeds else None
        )
        self.text_embedder = TimestepEmbedding(config.pooled_projection_dim, c, rngs=rngs)

    def __call__(
        self, timestep: jax.Array, guidance: jax.Array | None, pooled: jax.Array
    ) -> jax.Array:
        """timestep: b, from 1 for noise to 0. guidance: b, the scale. pooled: b p."""
        check_width("pooled", pooled, self.text_embedder.linear_1.kernel.shape[0])
        temb = self.timestep_embedder(timestep_embedding(1000 * timestep, _TIMES))
        if self.guidance_embedder is not None:
            if guidance is None:
                raise ValueError("guidance must be given to a transformer with guidance_embeds")
            scales = timestep_embedding(1000 * guidance, _TIMES)
            temb = temb + self.guidance_embedder(scales)
        return temb + self.text_embedder(pooled)


class FluxTransformerBlock(nnx.Module):
    """Joint attention, then a feed-forward layer for image and text each. x: b t c, context: b s c.

    The time shifts, scales and gates both.
    """

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        c, heads = config.width, config.num_attention_heads
        self.norm1 = Modulation(c, 6, rngs=rngs)
        self.norm1_context = Modulation(c, 6, rngs=rngs)
        self.attn = JointAttention(c, heads=heads, bias=True, eps=1e-6, rngs=rngs)
        self.ff = GELUFeedForward(c, rngs=rngs)
        self.ff_context = GELUFeedForward(c, rngs=rngs)

    def __call__(
        self, x: jax.Array, context: jax.Array, active: Sequence[jax.Array], rotation: Rotation
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the next layer's tokens of image and text.

        active: what the modulation of each takes, b c; rotation: b (s + t) d/2.
        """
        shift, scale, gate, *x_rest = self.norm1(active[0])
        c_shift, c_scale, c_gate, *context_rest = self.norm1_context(active[1])
        h, c_h = self.attn(modulate(x, shift, scale), modulate(context, c_shift, c_scale), rotation)
        x = gated_layer(self.ff, add_gated(x, gate, h), *x_rest)
        context = gated_layer(self.ff_context, add_gated(context, c_gate, c_h), *context_rest)
        return x, within_range(context)


class FluxSingleTransformerBlock(nnx.Module):
    """Attention and feed-forward side by side (Dehghani et al. 2023). x: b t c -> b t c."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        c, heads = config.width, config.num_attention_heads
        self.norm = Modulation(c, 3, rngs=rngs)
        self.proj_mlp = Linear(c, 4 * c, rngs=rngs)
        self.proj_out = JoinedLinear(c, 4 * c, c, rngs=rngs)
        self.attn = RotaryAttention(
            c, heads=heads, qk_norm=True, eps=1e-6, bias=True, out=False, rngs=rngs
        )

    def __call__(self, x: jax.Array, active: jax.Array, rotation: Rotation) -> jax.Array:
        shift, scale, gate = self.norm(active)
        h = modulate(x, shift, scale)
        inner = approximate_gelu(self.proj_mlp(h))
        return within_range(add_gated(x, gate, self.proj_out(self.attn(h, rotation), inner)))


class FluxBlocks(nnx.Module):
    """The embeddings and blocks that FLUX.1's transformer and its ControlNets have in common."""

    tensor_rules = FLUX_RULES
    adapter_groups = (
        r".*\.attn\.(to_(q|k|v|out\.0|add_out)|add_(q|k|v)_proj)",
        r"(single_)?transformer_blocks\..*",
    )

    def __init__(self, config: FluxConfig, *, rngs: nnx.Rngs):
        self.config = config
        c = config.width
        self.time_text_embed = TimeTextEmbedding(config, rngs=rngs)
        self.context_embedder = Linear(config.joint_attention_dim, c, rngs=rngs)
        self.x_embedder = Linear(config.in_channels, c, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [FluxTransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.single_transformer_blocks = nnx.List(
            [FluxSingleTransformerBlock(config, rngs=rngs) for _ in range(config.num_single_layers)]
        )


class FluxTransformer2DModel(FluxBlocks):
    """Predicts the flow from images to noise for the tokens of images and texts."""

    config_class = FluxTransformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""

    def __init__(self, config: FluxTransformer2DConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        c = config.width
        self.norm_out = Modulation(c, 2, rngs=rngs)
        self.proj_out = Linear(c, config.out_channels or config.in_channels, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        context: jax.Array,
        pooled: jax.Array,
        rotation: Rotation,
        guidance: jax.Array | None = None,
        *,
        block_residuals: Sequence[jax.Array] = (),
        single_residuals: Sequence[jax.Array] = (),
        cycle_residuals: bool = False,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction for the image's tokens, b t d, in the dtype of the parameters.

        Args:
            x: the image's tokens, b t in_channels.
            timestep: b, from 1 for noise to 0 for an image.
            context: the text's hidden states, b s joint_attention_dim.
            pooled: the text's pooled output, b pooled_projection_dim.
            rotation: the positions of the text's tokens, then of the image's, b (s + t) d/2, or
                1 (s + t) d/2; see `image_rotation`.
            guidance: b, the guidance scale, for a transformer with guidance_embeds.
            block_residuals: what is added to the image's tokens after the first blocks, b t c each;
                blocks that follow each other share one where there are fewer than blocks.
            single_residuals: likewise, after the blocks over one sequence.
            cycle_residuals: whether fewer block_residuals than blocks are begun again instead, as
                XLabs' ControlNets want it.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape, or is missing.
        """
        check_tokens("x", x, {self.config.in_channels})
        check_tokens("context", context, {self.config.joint_attention_dim})
        check_rows(x, timestep=timestep, context=context, pooled=pooled)
        remat, s = gradient_checkpointing != "none", context.shape[1]
        temb = self.time_text_embed(timestep, guidance, pooled)
        blocks, singles = len(self.transformer_blocks), len(self.single_transformer_blocks)
        of_x, of_context, of_both, (last,) = activations(temb, blocks, blocks, singles, 1)
        x, context = map(split_tokens, (self.x_embedder(x), self.context_embedder(context)))

        def controlled(x: jax.Array, i: int) -> jax.Array:
            return add_residual(x, block_residuals, i, 0 if cycle_residuals else blocks)

        def double(i: int, x: jax.Array, context: jax.Array) -> tuple[jax.Array, jax.Array]:
            # What steers a block is added before the next, so that it is no part of its own.
            x = controlled(x, i - 1) if i else x
            active = of_x[i], of_context[i]
            return rematerialized(self.transformer_blocks[i], remat)(x, context, active, rotation)

        def last_blocks(x: jax.Array, context: jax.Array) -> jax.Array:
            x = controlled(x, blocks - 1) if blocks else x
            joined = split_tokens(jnp.concatenate([context, x], axis=1))
            for i, single in enumerate(self.single_transformer_blocks):
                joined = rematerialized(single, remat)(joined, of_both[i], rotation)
                if single_residuals:
                    x = add_residual(joined[:, s:], single_residuals, i, singles)
                    joined = jnp.concatenate([joined[:, :s], x], axis=1)
            return joined[:, s:]

        steps = [functools.partial(double, i) for i in range(blocks)]
        x = through_blocks(self, (x, context), steps, last_blocks)
        scale, shift = self.norm_out(last)
        return self.proj_out(modulate(x, shift, scale))

    def with_cycled_residuals(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns what a call with cycle_residuals returns."""
        return self(*args, cycle_residuals=True, **kwargs)


def add_residual(x: jax.Array, residuals: Sequence[jax.Array], i: int, count: int) -> jax.Array:
    """Returns x with the residual of the i-th of `count` blocks; with a count of 0, in turn."""
    if not residuals:
        return x
    chosen = i // -(-count // len(residuals)) if count else i % len(residuals)
    return x + residuals[chosen].astype(x.dtype)
