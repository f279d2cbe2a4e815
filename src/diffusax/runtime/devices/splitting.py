"""How programs split arrays over the devices of a mesh, inside `jax.set_mesh`."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from diffusax.runtime.devices.mesh import BATCH_AXES, CONTEXT_AXIS, TENSOR_AXIS, batch_size


def tensor_parts() -> int:
    """Returns the number of devices that share a layer's work, inside `jax.set_mesh`."""
    return int(jax.sharding.get_abstract_mesh().shape.get(TENSOR_AXIS, 1))


def split_columns(kernel: jax.Array) -> jax.Array:
    """Splits the columns of a kernel ... d over the devices of the tensor axis.

    It is for a part of the columns of a kernel that holds several layers side by side. Such kernels
    are stored split by rows, because a split of their columns would give each device one layer
    instead of a part of both.
    """
    return _split(kernel, kernel.ndim - 2, kernel.ndim - 1)


def split_rows(kernel: jax.Array) -> jax.Array:
    """Splits the rows of a kernel c d over the devices of the tensor axis.

    It is for a part of the rows of a kernel that reads several inputs side by side. Such kernels
    are stored split by columns.
    """
    return _split(kernel, 1, 0)


def _split(kernel: jax.Array, stored: int, wanted: int) -> jax.Array:
    """Splits a part of a kernel along another axis than it is stored."""
    if kernel.shape[wanted] % tensor_parts():
        return kernel
    # Without the first XLA would split the whole kernel along the other axis, and then cut.
    for axis in (stored, wanted):
        axes = [TENSOR_AXIS if i == axis else None for i in range(kernel.ndim)]
        if kernel.shape[axis] % tensor_parts() == 0:
            kernel = jax.lax.with_sharding_constraint(kernel, PartitionSpec(*axes))
    return kernel


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
