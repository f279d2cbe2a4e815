"""Qwen3-VL's vision network (Bai et al. 2025): images of any size to tokens for its language model.

Upstream: transformers models/qwen3_vl/modeling_qwen3_vl.py and vision_utils.py.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import lecun_normal, zeros

from diffusax.models.encoders.hidden_states import ImageTokens
from diffusax.models.encoders.qwen3 import Rotary, rotary_table, rotate
from diffusax.models.encoders.qwen3_vl_configs import Qwen3VLVisionConfig
from diffusax.models.layers.inputs import check_tokens
from diffusax.models.layers.layers import Embedding, LayerNorm, Linear, SplitLinear
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.activations import approximate_gelu, gelu
from diffusax.models.ops.attention import attention
from diffusax.models.ops.matmul import matmul
from diffusax.models.streaming import streamed
from diffusax.runtime.devices.mesh import Rule, Rules

VISION_RULES: Rules = (
    Rule(r"attn\.qkv\.kernel", -1, widths="widths"),
    Rule(r"attn\.proj\.kernel", -2, "heads"),
    (r"mlp\.linear_fc1\.(kernel|bias)", -1),
    (r"mlp\.linear_fc2\.kernel", -2),
)
"""The tensor axis splits the heads and the feed-forward's inner channels."""
_EPS = 1e-6
_THETA = 10000.0


class VisionOutput(NamedTuple):
    """The outputs of the vision network, of images with n patches each, merged m by m.

    last_hidden_state: b n c. pooler_output: b n/m² d, what the language model reads in the place of
    the image's tokens. deepstack_features: b n/m² d each, what is added to their states after the
    language model's first layers.
    """

    last_hidden_state: jax.Array
    pooler_output: jax.Array
    deepstack_features: tuple[jax.Array, ...]

    def tokens(self, mask: jax.Array) -> ImageTokens:
        """Returns what a language model reads in the place of the tokens that stand for images.

        The arrays have no axis b, see `encode_each`. mask: b t, which tokens these are.
        """
        return ImageTokens(mask, self.pooler_output, self.deepstack_features)


def encode_each(
    run: Callable[[jax.Array, jax.Array], VisionOutput],
    patches: Sequence[jax.Array],
    grids: Any,
) -> VisionOutput:
    """Encodes images of any sizes, those of as many patches together.

    Args:
        run: the vision network, see `Qwen3VLVisionModel.__call__`.
        patches: the patches of each image, n p.
        grids: the rows and columns of patches of each image, k 2.

    Returns:
        The outputs for all images in a row: arrays n c.
    """
    groups: dict[int, list[int]] = {}
    for i, x in enumerate(patches):
        groups.setdefault(x.shape[0], []).append(i)
    found: dict[int, VisionOutput] = {}
    for own in groups.values():
        grid = jnp.stack([jnp.asarray(grids[i], jnp.int32) for i in own])
        output = run(jnp.stack([jnp.asarray(patches[i]) for i in own]), grid)
        found |= {i: jax.tree.map(lambda x, row=row: x[row], output) for row, i in enumerate(own)}
    joined: VisionOutput = jax.tree.map(
        lambda *parts: jnp.concatenate(parts), *(found[i] for i in range(len(patches)))
    )
    return joined


def patch_places(grid: jax.Array, count: int, merge: int) -> tuple[jax.Array, jax.Array]:
    """Returns the rows and the columns of patches, b n each, whose order is that of merged squares.

    grid: b 2, how many rows and columns of patches images have. count: n, their product.
    """
    index = jnp.arange(count)
    square, inside = index // merge**2, index % merge**2
    squares = grid[:, 1:] // merge
    rows = square // squares * merge + inside // merge
    return rows, square % squares * merge + inside % merge


def interpolated(table: jax.Array, rows: jax.Array, columns: jax.Array, grid: jax.Array) -> Any:
    """Returns learned positions of patches, between those of a square whose corners are the grid's.

    table: s² c for a square of s s. rows, columns: b n. grid: b 2. -> b n c, float32.
    """
    side = round(table.shape[0] ** 0.5)
    axes = []
    for places, size in zip((rows, columns), (grid[:, :1], grid[:, 1:])):
        place = places.astype(jnp.float32) * (side - 1) / jnp.maximum(size - 1, 1)
        first = jnp.floor(place)
        near = first.astype(jnp.int32)
        axes.append(((near, 1 - (place - first)), (jnp.minimum(near + 1, side - 1), place - first)))
    found = [
        table[row * side + column] * (weight * other)[..., None]
        for row, weight in axes[0]
        for column, other in axes[1]
    ]
    return sum(found[1:], found[0])


