"""The order in memory in which a device's library reads kernels.

cuDNN reads the kernel of a convolution of images b h w c as d h w c, and writes gradients so. XLA
stores arrays row by row unless it is told otherwise, so that every call of a program would copy all
kernels, h w c d, into that order first, and a training step their gradients and moments, too.
Shapes and values stay what they are, and files know nothing of it.

NVIDIA's tensor cores multiply integers of eight bits whose inputs lie beside each other, so that
kernels c d of int8 lie as d c where `int8_activations` is "on" while they are placed.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from jax.sharding import Sharding

from diffusax.runtime.devices.chips import CHANNELS_LAST, capability_of
from diffusax.runtime.devices.host import KIND
from diffusax.runtime.devices.lowering import int8_choice, platform_of

ORDERS = {"cuda": (3, 0, 1, 2)}
"""The axes of a kernel h w c d from the slowest to the quickest, by platform (`platform_of`).

Kernels over frames, t h w c d, have t before h. AMD's MIOpen has none here: XLA gives it the order
in which it would convolve images b c h w.
"""
INT8_ORDERS = {"cuda": (1, 0)}
"""The same for kernels c d of int8."""
_TILES_OF_BYTES = ((8, 128), (4, 1))
"""How TPUs' programs tile numbers of eight bits that they copy from the host's memory.

XLA stores them in tiles of 32 rows, and would send each kernel to the TPU, back to the host in
these tiles, and to the TPU again.
"""
_CHANNELS_FIRST = (3, 2, 0, 1)
_CHANNELS_LAST = {"float16": (7, 0), "bfloat16": CHANNELS_LAST, "float32": CHANNELS_LAST}
"""The compute capability from which XLA convolves images b h w c; before it converts them to
b c h w, and kernels to d c h w."""


def is_kernel(shape: Sequence[int]) -> bool:
    """Returns whether a parameter is a convolution's kernel, over pixels or frames of them.

    Kernels of one pixel are matrices, which are multiplied as they are.
    """
    return len(shape) in (4, 5) and tuple(shape[-4:-2]) != (1, 1)


def usual_order(shape: Sequence[int], platform: str) -> tuple[int, ...] | None:
    """Returns the order of a parameter's axes on a platform; None where it is the usual one."""
    order = ORDERS.get(platform) if is_kernel(shape) else None
    return None if order is None else _over_frames(order, len(shape))


def _over_frames(order: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """Returns the order of the axes h w c d, or that of t h w c d, where t stands before h."""
    if axes == 4:
        return order
    found = ((0, 1) if axis == 0 else (axis + 1,) for axis in order)
    return tuple(axis for axes in found for axis in axes)


def kernel_order(shape: Sequence[int], dtype: Any, device: Any) -> tuple[int, ...] | None:
    """Returns the order of a parameter's axes in memory; None where it is the usual one."""
    if len(shape) == 2 and jnp.dtype(dtype) == jnp.int8:
        # Those that are multiplied out would be copied into the other order, all of them.
        return INT8_ORDERS.get(platform_of(device)) if int8_choice() == "on" else None
    order = usual_order(shape, platform_of(device))
    if order is None:
        return None
    # Maps over frames are b f h w c only where XLA's option says so, see `compiler_options`.
    least = _CHANNELS_LAST.get(jnp.dtype(dtype).name) if len(shape) == 4 else CHANNELS_LAST
    capability = capability_of(device)
    old = capability is not None and least is not None and capability < least
    return _over_frames(_CHANNELS_FIRST, len(shape)) if old else order


def place_of(x: Any, sharding: Sharding) -> Any:
    """Returns where and in which order a parameter, or its shape, lies on a sharding's devices."""
    device: Any = next(iter(sharding.device_set))
    if platform_of(device) == "tpu" and _in_bytes_on_host(x, sharding):
        return Format(Layout(tuple(range(x.ndim)), tiling=_TILES_OF_BYTES), sharding)
    order = kernel_order(x.shape, x.dtype, device)
    return sharding if order is None else Format(Layout(order), sharding)


def _in_bytes_on_host(x: Any, sharding: Sharding) -> bool:
    """Returns whether a parameter of eight bits lies in the host's memory."""
    return sharding.memory_kind == KIND and x.dtype.itemsize == 1 and x.ndim > 1


def tree_places(tree: Any, shardings: Any) -> Any:
    """Returns `place_of` each parameter of a tree, which may hold shapes."""
    return jax.tree.map(place_of, tree, shardings)


def in_order(params: Any) -> Any:
    """Returns parameters in the order of their devices; those that are so already stay.

    Arrays of NumPy and shapes stay as they are.
    """

    def one(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer) or x.ndim in (1, 3):
            return x
        place = place_of(x, x.sharding)
        if place is x.sharding or order_of(x) == place.layout.major_to_minor:
            return x
        return jax.device_put(x, place)

    found = jax.tree.map(one, params)
    pairs = zip(jax.tree.leaves(params), jax.tree.leaves(found), strict=True)
    # Pipelines that share parameters know it by the tree that they share.
    return params if all(before is after for before, after in pairs) else found


def order_of(x: Any) -> tuple[int, ...] | None:
    """Returns the order of an array's, or a shape's, axes in memory; None for the usual one."""
    found = getattr(getattr(x, "format", None), "layout", None)
    order = None if found is None else tuple(found.major_to_minor)
    return None if order == tuple(range(x.ndim)) else order
