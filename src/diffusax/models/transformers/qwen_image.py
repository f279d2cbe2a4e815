"""Qwen-Image's transformer: a text and images in two streams that attend to each other (Qwen 2025).

Upstream: diffusers models/transformers/transformer_qwenimage.py. The images' tokens come first
here, and those of the text after them, so that padding stands at the end of all.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.autoencoders.latents import patchify, unpatchify
from diffusax.models.caches.first_block import through_blocks
from diffusax.models.layers.inputs import check_map, check_rows, check_tokens
from diffusax.models.layers.layers import Linear, RMSNorm
from diffusax.models.layers.resnet import rematerialized
from diffusax.models.ops.modulation import add_gated, gated_layer, modulate
from diffusax.models.ops.rotation import Rotation
from diffusax.models.transformers.blocks import (
    TENSOR_RULES,
    TRANSFORMER_CACHES,
    GELUFeedForward,
    JointAttention,
    Modulation,
    activations,
    rotation_at,
    within_range,
)
from diffusax.models.transformers.configs import QwenImageTransformer2DConfig
from diffusax.models.transformers.qwen_image21 import TimeEmbedding, image_ids, text_ids
from diffusax.runtime.devices.mesh import Rules
from diffusax.runtime.devices.splitting import gather_channels, split_tokens

PATCH = 2
"""Latents per token, in each direction."""
_EPS = 1e-6
_THETA = 10000.0

QWEN_IMAGE_RULES: Rules = (*TENSOR_RULES, (r"(img|txt)_mod\.1\.(kernel|bias)", -1))
"""The tensor axis splits the heads, the feed-forwards' inner channels, and the modulations'."""


class QwenImageTransformerBlock(nnx.Module):
    """Joint attention, then a feed-forward layer for images and text each. x: b t c, text: b s c.

    The time shifts, scales and gates both.
    """

    def __init__(self, config: QwenImageTransformer2DConfig, *, rngs: nnx.Rngs):
        c, heads = config.width, config.num_attention_heads
        # The checkpoint has the layers after activations, which are number 0.
        self.img_mod: Any = nnx.List([None, Linear(c, 6 * c, rngs=rngs)])
        self.txt_mod: Any = nnx.List([None, Linear(c, 6 * c, rngs=rngs)])
        self.attn = JointAttention(c, heads=heads, bias=True, eps=_EPS, rngs=rngs)
        self.img_mlp = GELUFeedForward(c, rngs=rngs)
        self.txt_mlp = GELUFeedForward(c, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        text: jax.Array,
        active: Sequence[jax.Array],
        rotation: Rotation,
        lengths: jax.Array,
        own: Any,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the next block's tokens of images and text.

        Args:
            x: the tokens of the image, then of those to look at, b t c.
            text: b s c.
            active: what the modulations of images and text take, b c, and that of images to look
                at, where it differs from the image's.
            rotation: the positions of x, then of the text, 1 (t + s) d/2.
            lengths: the number of the text's tokens that are not padding, b.
            own: which tokens of x are the image's own, t 1.
        """
        of_x, of_text, *still = active
        rows = _modulations(self.img_mod, of_x)
        if still:
            others = _modulations(self.img_mod, still[0])
            rows = [jnp.where(own, row, other) for row, other in zip(rows, others)]
        shift, scale, gate, *x_rest = rows
        t_shift, t_scale, t_gate, *text_rest = _modulations(self.txt_mod, of_text)
        given = modulate(x, shift, scale), modulate(text, t_shift, t_scale)
        h, t_h = self.attn(*given, rotation, lengths)
        x = gated_layer(self.img_mlp, add_gated(x, gate, h), *x_rest)
        text = gated_layer(self.txt_mlp, add_gated(text, t_gate, t_h), *text_rest)
        return within_range(x), within_range(text)


def _modulations(layers: Any, active: jax.Array) -> list[jax.Array]:
    """Returns shift, scale and gate of attention, and of feed-forward layers, b 1 c each."""
    return jnp.split(gather_channels(layers[1](active))[:, None], 6, axis=-1)