def axial_rotary(rows: jax.Array, columns: jax.Array, dim: int) -> Rotary:
    """Computes the rotary tables of patches for heads of dim channels, b n dim/2 each.

    The first half turns by the rows, the second by the columns, b n each.
    """
    tables = [rotary_table(axis[..., None], dim // 2, _THETA) for axis in (rows, columns)]
    cos, sin = (jnp.concatenate(pair, axis=-1) for pair in zip(*tables))
    return cos, sin


class Qwen3VLVisionPatches(nnx.Module):
    """Embeds patches of several frames, b n (channels frames rows columns) -> b n c."""

    def __init__(self, config: Any, *, bias: bool = True, rngs: nnx.Rngs):
        size = (config.temporal_patch_size, config.patch_size, config.patch_size)
        options: dict[str, Any] = {"kernel_init": shaped(lecun_normal()), "use_bias": bias}
        options["bias_init"] = shaped(zeros)
        self.proj = nnx.Conv(config.in_channels, config.hidden_size, size, rngs=rngs, **options)

    def __call__(self, x: jax.Array) -> jax.Array:
        kernel: Any = self.proj.kernel[...]
        # Kernels are as large as their distance, so that a product computes the convolution.
        flat = kernel.transpose(3, 0, 1, 2, 4).reshape(-1, kernel.shape[-1])
        bias: Any = self.proj.bias
        return matmul(x.astype(kernel.dtype), flat, None if bias is None else bias[...])


class Qwen3VLVisionAttention(nnx.Module):
    """Attention of the patches of an image to each other, b n c -> b n c."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        c = config.hidden_size
        self.heads = config.num_heads
        self.qkv = SplitLinear(c, (c, c, c), rngs=rngs)
        self.proj = Linear(c, c, rngs=rngs)

    def __call__(
        self, x: jax.Array, rotary: Rotary, attend: Callable[..., jax.Array] = attention
    ) -> jax.Array:
        q, k, v = (y.reshape(*y.shape[:2], self.heads, -1) for y in self.qkv(x))
        y = attend(rotate(q, rotary), rotate(k, rotary), v)
        return self.proj(y.reshape(x.shape))


class Qwen3VLVisionMLP(nnx.Module):
    """A feed-forward layer, b n c -> b n c."""

    def __init__(self, config: Qwen3VLVisionConfig, *, rngs: nnx.Rngs):
        c, d = config.hidden_size, config.intermediate_size
        self.linear_fc1 = Linear(c, d, rngs=rngs)
        self.linear_fc2 = Linear(d, c, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.linear_fc2(approximate_gelu(self.linear_fc1(x)))


class Qwen3VLVisionBlock(nnx.Module):
    """Attention and feed-forward layer, each after a norm, b n c -> b n c."""

    def __init__(self, config: Qwen3VLVisionConfig, *, rngs: nnx.Rngs):
        self.norm1 = LayerNorm(config.hidden_size, eps=_EPS, rngs=rngs)
        self.norm2 = LayerNorm(config.hidden_size, eps=_EPS, rngs=rngs)
        self.attn = Qwen3VLVisionAttention(config, rngs=rngs)
        self.mlp = Qwen3VLVisionMLP(config, rngs=rngs)

    def __call__(self, x: jax.Array, rotary: Rotary) -> jax.Array:
        x = x + self.attn(self.norm1(x), rotary)
        return x + self.mlp(self.norm2(x))


class Qwen3VLVisionPatchMerger(nnx.Module):
    """Makes a token of each square of m m patches, b n c -> b n/m² d.

    joined: whether the norm is over the square's channels together.
    """

    def __init__(self, config: Qwen3VLVisionConfig, *, joined: bool, rngs: nnx.Rngs):
        self.width = config.hidden_size * config.spatial_merge_size**2
        self.joined = joined
        width = self.width if joined else config.hidden_size
        self.norm = LayerNorm(width, eps=_EPS, rngs=rngs)
        self.linear_fc1 = Linear(self.width, self.width, rngs=rngs)
        self.linear_fc2 = Linear(self.width, config.out_hidden_size, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        shape = (x.shape[0], -1, self.width)
        x = self.norm(x.reshape(shape)) if self.joined else self.norm(x).reshape(shape)
        return self.linear_fc2(gelu(self.linear_fc1(x)))


class Qwen3VLVisionModel(nnx.Module):
    """Qwen3-VL's vision network: patches of images to tokens for the language model."""

    config_class = Qwen3VLVisionConfig
    tensor_rules = VISION_RULES
    adapter_groups = (r".*\.attn\.(qkv|proj)", r".*blocks\..*")

    def __init__(self, config: Qwen3VLVisionConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch_embed = Qwen3VLVisionPatches(config, rngs=rngs)
        self.pos_embed = Embedding(config.num_position_embeddings, config.hidden_size, rngs=rngs)
        self.blocks = nnx.List([Qwen3VLVisionBlock(config, rngs=rngs) for _ in range(config.depth)])
        self.merger = Qwen3VLVisionPatchMerger(config, joined=False, rngs=rngs)
        self.deepstack_merger_list = nnx.List(
            [
                Qwen3VLVisionPatchMerger(config, joined=True, rngs=rngs)
                for _ in config.deepstack_visual_indexes
            ]
        )

    def __call__(self, pixel_values: jax.Array, grid: jax.Array) -> VisionOutput:
        """Encodes images, or frames of videos, of as many patches each.

        All images of n patches share a compiled program, whatever their shapes are.

        Args:
            pixel_values: the patches in the order of merged squares, b n p, where p are the
                channels, frames, rows and columns of a patch; see `Qwen2VLImageProcessor`.
            grid: b 2, integers: how many rows and columns of patches each image has.

        Raises:
            ValueError: pixel_values have another shape.
        """
        config = self.config
        check_tokens("pixel_values", pixel_values, {config.patch_values})
        rows, columns = patch_places(grid, pixel_values.shape[1], config.spatial_merge_size)
        x = self.patch_embed(pixel_values)
        places = interpolated(self.pos_embed.embedding[...], rows, columns, grid)
        x = x + places.astype(x.dtype)
        rotary = axial_rotary(rows, columns, config.hidden_size // config.num_heads)
        indices, deepstack = config.deepstack_visual_indexes, dict[int, jax.Array]()
        for i, block in enumerate(self.blocks):
            x = streamed(block)(x, rotary)
            if i in indices:
                deepstack[i] = self.deepstack_merger_list[indices.index(i)](x)
        return VisionOutput(x, self.merger(x), tuple(deepstack.values()))
