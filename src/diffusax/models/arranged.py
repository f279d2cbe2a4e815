"""Kernels in the order in which the devices of a mesh's tensor axis read them.

A kernel of several layers side by side has the columns of one layer behind those of another, and
one of several inputs has their rows so. Cut in as many pieces as there are devices, it would give
each of them other layers instead of a part of all. In the order of the devices every piece holds a
part of each layer, in three axes (inputs, devices, channels), so that nothing is exchanged between
devices when the kernel is read. Files, and what is copied to other meshes, know nothing of it.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffusax.models.parameter_tree import Replacement, replaces
from diffusax.models.quantized import Kernel, Quantized, Weights, dense, quantize_array
from diffusax.runtime.devices.mesh import (
    TENSOR_AXIS,
    Rules,
    rule_for,
    tree_name,
    tree_sharding,
)
from diffusax.runtime.devices.splitting import in_order_of_devices, in_order_of_layers


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Arranged(Replacement):
    """A kernel c d whose columns or rows are in the order of the devices.

    `[...]` returns it in the order of its layers.
    """

    values: Any
    """The kernel in the order of the devices, an array or `Quantized`."""
    axis: int = dataclasses.field(metadata={"static": True})
    """-1 for columns, -2 for rows."""
    widths: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    """The channels of each layer or input."""
    parts: int = dataclasses.field(metadata={"static": True})
    """The number of devices."""
    is_arranged: ClassVar = True
    """That a mesh splits it along its axis, see `param_sharding`."""

    @property
    def dtype(self) -> Any:
        """The dtype of computation."""
        return self.values.dtype

    def astype(self, dtype: Any) -> Self:
        """Returns the same numbers in another dtype."""
        return dataclasses.replace(self, values=self.values.astype(dtype))

    def __getitem__(self, key: Any) -> jax.Array:
        """Returns a part of the kernel in the order of its layers; `[...]` is all of it."""
        return dense(self.plain())[key]

    def plain(self) -> Kernel:
        """Returns the kernel in the order of its layers."""
        return _of_all(self.values, self.axis, self.widths, self.parts, in_order_of_layers)

    def places(self, sharding: Any) -> Any:
        """Returns the places of all arrays where the kernel's is given."""
        own = self.values
        placed = own.places(sharding) if isinstance(own, Quantized) else sharding
        return dataclasses.replace(self, values=placed)

    def refilled(self, kernel: Any) -> Any:
        """Returns another kernel in the same order and dtype, or in the same bits."""
        if isinstance(self.values, Quantized):
            return arranged(self.values.refilled(kernel), self.axis, self.widths, self.parts)
        new = in_order_of_devices(jnp.asarray(kernel), self.axis, self.widths, self.parts)
        return dataclasses.replace(self, values=new.astype(self.dtype))

    def quantized(self, kind: Weights) -> Any:
        """Returns the kernel in eight bits; one that is so already stays as it is."""
        if isinstance(self.values, Quantized):
            return self
        made = quantize_array(self.values, kind)
        if self.axis == -1 or not made.rotation:
            return dataclasses.replace(self, values=made)
        # What is rotated together must be together in the order of layers.
        made = quantize_array(self.plain(), kind)
        return arranged(made, self.axis, self.widths, self.parts)


def arranged(kernel: Any, axis: int, widths: tuple[int, ...], parts: int) -> Any:
    """Returns a kernel in the order of some number of devices, as `Arranged`.

    It is returned as it is in the order of its layers where the devices do not divide all of these,
    or cut what has one scale or is rotated together.

    kernel: c d, an array of JAX or NumPy, a shape, or one of eight bits; or `Arranged` already.
    """
    if isinstance(kernel, Arranged):
        if (kernel.axis, kernel.widths, kernel.parts) == (axis, widths, parts):
            return kernel
        kernel = kernel.plain()
    fits = len(kernel.shape) == 2 and sum(widths) == kernel.shape[axis]
    if parts == 1 or not fits or not _divides(kernel, axis, widths, parts):
        return kernel
    values = _of_all(kernel, axis, widths, parts, in_order_of_devices)
    return Arranged(values, axis, widths, parts)