class QwenImageTransformer2DModel(nnx.Module):
    """Predicts the flow from images to noise in latents, for a text and images to look at."""

    config_class = QwenImageTransformer2DConfig
    step_caches = TRANSFORMER_CACHES
    step_cache: Any = None
    """The cache of steps in an evaluation with one, see `models.caches.step_cache.Session`."""
    tensor_rules = QWEN_IMAGE_RULES
    adapter_groups = (
        r".*\.attn\.(to_(q|k|v|out\.0|add_out)|add_(q|k|v)_proj)",
        r"transformer_blocks\..*",
    )

    def __init__(self, config: QwenImageTransformer2DConfig, *, rngs: nnx.Rngs):
        self.config = config
        c, d = config.width, config.joint_attention_dim
        self.time_text_embed = TimeEmbedding(c, bias=True, rngs=rngs)
        self.txt_norm = RMSNorm(d, eps=_EPS, rngs=rngs)
        self.img_in = Linear(config.in_channels, c, rngs=rngs)
        self.txt_in = Linear(d, c, rngs=rngs)
        self.transformer_blocks = nnx.List(
            [QwenImageTransformerBlock(config, rngs=rngs) for _ in range(config.num_layers)]
        )
        self.norm_out = Modulation(c, 2, rngs=rngs)
        out = PATCH**2 * config.out_channels if config.out_channels else config.in_channels
        self.proj_out = Linear(c, out, rngs=rngs)

    def __call__(
        self,
        x: jax.Array,
        timestep: jax.Array,
        text: jax.Array,
        lengths: jax.Array,
        *,
        references: Sequence[jax.Array] = (),
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Returns the prediction, b h w c, in the dtype of the parameters.

        Args:
            x: the latents, b h w c.
            timestep: b, from 1 for noise to 0 for an image.
            text: the text encoder's hidden states, b s joint_attention_dim.
            lengths: the number of the text's tokens that are not padding, b.
            references: the latents of images to look at, b h w c each. They attend to the image,
                so that every step computes them, also with zero_cond_t.
            gradient_checkpointing: the activations that the gradient computes again, not keeping
                them: "none", or "blocks" or "full" for those within each block.

        Raises:
            ValueError: an input has another shape.
        """
        channels = self.config.in_channels // PATCH**2
        check_map("x", x, channels)
        for image in references:
            check_map("references", image, channels)
        check_tokens("text", text, {self.config.joint_attention_dim})
        check_rows(x, timestep=timestep, text=text, lengths=lengths)
        images = [x, *references]
        tokens = [patchify(image, PATCH, channels_first=True) for image in images]
        sizes = [(image.shape[1] // PATCH, image.shape[2] // PATCH) for image in images]
        rotation = token_rotation(self.config.axes_dims_rope, text.shape[1], *sizes)
        # What stands in padding is never attended to, but must be finite.
        seen = jnp.arange(text.shape[1]) < lengths[:, None]
        text = self.txt_in(self.txt_norm(jnp.where(seen[..., None], text, 0)))
        y = self.img_in(jnp.concatenate(tokens, axis=1))
        y, text = split_tokens(y), split_tokens(text)
        *active, last = self._activations(timestep, still=bool(references))
        remat, count = gradient_checkpointing != "none", tokens[0].shape[1]
        own = np.arange(y.shape[1])[:, None] < count

        def call(block: Any, given: Any, y: jax.Array, text: jax.Array) -> Any:
            return rematerialized(block, remat)(y, text, given, rotation, lengths, own)

        pairs = zip(self.transformer_blocks, zip(*active, strict=True), strict=True)
        steps = [functools.partial(call, *pair) for pair in pairs]
        y = through_blocks(self, (y, text), steps, lambda y, text: y)
        scale, shift = self.norm_out(last[0])
        y = self.proj_out(modulate(y[:, :count], shift, scale))
        return unpatchify(y, PATCH, *x.shape[1:3], channels_first=True)

    def _activations(self, timestep: jax.Array, *, still: bool) -> list[tuple[jax.Array, ...]]:
        """Returns what the modulations take, b c each: for images and text in each block, perhaps
        for images to look at, and for the last norm.

        still: whether there are images to look at.
        """
        blocks = len(self.transformer_blocks)
        temb = self.time_text_embed(timestep)
        found = activations(temb, blocks, blocks, 1)
        if still and self.config.zero_cond_t:
            found[2:2] = activations(self.time_text_embed(0 * timestep), blocks)
        return found


def token_rotation(dims: Sequence[int], text: int, *sizes: tuple[int, int]) -> Rotation:
    """Returns the rotations of the tokens of images, then of a text's, 1 t d/2.

    The i-th image stands at i, and its middle at zero; the text on the diagonal behind the largest
    image's middle.

    Args:
        dims: the channels of a head for the image's number, the row and the column.
        text: the number of the text's tokens.
        *sizes: the rows and columns of tokens of each image.
    """
    ids = [image_ids(i, rows, columns) for i, (rows, columns) in enumerate(sizes)]
    begin = max(side // 2 for size in sizes for side in size)
    ids.append(text_ids(begin, text))
    return rotation_at(np.concatenate(ids), dims, _THETA)
