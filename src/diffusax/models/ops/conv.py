"""Computes convolution, channels last, in two axes in the fastest form for platform and shape."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp

from diffusax.models.ops.matmul import matmul
from diffusax.models.quantized import Kernel, dense
from diffusax.models.streaming import computed
from diffusax.runtime.devices.lowering import by_platform, is_plain, known_sizes
from diffusax.runtime.devices.mesh import batch_size

Padding = tuple[tuple[int, int], tuple[int, int]]
Lowering = Literal["direct", "pointwise", "columns", "patches", "winograd"]


def conv2d(x: jax.Array, kernel: Kernel, *, stride: int = 1, padding: Padding) -> jax.Array:
    """Convolves x: b h w c with kernel: kh kw c d -> b h' w' d, in x's dtype, summed in float32."""
    kernel = dense(kernel)
    if is_plain():
        return _direct(x, kernel, stride, padding)
    return computed(_by_platform(x, kernel, stride=stride, padding=padding))


def conv3d(
    x: jax.Array, kernel: jax.Array, *, stride: int = 1, padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Convolves x: b f h w c with kernel: kf kh kw c d -> b f' h' w' d, in x's dtype.

    stride: over frames. padding: of frames, rows and columns.
    """
    if is_plain():
        return _over_frames(x, kernel, stride, padding)
    forms = {
        name: lambda x, k, form=form: form(x, k, stride, padding)
        for name, form in (("direct", _over_frames), ("stacked", _stacked_frames))
    }
    return computed(by_platform(_lowering_over_frames, forms, x, kernel))


def _lowering_over_frames(platform: str) -> str:
    """Chooses the lowering of a convolution over frames; CPUs have forms for two axes alone."""
    return "stacked" if platform == "cpu" else "direct"


def _over_frames(
    x: jax.Array, kernel: jax.Array, stride: int, padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Calls XLA's convolution of three axes."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, 1, 1), padding, dimension_numbers=("NDHWC", "DHWIO", "NDHWC")
    )


def _stacked_frames(
    x: jax.Array, kernel: jax.Array, stride: int, padding: tuple[tuple[int, int], ...]
) -> jax.Array:
    """Convolves frames of two axes, which have those that the kernel sees as further channels."""
    taps, kh, kw, c, d = kernel.shape
    x = jnp.pad(x, ((0, 0), padding[0], *[(0, 0)] * 3))
    b, count = x.shape[0], (x.shape[1] - taps) // stride + 1
    last = stride * (count - 1) + 1
    seen = jnp.concatenate([x[:, i : i + last : stride] for i in range(taps)], axis=-1)
    frames = seen.reshape(b * count, *seen.shape[2:])
    flat = kernel.transpose(1, 2, 0, 3, 4).reshape(kh, kw, taps * c, d)
    y = conv2d(frames, flat, padding=(padding[1], padding[2]))
    return y.reshape(b, count, *y.shape[1:])


# As for attention, layers of one shape are traced once.
@partial(jax.jit, static_argnames=("stride", "padding"), inline=True)
def _by_platform(x: jax.Array, kernel: jax.Array, *, stride: int, padding: Padding) -> jax.Array:
    # By position, because custom_jvp takes no keywords for static arguments.
    forms = {
        name: lambda x, k, form=form: form(x, k, stride, padding)
        for name, form in LOWERINGS.items()
    }

    def choose(platform: str) -> str:
        shapes = known_sizes(x.shape), kernel.shape
        return choose_lowering(platform, x.dtype, *shapes, stride, padding)

    return by_platform(choose, forms, x, kernel)


def choose_lowering(
    platform: str,
    dtype: Any,
    x_shape: Sequence[int],
    kernel_shape: Sequence[int],
    stride: int,
    padding: Padding,
) -> Lowering:
    """Chooses the lowering of a convolution: the fastest one in benchmarks/lowerings_cpu.py.

    GPU and TPU have convolution units, or libraries that try these forms themselves. XLA's own
    convolution on CPUs multiplies in float32 at nearly the machine's rate, with the options of
    `runtime.devices.lowering`; products of half precision are quicker, and Winograd's form where
    its transforms are few beside its products. Of a few small maps, XLA's TPU compiler cuts the
    columns into pieces that it takes for images, and computes those at the edges twice: a fifth
    more operations for 32x32, two fifths for 16x16.
    """
    kh, kw, c, d = kernel_shape
    if (kh, kw, stride, padding) == (1, 1, 1, ((0, 0), (0, 0))):
        return "pointwise"
    height, width = _output_size(x_shape, kernel_shape, stride, padding)
    if platform == "tpu" and (kh, kw, stride) == (3, 3, 1) and min(c, d) >= _MIN_CHANNELS:
        images = x_shape[0] / batch_size(jax.sharding.get_abstract_mesh())
        few = images < _MIN_IMAGES and _MIN_COLUMNS <= width <= _MAX_COLUMNS
        return "columns" if few else "direct"
    if platform != "cpu" or min(c, d) < _MIN_CHANNELS:
        return "direct"
    half = jnp.dtype(dtype).itemsize == 2
    tiles = x_shape[0] * math.ceil(height / 2) * math.ceil(width / 2)
    if (kh, kw, stride) == (3, 3, 1) and tiles >= _MIN_TILES and (half or _deep(tiles, c, d)):
        return "winograd"
    patches = x_shape[0] * height * width
    return "patches" if patches <= (_MAX_HALF_PATCHES if half else _MAX_PATCHES) else "direct"


def _deep(tiles: int, c: int, d: int) -> bool:
    """Returns whether Winograd's products in float32 make up for its transforms."""
    return min(c, d) >= _MIN_DEEP_CHANNELS and tiles * min(c, d) >= _MIN_DEEP_NUMBERS


# With fewer channels the products are too thin for the matrix unit to gain from them.
_MIN_CHANNELS = 128
# A TPU's vectors hold the same channel of eight images; as many images are not cut into pieces.
_MIN_IMAGES = 8
# Narrower maps are not cut. Writing wider ones three times takes as long as the operations that it
# saves.
_MIN_COLUMNS = 16
_MAX_COLUMNS = 64
# With fewer tiles, transforming the kernel costs more than the products that it saves. In float32
# transforming the maps does, too, with few channels or little of both.
_MIN_TILES = 128
_MIN_DEEP_CHANNELS = 192
_MIN_DEEP_NUMBERS = 2**16
# Of fewer numbers of maps for each of kernels, the transformed kernels take more memory and time.
_FEW = 4
# Every patch repeats its pixels kh kw times, which more of them do not make up for.
_MAX_PATCHES = 256
_MAX_HALF_PATCHES = 512
# Larger maps go through Winograd's algorithm in bands of rows.
_MAX_TEMPORARY_BYTES = 256 * 2**20


def _direct(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """Calls XLA's convolution. Every backend sums in float32, whatever dtype it returns."""
    return jax.lax.conv_general_dilated(
        x, kernel, (stride, stride), padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _pointwise(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """Computes a 1x1 convolution as one product over the channels."""
    return matmul(x, kernel[0, 0])


def _columns(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """Convolves maps whose neighbouring columns lie side by side as channels, by rows alone."""
    (kh, kw, c, d), (_, width) = kernel.shape, _output_size(x.shape, kernel.shape, stride, padding)
    x = jnp.pad(x, ((0, 0), (0, 0), padding[1], (0, 0)))
    last = stride * (width - 1) + 1
    beside = jnp.concatenate([x[:, :, j : j + last : stride] for j in range(kw)], axis=-1)
    return jax.lax.conv_general_dilated(
        beside,
        kernel.reshape(kh, 1, kw * c, d),
        (stride, 1),
        (padding[0], (0, 0)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


def _patches(x: jax.Array, kernel: jax.Array, stride: int, padding: Padding) -> jax.Array:
    """Multiplies all patches of the map with the kernel as one matrix product ("im2col")."""
    patches = jnp.concatenate(_tap_pixels(x, kernel.shape, stride, padding), axis=-1)
    return matmul(patches, kernel.reshape(-1, kernel.shape[-1]))


# F(2x2, 3x3): y = A^T [(G k G^T) * (B^T x B)] A for 2x2 outputs of 4x4 inputs.
_B_T = ((1, 0, -1, 0), (0, 1, 1, 0), (0, -1, 1, 0), (0, 1, 0, -1))
_G = ((1, 0, 0), (0.5, 0.5, 0.5), (0.5, -0.5, 0.5), (0, 0, 1))
_A_T = ((1, 1, 1, 0), (0, 1, -1, -1))


@partial(jax.custom_jvp, nondiff_argnums=(2, 3, 4))
def _winograd(
    x: jax.Array,
    kernel: jax.Array,
    stride: int,
    padding: Padding,
    max_bytes: int = _MAX_TEMPORARY_BYTES,
) -> jax.Array:
    """Computes a 3x3 convolution with 16 multiplications per 2x2 outputs instead of 36.

    Lavin and Gray 2016, "Fast algorithms for convolutional neural networks", section 4.1. In the
    larger F(4x4, 3x3) the transforms' coefficients cost bfloat16 all its digits.
    """
    height, width = _output_size(x.shape, kernel.shape, stride, padding)
    rows, columns = math.ceil(height / 2), math.ceil(width / 2)
    band = _rows_per_band(x, kernel, rows, columns, max_bytes)
    bands = math.ceil(rows / band)

    (top, _), (left, _) = padding
    below = 2 * bands * band + 2 - top - x.shape[1]
    right = 2 * columns + 2 - left - x.shape[2]
    x = jnp.pad(x, ((0, 0), (top, below), (left, right), (0, 0)))
    if bands == 1:
        return _winograd_band(x, kernel)[:, :height, :width]

    x = jnp.stack([x[:, 2 * band * i : 2 * band * (i + 1) + 2] for i in range(bands)])
    y = jax.lax.map(lambda x: _winograd_band(x, kernel), x)
    y = jnp.moveaxis(y, 0, 1).reshape(y.shape[1], -1, *y.shape[3:])
    return y[:, :height, :width]


@_winograd.defjvp
def _winograd_tangent(
    stride: int,
    padding: Padding,
    max_bytes: int,
    primals: tuple[jax.Array, jax.Array],
    tangents: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    """Returns the direct convolution's tangent, because its transpose is convolutions again."""
    (x, kernel), (dx, dkernel) = primals, tangents
    dy = _direct(dx, kernel, stride, padding) + _direct(x, dkernel, stride, padding)
    return _winograd(x, kernel, stride, padding, max_bytes), dy


def _rows_per_band(x: jax.Array, kernel: jax.Array, rows: int, columns: int, max_bytes: int) -> int:
    """Returns the number of rows of tiles to take at once; bands are as equal as possible."""
    row_bytes = known_sizes(x.shape)[0] * columns * 16 * kernel.shape[3] * 4
    bands = math.ceil(rows / max(1, max_bytes // row_bytes))
    return math.ceil(rows / bands)


def _winograd_band(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Convolves one band of rows. x: b 2r+2 2s+2 c -> b 2r 2s d."""
    b, r, s, c = x.shape[0], x.shape[1] // 2 - 1, x.shape[2] // 2 - 1, x.shape[3]

    def product(i: int, j: int, x: jax.Array, kernel: jax.Array) -> jax.Array:
        x32, k32 = x.astype(jnp.float32), kernel.astype(jnp.float32)
        row = _combine(_B_T[i], lambda n: jax.lax.slice_in_dim(x32, n, n + 2 * r - 1, 2, axis=1))
        v = _combine(_B_T[j], lambda n: jax.lax.slice_in_dim(row, n, n + 2 * s - 1, 2, axis=2))
        tap = _combine(_G[i], lambda n: jax.lax.index_in_dim(k32, n, keepdims=False))
        u = _combine(_G[j], lambda n: jax.lax.index_in_dim(tap, n, keepdims=False))
        v, u = v.astype(x.dtype).reshape(b * r * s, c), u.astype(kernel.dtype)
        return jnp.matmul(v, u, preferred_element_type=jnp.float32)

    products = [partial(product, i, j) for i in range(4) for j in range(4)]
    if known_sizes((b,))[0] * r * s * sum(kernel.shape[2:]) < _FEW * math.prod(kernel.shape[2:]):
        # One product at a time, so that only one transformed kernel is in memory.
        m = jax.lax.map(lambda n: jax.lax.switch(n, products, x, kernel), jnp.arange(16))
        taps = [jax.lax.index_in_dim(m, n, keepdims=False) for n in range(16)]
    else:
        # Else XLA would write the padded map in float32.
        x = jax.lax.optimization_barrier(x)
        taps = [product(x, kernel) for product in products]

    def output(p: int, q: int) -> jax.Array:
        return _combine(_A_T[p], lambda i: _combine(_A_T[q], lambda j: taps[4 * i + j]))

    y = [[output(p, q) for q in range(2)] for p in range(2)]
    tiles = jnp.stack([jnp.stack(row, axis=1) for row in y], axis=1)
    tiles = tiles.astype(x.dtype).reshape(b, r, s, 2, 2, -1)
    return tiles.transpose(0, 1, 3, 2, 4, 5).reshape(b, 2 * r, 2 * s, -1)


def _combine(weights: Sequence[float], term: Callable[[int], jax.Array]) -> jax.Array:
    """Returns the weighted sum of term(0), term(1), ... without those whose weight is 0.

    It uses few operations, because a network has hundreds of these to trace.
    """
    total: jax.Array | None = None
    for n, weight in enumerate(weights):
        if weight:
            x = term(n) if abs(weight) == 1 else abs(weight) * term(n)
            if total is None:
                total = x if weight > 0 else jax.lax.neg(x)
            else:
                total = (jax.lax.add if weight > 0 else jax.lax.sub)(total, x)
    assert total is not None
    return total


def _tap_pixels(
    x: jax.Array, kernel_shape: Sequence[int], stride: int, padding: Padding
) -> list[jax.Array]:
    """Returns, for each tap of the kernel, the pixels that it multiplies, b h' w' c."""
    height, width = _output_size(x.shape, kernel_shape, stride, padding)
    x = jnp.pad(x, ((0, 0), *padding, (0, 0)))
    return [
        x[:, i : i + stride * (height - 1) + 1 : stride, j : j + stride * (width - 1) + 1 : stride]
        for i in range(kernel_shape[0])
        for j in range(kernel_shape[1])
    ]


def _output_size(
    x_shape: Sequence[int], kernel_shape: Sequence[int], stride: int, padding: Padding
) -> tuple[int, int]:
    height, width = (
        (size + sum(pad) - k) // stride + 1
        for size, k, pad in zip(x_shape[1:3], kernel_shape[:2], padding, strict=True)
    )
    return height, width


LOWERINGS: dict[str, Callable[..., jax.Array]] = {
    "direct": _direct,
    "pointwise": _pointwise,
    "columns": _columns,
    "patches": _patches,
    "winograd": _winograd,
}
"""The lowerings by name; each takes x, kernel, stride and padding, and winograd how many bytes of
transformed tiles to hold at once.
"""