def arranged_tree(mesh: Mesh | None, tree: Any, rules: Rules) -> Any:
    """Returns parameters, or their shapes, in the order in which the devices of a mesh read them.

    Those that are so already are not copied. Parameters that were in the order of another mesh's
    devices are brought into the order of layers where this one splits them otherwise.

    Args:
        mesh: the devices; None for one.
        tree: the parameters.
        rules: the rules of the network, see `param_sharding`.
    """
    order = KernelOrder(rules, 1 if mesh is None else mesh.shape.get(TENSOR_AXIS, 1))

    def one(path: Any, leaf: Any) -> Any:
        if (found := order.axis_of(path, leaf)) is not None and len(leaf.shape) == 2:
            return arranged(leaf, *found, order.parts)
        return leaf.plain() if isinstance(leaf, Arranged) else leaf

    leaves, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=replaces)
    made = [one(path, leaf) for path, leaf in leaves]
    same = all(new is leaf for new, (_, leaf) in zip(made, leaves))
    return tree if same else jax.tree.unflatten(structure, made)


class KernelOrder(NamedTuple):
    """The order of kernels in a tree of arrays alone, such as the state of training.

    An optimizer's moments of a kernel, and the sums of its rows or columns, are in its order.
    """

    rules: Rules
    """The rules of the networks, see `param_sharding`."""
    parts: int
    """The number of devices; 1 for the order of layers."""

    def axis_of(self, path: Any, x: Any) -> tuple[int, tuple[int, ...]] | None:
        """Returns the axis of an array that has an order, and the layers' channels; None without.

        path: that through the tree.
        """
        axes = len(x.shape)
        rule = rule_for(tree_name(path), self.rules) if self.parts > 1 and axes in (1, 2) else None
        if rule is None or not isinstance(rule.widths, tuple):
            return None
        axis = -1 if axes == 1 else rule.axis
        divides = not any(width % self.parts for width in rule.widths)
        return (axis, rule.widths) if divides and x.shape[axis] == sum(rule.widths) else None

    def of_devices(self, tree: Any) -> Any:
        """Returns a tree in the order of layers in that of the devices."""
        return self._each(tree, in_order_of_devices)

    def of_layers(self, tree: Any) -> Any:
        """Undoes `of_devices`."""
        return self._each(tree, in_order_of_layers)

    def wrapped(self, tree: Any) -> Any:
        """Returns a tree in the order of the devices as networks read it."""
        return self._each(tree, lambda x, *order: Arranged(x, *order) if len(x.shape) == 2 else x)

    def shardings(self, mesh: Mesh, tree: Any) -> Any:
        """Returns the sharding of each array, or shape, of a tree in the order of the devices."""
        return unwrapped(tree_sharding(mesh, self.wrapped(tree), self.rules))

    def _each(self, tree: Any, change: Callable[..., Any]) -> Any:
        def one(path: Any, x: Any) -> Any:
            found = self.axis_of(path, x)
            return x if found is None else change(x, *found, self.parts)

        return jax.tree_util.tree_map_with_path(one, tree) if self.parts > 1 else tree


def unwrapped(tree: Any) -> Any:
    """Returns a tree with the arrays of its kernels, in the order in which these are."""

    def one(x: Any) -> Any:
        return x.values if isinstance(x, Arranged) else x

    return jax.tree.map(one, tree, is_leaf=lambda x: isinstance(x, Arranged))


def _of_all(
    kernel: Any, axis: int, widths: Sequence[int], parts: int, order: Callable[..., Any]
) -> Any:
    """Brings a kernel, or all arrays of one of eight bits, or their shapes, into an order."""

    def one(x: Any) -> Any:
        # Scales are those of columns, and some those of blocks of inputs.
        if len(x.shape) < -axis or isinstance(x, jax.ShapeDtypeStruct):
            return x
        own = [width * x.shape[axis] // sum(widths) for width in widths]
        return order(x, axis, own, parts)

    return jax.tree.map(one, kernel)


def _divides(kernel: Any, axis: int, widths: Sequence[int], parts: int) -> bool:
    """Returns whether the devices cut no layer, no block with scales and no rotated group."""
    if any(width % parts for width in widths):
        return False
    if axis == -1 or not isinstance(kernel, Quantized):
        return True
    lengths = [x.shape[0] for x in jax.tree.leaves(kernel) if len(x.shape) == 2]
    groups = {kernel.shape[0] // length for length in lengths} | {kernel.rotation or 1}
    return not any(width // parts % group for width in widths for group in groups)
