"""Kernels of eight bits in the place of a network's parameters.

A `Quantized` kernel is multiplied out where a layer reads it: XLA does so while it loads the kernel
for the product, so that device memory holds the eight bits alone. Inputs and results keep the dtype
of computation.
"""

import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from diffusax.models.parameter_tree import Replacement, replaces
from diffusax.runtime.devices.host import device_place, on_device
from diffusax.runtime.devices.layouts import place_of
from diffusax.runtime.devices.splitting import split_widths

Weights = Literal["int8", "int8_convrot", "fp8"]
"""What kernels are stored as: integers, integers of rotated inputs as ConvRot has them, or
floating-point numbers of four bits of exponent and three of mantissa (float8_e4m3fn, Micikevicius
et al. 2022)."""
Stored = Literal["int8", "int8_convrot", "fp8", "file"]
"""What kernels are stored as when they are loaded: "file" keeps their numbers in the file as they
are, in eight bits where it has eight or fewer."""
_STORED: dict[str, tuple[Any, float]] = {
    "int8": (np.int8, 127.0),
    "int8_convrot": (np.int8, 127.0),
    "fp8": (ml_dtypes.float8_e4m3fn, 448.0),
}
"""The dtype and the largest number of each kind."""
_LEAST = 16
"""The fewest inputs for which scales are small beside the kernel."""
_PART = 2**18
"""The numbers of a kernel that are in float32 at once: few enough for a processor's cache."""
_HADAMARD = ((1, 1, 1, -1), (1, 1, -1, 1), (1, -1, 1, 1), (-1, 1, 1, 1))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Quantized(Replacement):
    """A kernel of eight bits: H (values * scale * fine - least), with H the rotation of `rotation`.

    `[...]` multiplies it out. Scales of blocks, along the inputs of a linear layer, have the shape
    (blocks, d).
    """

    values: Any
    """The numbers, int8 or float8, in the kernel's shape: c d, or h w c d. Those of GGUF's Q4 are
    integers of four bits, of which two share a byte, but on CPUs."""
    scale: Any
    """What they are multiplied by: () one number, (d,) one for each output channel, or that of each
    block of inputs as well."""
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    """The dtype of computation."""
    rotation: int = dataclasses.field(default=0, metadata={"static": True})
    """The number of inputs in a group that is rotated by `hadamard`, as ConvRot does; 0 for none.
    """
    fine: Any = None
    """Further scales of smaller blocks; None without."""
    least: tuple[Any, ...] = ()
    """What is subtracted, as the product of numbers of blocks; nothing where it is empty."""

    def astype(self, dtype: Any) -> Self:
        """Returns the same numbers for computation in another dtype."""
        return dataclasses.replace(self, dtype=np.dtype(dtype))

    def __getitem__(self, key: Any) -> jax.Array:
        """Returns a part of the kernel in the dtype of computation; `[...]` is all of it."""
        kernel = self.unrotated()
        if self.rotation:
            kernel = rotate(kernel.astype(jnp.float32).T, self.rotation).T.astype(self.dtype)
        return kernel[key]

    @property
    def is_by_channel(self) -> bool:
        """Whether all inputs of an output channel have one scale, and are not rotated."""
        return not self.rotation and self.has_channel_scales

    @property
    def has_channel_scales(self) -> bool:
        """Whether all inputs of an output channel have one scale."""
        return self.scale.ndim < 2 and self.fine is None and not self.least

    def with_values(self, values: Any) -> Self:
        """Returns a kernel with the same scales and other numbers."""
        return dataclasses.replace(self, values=values)

    def unrotated(self) -> jax.Array:
        """Returns values * scale in the dtype of computation, rounded once."""
        values = jnp.asarray(self.values).astype(jnp.float32)
        if self.has_channel_scales:
            return (values * self.scale).astype(self.dtype)
        scales = (self.scale,) if self.fine is None else (self.scale, self.fine)
        count = max(len(level) for level in (*scales, *self.least) if level.ndim == 2)
        kernel = values.reshape(count, -1, self.shape[-1]) * _product(scales, count)
        if self.least:
            kernel = kernel - _product(self.least, count)
        return kernel.reshape(self.shape).astype(self.dtype)

    def rotated(self, x: jax.Array) -> jax.Array:
        """Returns what `unrotated` is multiplied by in the place of x. x: ... c -> ... c."""
        return rotate(x, self.rotation) if self.rotation else x

    def columns(self, widths: Sequence[int], parts: int = 1) -> list[Self]:
        """Returns the kernels that stand side by side in this one, see `split_widths`."""
        leaves, structure = jax.tree.flatten(self)
        split = [split_widths(x, widths, parts) if x.ndim else [x] * len(widths) for x in leaves]
        return [jax.tree.unflatten(structure, part) for part in zip(*split, strict=True)]

    def refilled(self, kernel: Any) -> Self:
        """Returns another kernel in the same bits, with one scale for each output channel."""
        kind: Weights = "int8" if jnp.issubdtype(self.values.dtype, jnp.integer) else "fp8"
        kernel = jnp.asarray(kernel, jnp.float32)
        if self.rotation:
            kernel = rotate(kernel.T, self.rotation).T
        new = _quantize_there(kernel, kind=kind)
        return dataclasses.replace(new, dtype=self.dtype, rotation=self.rotation)

    def places(self, sharding: Any) -> Any:
        """Returns the places of all arrays where the kernel's is given."""
        if not isinstance(sharding, NamedSharding):
            own = device_place(sharding)
            return jax.tree.map(lambda x: sharding if x.ndim > 1 else own, self)
        axes = (*sharding.spec, *[None] * (self.ndim - len(sharding.spec)))

        def place(x: Any) -> NamedSharding:
            if x is self.values:
                return sharding
            wanted = (axes[-2], axes[-1])[2 - x.ndim :]
            sizes = [math.prod(sharding.mesh.shape[a] for a in _names(axis)) for axis in wanted]
            split = zip(x.shape, wanted, sizes, strict=True)
            parts = [axis if length % size == 0 else None for length, axis, size in split]
            spec = PartitionSpec(*parts) if any(parts) else PartitionSpec()
            return NamedSharding(sharding.mesh, spec)

        return jax.tree.map(place, self)


