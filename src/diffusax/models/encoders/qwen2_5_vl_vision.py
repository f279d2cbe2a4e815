"""Qwen2.5-VL's vision network (Bai et al. 2025): images of any size to its language model's tokens.

Upstream: transformers models/qwen2_5_vl/modeling_qwen2_5_vl.py and vision_utils.py.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.encoders.qwen2_5_vl_configs import Qwen2_5_VLVisionConfig
from diffusax.models.encoders.qwen3 import Qwen3MLP, Rotary
from diffusax.models.encoders.qwen3_vl_vision import (
    Qwen3VLVisionAttention,
    Qwen3VLVisionPatches,
    VisionOutput,
    axial_rotary,
    patch_places,
)
from diffusax.models.layers.inputs import check_tokens
from diffusax.models.layers.layers import Linear, RMSNorm
from diffusax.models.ops.activations import gelu
from diffusax.models.ops.attention import attention
from diffusax.models.streaming import streamed
from diffusax.runtime.devices.mesh import Rule, Rules

VISION_RULES: Rules = (
    Rule(r"attn\.qkv\.kernel", -1, widths="widths"),
    Rule(r"attn\.proj\.kernel", -2, "heads"),
    (r"mlp\.(gate|up)_proj\.(kernel|bias)", -1),
    (r"mlp\.down_proj\.kernel", -2),
)
"""The tensor axis splits the heads and the feed-forward's inner channels."""


class Windows(NamedTuple):
    """The windows of images, each with as many slots as its patches may be.

    slots: b n, where a patch is among the slots of all windows. patches: b w s, which patch is in
    a slot; empty slots follow the others of a window. lengths: b w, the patches of each window, at
    least one.
    """

    slots: jax.Array
    patches: jax.Array
    lengths: jax.Array


def find_windows(grid: jax.Array, count: int, side: int, merge: int) -> Windows:
    """Divides images into windows, row by row from the upper left; those at an end are smaller.

    Args:
        grid: b 2, how many rows and columns of patches images have.
        count: n, their product. Patches are in the order of merged squares.
        side: the side of a window in merged squares.
        merge: the side of a merged square in patches.
    """
    index, columns = jnp.arange(count), grid[:, 1:] // merge
    square, inside = index // merge**2, index % merge**2
    row, column = square // columns, square % columns
    window = row // side * -(-columns // side) + column // side
    width = jnp.minimum(side, columns - column // side * side)
    place = row % side * width + column % side
    size = (side * merge) ** 2
    slots = window * size + place * merge**2 + inside
    # Images one square high, or wide, have the most windows.
    most = -(-count // merge**2 // side)
    rows = jnp.arange(grid.shape[0])[:, None]
    patches = jnp.zeros((grid.shape[0], most * size), jnp.int32).at[rows, slots].set(index)
    lengths = jnp.zeros((grid.shape[0], most), jnp.int32).at[rows, window].add(1)
    return Windows(slots, patches.reshape(-1, most, size), jnp.maximum(lengths, 1))


def window_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, windows: Windows) -> jax.Array:
    """Attention of patches to those of their window. q, k, v: b n h d -> b n h d."""
    count, size = windows.patches.shape[1:]
    places = windows.patches.reshape(len(q), -1)[:, :, None, None]

    def arranged(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, places, 1).reshape(-1, size, *x.shape[2:])

    y = attention(*map(arranged, (q, k, v)), key_lengths=windows.lengths.reshape(-1))
    y = y.reshape(len(q), count * size, *q.shape[2:])
    return jnp.take_along_axis(y, windows.slots[:, :, None, None], 1)


class Qwen2_5_VLVisionBlock(nnx.Module):
    """Attention and feed-forward layer, each after a norm, b n c -> b n c."""

    def __init__(self, config: Qwen2_5_VLVisionConfig, *, rngs: nnx.Rngs):
        self.norm1 = RMSNorm(config.hidden_size, rngs=rngs)
        self.norm2 = RMSNorm(config.hidden_size, rngs=rngs)
        self.attn = Qwen3VLVisionAttention(config, rngs=rngs)
        self.mlp = Qwen3MLP(config, bias=True, rngs=rngs)

    def __call__(self, x: jax.Array, rotary: Rotary, windows: Windows | None) -> jax.Array:
        attend: Any = attention
        if windows is not None:
            attend = partial(window_attention, windows=windows)
        x = x + self.attn(self.norm1(x), rotary, attend)
        return x + self.mlp(self.norm2(x))


class Qwen2_5_VLPatchMerger(nnx.Module):
    """Makes a token of each square of m m patches, b n c -> b n/m² d."""

    def __init__(self, config: Qwen2_5_VLVisionConfig, *, rngs: nnx.Rngs):
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.ln_q = RMSNorm(config.hidden_size, rngs=rngs)
        first = Linear(self.width, self.width, rngs=rngs)
        last = Linear(self.width, config.out_hidden_size, rngs=rngs)
        self.mlp = nnx.Dict({"0": first, "2": last})

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.ln_q(x).reshape(x.shape[0], -1, self.width)
        return self.mlp["2"](gelu(self.mlp["0"](x)))


class Qwen2_5_VisionTransformerPretrainedModel(nnx.Module):
    """Qwen2.5-VL's vision network: patches of images to tokens for the language model."""

    config_class = Qwen2_5_VLVisionConfig
    tensor_rules = VISION_RULES
    adapter_groups = (r".*\.attn\.(qkv|proj)", r".*blocks\..*")

    def __init__(self, config: Qwen2_5_VLVisionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = Qwen3VLVisionPatches(config, bias=False, rngs=rngs)
        self.blocks = nnx.List(
            [Qwen2_5_VLVisionBlock(config, rngs=rngs) for _ in range(config.depth)]
        )
        self.merger = Qwen2_5_VLPatchMerger(config, rngs=rngs)

    def __call__(self, pixel_values: jax.Array, grid: jax.Array) -> VisionOutput:
        """Encodes images, or frames of videos, of as many patches each.

        All images of n patches share a compiled program, whatever their shapes are. The last hidden
        state has its patches in the order of windows, as transformers' has.

        Args:
            pixel_values: the patches in the order of merged squares, b n p, where p are the
                channels, frames, rows and columns of a patch; see `Qwen2VLImageProcessor`.
            grid: b 2, integers: how many rows and columns of patches each image has.

        Raises:
            ValueError: pixel_values have another shape.
        """
        config = self.config
        check_tokens("pixel_values", pixel_values, {config.patch_values})
        count, merge = pixel_values.shape[1], config.spatial_merge_size
        rotary = axial_rotary(
            *patch_places(grid, count, merge), config.hidden_size // config.num_heads
        )
        windows = find_windows(grid, count, config.window_squares, merge)
        x = self.patch_embed(pixel_values)
        for i, block in enumerate(self.blocks):
            x = streamed(block)(x, rotary, None if i in config.fullatt_block_indexes else windows)
        order = jnp.argsort(windows.slots, axis=1)[..., None]
        return VisionOutput(jnp.take_along_axis(x, order, 1), self.merger(x), ())
