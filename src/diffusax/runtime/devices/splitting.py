"""How programs split arrays over the devices of a mesh, inside `jax.set_mesh`."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from diffusax.runtime.devices.mesh import BATCH_AXES, CONTEXT_AXIS, TENSOR_AXIS, batch_size


def tensor_parts() -> int:
    """Returns the number of devices that share a layer's work, inside `jax.set_mesh`."""
    return int(jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1))


def split_axis(kernel: jax.Array, axis: int) -> jax.Array:
    """Splits an axis of a kernel ... c d over the devices of the tensor axis.

    It is for a part of the columns of a kernel that holds several layers side by side, or of the
    rows of one that reads several inputs. Such a kernel is stored split along the other axis,
    because a split of that axis would give each device one layer instead of a part of all.
    """
    wanted = axis % kernel.ndim
    stored = 2 * kernel.ndim - 3 - wanted
    if kernel.shape[wanted] % tensor_parts():
        return kernel
    # Without the first XLA would split the whole kernel along the other axis, and then cut.
    for split in (stored, wanted):
        axes = [TENSOR_AXIS if i == split else None for i in range(kernel.ndim)]
        if kernel.shape[split] % tensor_parts() == 0:
            kernel = jax.lax.with_sharding_constraint(kernel, PartitionSpec(*axes))
    return kernel


def in_order_of_devices(x: Any, axis: int, widths: Sequence[int], parts: int) -> Any:
    """Puts a part of each of several layers behind one another, for each of the devices.

    It may be called with arrays of NumPy, and inside of `jax.set_mesh` in programs, where the
    kernel's parts are exchanged between the devices.

    Args:
        x: an array of one or more axes.
        axis: the axis along which the layers lie.
        widths: the lengths of the layers, each of which the devices divide.
        parts: the number of devices.
    """
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    pieces = numpy.split(x, list(itertools.accumulate(widths))[:-1], axis=axis)
    if isinstance(x, jax.core.Tracer) and x.ndim > 1 and tensor_parts() == parts:
        pieces = [split_axis(piece, axis) for piece in pieces]
    whole = [piece.reshape(*before, parts, -1, *after) for piece in pieces]
    return numpy.concatenate(whole, axis=axis + 1).reshape(x.shape)


def in_order_of_layers(x: Any, axis: int, widths: Sequence[int], parts: int) -> Any:
    """Undoes `in_order_of_devices`."""
    numpy: Any = np if isinstance(x, np.ndarray) else jnp
    axis %= x.ndim
    before, after = x.shape[:axis], x.shape[axis + 1 :]
    each = x.reshape(*before, parts, -1, *after)
    ends = list(itertools.accumulate(width // parts for width in widths))
    pieces = numpy.split(each, ends[:-1], axis=axis + 1)
    return numpy.concatenate([piece.reshape(*before, -1, *after) for piece in pieces], axis=axis)


def split_widths(y: jax.Array, widths: Sequence[int], parts: int = 1) -> tuple[jax.Array, ...]:
    """Splits the last axis of an array into parts of these widths.

    parts: the number of devices in whose order the channels are, see `in_order_of_devices`. What
    is returned is in that order, too, which of one layer alone is its own.
    """
    if len(widths) == 1:
        return (y,)
    if parts > 1:
        each = y.reshape(*y.shape[:-1], parts, -1)
        pieces = split_widths(each, [width // parts for width in widths])
        return tuple(piece.reshape(*y.shape[:-1], -1) for piece in pieces)
    # The gradient of a split is one concatenation; that of slices is a sum of padded maps.
    return tuple(jax.lax.split(y, widths, axis=y.ndim - 1))


def context_parts() -> int:
    """Returns the number of devices that share an image's tokens, inside `jax.set_mesh`."""
    return int(jax.sharding.get_abstract_mesh().shape.get(CONTEXT_AXIS, 1))


def split_tokens(x: jax.Array) -> jax.Array:
    """Splits tokens b t ... over the devices of the context axis, if it divides their number.

    How the other axes are split is left as it is.
    """
    parts = context_parts()
    if parts == 1 or x.shape[1] % parts:
        return x
    return jax.lax.with_sharding_constraint(x, _spec_of_tokens(x.ndim, CONTEXT_AXIS))


def gather_tokens(x: jax.Array) -> jax.Array:
    """Gathers tokens b t ... that are split over the devices of the context axis on each."""
    if context_parts() == 1:
        return x
    return jax.lax.with_sharding_constraint(x, _spec_of_tokens(x.ndim, None))


def split_maps(x: jax.Array) -> jax.Array:
    """Splits the rows or the columns of maps ... h w c over the devices that share an image.

    It is for networks of convolutions, for which XLA exchanges what lies at the edges. Those are
    all devices of the tensor and context axes, or of one of them, which divide the rows or columns.
    """
    own = (TENSOR_AXIS, tensor_parts()), (CONTEXT_AXIS, context_parts())
    axes = {name: parts for name, parts in own if parts > 1}
    free = [PartitionSpec.UNCONSTRAINED] * x.ndim
    for names in (tuple(axes), *((name,) for name in reversed(axes))):
        parts = math.prod(axes[name] for name in names)
        for axis in (x.ndim - 2, x.ndim - 3):
            if parts > 1 and x.shape[axis] % parts == 0:
                spec = PartitionSpec(*free[:axis], names, *free[axis + 1 :])
                return jax.lax.with_sharding_constraint(x, spec)
    return x


def gather_channels(x: jax.Array) -> jax.Array:
    """Gathers the last axis, where it is split over the devices of the tensor axis, on each."""
    if tensor_parts() == 1:
        return x
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*free, None))


def _spec_of_tokens(axes: int, place: str | None) -> PartitionSpec:
    free = PartitionSpec.UNCONSTRAINED
    return PartitionSpec(free, place, *[free] * (axes - 2))


def split_images(x: jax.Array) -> jax.Array:
    """Splits a batch, so that each device computes its share of the images, inside `jax.set_mesh`.

    The last image is repeated until the devices divide the number of images.
    """
    parts = batch_size(jax.sharding.get_abstract_mesh())
    if parts == 1 or len(x) == 1:
        return x
    return jax.lax.with_sharding_constraint(pad(x, parts), PartitionSpec(BATCH_AXES))


def split_lanes(tree: Any) -> Any:
    """Splits arrays m ... by entries of a batch, inside `jax.set_mesh`; the devices divide m."""
    if jax.sharding.get_abstract_mesh().empty:
        return tree
    return jax.lax.with_sharding_constraint(tree, PartitionSpec(BATCH_AXES))


def pad(x: jax.Array, parts: int, axis: int = 0) -> jax.Array:
    """Repeats an array's last image until `parts` divides the number of images."""
    extra = -x.shape[axis] % parts
    if not extra:
        return x
    last = jnp.take(x, jnp.full(extra, x.shape[axis] - 1), axis=axis)
    return jnp.concatenate([x, last], axis)