def _product(levels: Sequence[Any], count: int) -> jax.Array:
    """Multiplies numbers of blocks, (n, d), (d,) or (), for the smallest of the blocks.

    Returns them with an axis for the inputs of a block, (count, 1, d), or () as they are.
    """
    wide = [x.astype(jnp.float32) for x in map(jnp.asarray, levels)]
    parts = [jnp.repeat(x, count // len(x), axis=0)[:, None] if x.ndim == 2 else x for x in wide]
    return functools.reduce(jnp.multiply, parts)


Kernel = jax.Array | Quantized
"""A layer's kernel as its parameters have it."""


def dense(kernel: Any) -> jax.Array:
    """Returns a kernel, or what stands in the place of one, as an array."""
    found: jax.Array = kernel[...] if replaces(kernel) else kernel
    return found


def quantizes(name: str, shape: Sequence[int]) -> bool:
    """Returns whether a parameter is stored in eight bits where kernels are.

    Those are the kernels of linear layers and convolutions inside of a network's numbered blocks.
    Its first and last layers, norms, biases and tables stay as they are, and so do kernels of so
    few inputs that little would be saved.

    Args:
        name: the path through the tree, joined by dots.
        shape: the parameter's shape.
    """
    *parents, leaf = name.split(".")
    inside = any(part.isdecimal() for part in parents)
    return inside and leaf == "kernel" and len(shape) in (2, 4) and math.prod(shape[:-1]) >= _LEAST


def parse_weights(weights: Any, *, loading: bool = False) -> Any:
    """Returns what kernels are to be stored as; None for the dtype of computation.

    loading: whether they are read from a file, so that they may stay as they are there.

    Raises:
        ValueError: it is none of these.
    """
    known = (*_STORED, "file") if loading else tuple(_STORED)
    if weights is None or weights in known:
        return weights
    names = ", ".join(map(repr, known))
    raise ValueError(f"weights must be one of {names}, or None (got {weights!r})")


def stored_dtype(kind: Weights) -> np.dtype:
    """Returns the dtype of the numbers of a kernel that is stored as this kind."""
    return np.dtype(_STORED[kind][0])


def rotation_of(shape: Sequence[int], kind: Weights) -> int:
    """Returns the length of the groups of inputs that are rotated; 0 for none.

    ConvRot rotates 256 inputs of a linear layer, or as many as divide a narrower one.
    """
    if kind != "int8_convrot" or len(shape) != 2:
        return 0
    return next((group for group in (256, 64, 16) if shape[0] % group == 0), 0)


def quantize(
    kernel: np.ndarray, kind: Weights, dtype: Any, *, empty: Callable[..., np.ndarray] = np.empty
) -> Quantized:
    """Returns a kernel in eight bits, on the host, with one scale for each output channel.

    The arguments and the rounding are those of `quantize_parts`.

    kernel: c d, or h w c d; a view of any strides.
    """
    step = channels_at_once(math.prod(kernel.shape[:-1]))
    parts = (kernel[..., i : i + step] for i in range(0, kernel.shape[-1], step))
    return quantize_parts(parts, kernel.shape, kind, dtype, empty=empty)


def channels_at_once(inputs: int) -> int:
    """Returns how many output channels are quantised at once, on the host."""
    return max(1, _PART // max(inputs, 1))


def quantize_parts(
    parts: Iterable[np.ndarray],
    shape: tuple[int, ...],
    kind: Weights,
    dtype: Any,
    *,
    empty: Callable[..., np.ndarray] = np.empty,
) -> Quantized:
    """Returns a kernel in eight bits of which some output channels are there at a time.

    A channel's largest number becomes the largest of the eight bits, and the others are rounded to
    the nearest (Jacob et al. 2018, section 2.1, symmetric).

    Args:
        parts: the kernel's parts along its last axis, which are read one after the other.
        shape: the kernel's shape: c d, or h w c d.
        kind: what is stored.
        dtype: the dtype of computation.
        empty: makes the array for the numbers, of a shape and a dtype.
    """
    stored, most = _STORED[kind]
    made, scale = empty(shape, stored), np.empty(shape[-1], np.float32)
    start, group = 0, rotation_of(shape, kind)
    for given in parts:
        own = slice(start, start + given.shape[-1])
        start = own.stop
        part = given.astype(np.float32)
        if group:
            groups = part.reshape(-1, group, part.shape[-1])
            part = np.matmul(hadamard(group), groups).reshape(part.shape)
        top = np.abs(part).max(tuple(range(part.ndim - 1)))
        scale[own] = np.where(top > 0, top * np.float32(1 / most), np.float32(1))
        part /= scale[own]
        made[..., own] = _as_fp8(part) if kind == "fp8" else np.rint(part, part)
    return Quantized(made, scale, np.dtype(dtype), group)


def _as_fp8(numbers: np.ndarray) -> np.ndarray:
    """Returns float32 numbers rounded to the nearest float8_e4m3fn, by a table.

    Numbers of 16 bits whose last one says whether anything was cut off round as the whole ones do:
    they have more than two bits more than the result (Boldo and Melquiond 2008, rounding to odd).
    """
    bits = numbers.view(np.uint32)
    codes = (bits >> np.uint32(16)).astype(np.uint16)
    codes |= bits.astype(np.uint16) != 0
    return np.take(_fp8_table(), codes).view(_STORED["fp8"][0])


@functools.cache
def _fp8_table() -> np.ndarray:
    """Returns the float8_e4m3fn nearest to each bfloat16, by their bits."""
    numbers = np.arange(2**16).astype(np.uint16).view(ml_dtypes.bfloat16)
    with np.errstate(invalid="ignore"):
        return numbers.astype(np.float32).astype(_STORED["fp8"][0]).view(np.uint8)


@functools.partial(jax.jit, static_argnames="kind")
def _quantize_there(kernel: jax.Array, kind: Weights) -> Quantized:
    """Computes `quantize` where the kernel lies."""
    stored, most = _STORED[kind]
    wide, group = kernel.astype(jnp.float32), rotation_of(kernel.shape, kind)
    wide = rotate(wide.T, group).T if group else wide
    top = jnp.abs(wide).max(tuple(range(wide.ndim - 1)))
    scale = jnp.where(top > 0, top * np.float32(1 / most), jnp.float32(1))
    values = wide / scale
    values = values if kind == "fp8" else jnp.rint(values)
    return Quantized(values.astype(stored), scale, np.dtype(kernel.dtype), group)


def quantize_array(kernel: Any, kind: Weights) -> Quantized:
    """Returns a kernel in eight bits where it lies: on its devices, or as NumPy arrays."""
    if isinstance(kernel, np.ndarray):
        return quantize(kernel, kind, kernel.dtype)
    made = _quantize_there(on_device(kernel), kind=kind)
    places = jax.tree.map(place_of, made, made.places(kernel.sharding))
    return jax.device_put(made, places)


@functools.cache
def hadamard(group: int) -> np.ndarray:
    """Returns the rotation of a group of inputs, a symmetric orthogonal matrix of +-1 / sqrt(n).

    It is the Kronecker power of a regular Hadamard matrix of four rows, as ConvRot and
    comfy_kitchen have it, so that it is its own inverse.

    Raises:
        ValueError: the group is not a power of four.
    """
    power = round(math.log(max(group, 1), 4))
    if group < 1 or 4**power != group:
        raise ValueError(f"a rotated group must have a power of four inputs (got {group})")
    base = np.array(_HADAMARD, np.float32)
    factors: list[np.ndarray] = [base] * power
    return functools.reduce(np.kron, factors, np.ones((1, 1), np.float32)) / np.sqrt(
        np.float32(group)
    )


def rotate(x: jax.Array, group: int) -> jax.Array:
    """Multiplies each group of x's last axis by `hadamard`. x: ... c -> ... c, in x's dtype."""
    parts = x.reshape(*x.shape[:-1], -1, group)
    matrix = jnp.asarray(hadamard(group), x.dtype)
    y = jnp.matmul(parts, matrix, preferred_element_type=jnp.float32)
    return y.reshape(x.shape).astype(x.dtype)


def quantize_in_place(tree: dict[str, Any], kind: Weights) -> None:
    """Stores the kernels of a tree in eight bits, see `quantizes`, one after the other.

    Where nobody else has them, each is freed when it is replaced, so that both forms of the whole
    are never in memory at once. What is in eight bits already stays as it is.

    Args:
        tree: nested dicts of arrays, which are changed.
        kind: what is stored.
    """

    def walk(tree: dict[str, Any], path: tuple[str, ...]) -> None:
        for key, value in tree.items():
            own = (*path, str(key))
            if isinstance(value, dict):
                walk(value, own)
            elif not isinstance(value, Quantized) and quantizes(".".join(own), value.shape):
                # The array must not outlive its place in the tree.
                del value
                tree[key] = jax.block_until_ready(_quantized(tree[key], kind))
                # JAX gives back what it shared with NumPy when Python looks for garbage.
                gc.collect(0)

    walk(tree, ())


def _quantized(kernel: Any, kind: Weights) -> Any:
    """Returns a kernel in eight bits; what stands in the place of one does so itself."""
    given = getattr(kernel, "quantized", None)
    return quantize_array(kernel, kind) if given is None else given(kind)


def quantized_shapes(shapes: Any, kind: Weights) -> Any:
    """Returns the shapes of a tree with kernels in eight bits, see `quantizes`.

    shapes: the tree as shapes in the dtype of computation.
    """

    def one(path: tuple[str, ...], value: Any) -> Any:
        if isinstance(value, dict):
            return {key: one((*path, str(key)), own) for key, own in value.items()}
        if not quantizes(".".join(path), value.shape):
            return value
        numbers = jax.ShapeDtypeStruct(value.shape, _STORED[kind][0])
        scale = jax.ShapeDtypeStruct(value.shape[-1:], jnp.float32)
        group = rotation_of(value.shape, kind)
        return Quantized(numbers, scale, np.dtype(value.dtype), group)

    return one((), shapes)


def copied_dicts(tree: Any) -> Any:
    """Returns nested dicts of their own around the same leaves."""
    if not isinstance(tree, dict):
        return tree
    return {key: copied_dicts(value) for key, value in tree.items()}


def _names(axis: Any) -> tuple[str, ...]:
    return () if axis is None else axis if isinstance(axis, tuple) else (axis,)
