"""The host's memory as a place of arrays that a device's programs read.

JAX calls it the memory kind "pinned_host": pages that stay where they are, so that a device copies
them by itself. Where devices have none, arrays stay in the device's memory.
"""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

KIND = "pinned_host"
"""JAX's name of that memory."""


class _OfTopology(NamedSharding):
    """A place in the host's memory of GPUs that are elsewhere, which do not tell of their memory.

    JAX leaves a kind of memory out where a device lists none; the GPU's compiler knows it.
    """

    @property
    def memory_kind(self) -> str:
        return KIND

    # JAX keeps what it derives from a place by the place.
    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OfTopology) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((KIND, super().__hash__()))


def has_host_memory(device: Any) -> bool:
    """Returns whether programs of a device can read arrays in the host's memory."""
    return KIND in {memory.kind for memory in device.addressable_memories()}


def host_place(sharding: Sharding) -> Sharding:
    """Returns the place of an array in the host's memory of the same devices.

    It is the same place where these have no such memory. Arrays that are split over several
    devices are split alike.
    """
    device: Any = next(iter(sharding.device_set))
    if has_host_memory(device):
        return sharding.with_memory_kind(KIND)
    if isinstance(sharding, NamedSharding) and _is_elsewhere(device):
        return _OfTopology(sharding.mesh, sharding.spec)
    return sharding


def device_place(sharding: Any) -> Any:
    """Returns the place of an array in the devices' own memory."""
    if getattr(sharding, "memory_kind", None) != KIND:
        return sharding
    if isinstance(sharding, _OfTopology):
        return NamedSharding(sharding.mesh, sharding.spec)
    return sharding.with_memory_kind("device")


def in_host_memory(tree: Any) -> bool:
    """Returns whether an array, tracer or shape, or the first of several, is in the host's memory.

    NumPy arrays are not: programs copy them before they begin.
    """
    first = next(iter(jax.tree.leaves(tree)), None)
    if isinstance(first, jax.ShapeDtypeStruct):
        return getattr(first.sharding, "memory_kind", None) == KIND
    if not isinstance(first, jax.Array):
        return False
    return jax.typeof(first).memory_space == jax.memory.Space.Host


def on_device(tree: Any) -> Any:
    """Returns arrays in the devices' own memory; those that are there, and NumPy's, stay."""

    def one(x: Any) -> Any:
        return jax.device_put(x, device_place(x.sharding)) if in_host_memory(x) else x

    return jax.tree.map(one, tree)


def placed_shape(x: Any, place: Any) -> jax.ShapeDtypeStruct:
    """Returns the shape of an array at a place, for programs to be compiled for.

    Of a shape in the host's memory JAX wants to know a mesh, if only of one device.
    """
    if isinstance(place, SingleDeviceSharding) and place.memory_kind == KIND:
        mesh = Mesh(np.array(list(place.device_set)), ("device",))
        place = NamedSharding(mesh, PartitionSpec(), memory_kind=KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)


def first_place() -> Sharding:
    """Returns the place of arrays on the first device, where JAX puts them by default."""
    return SingleDeviceSharding(jax.local_devices()[0])


def _is_elsewhere(device: Any) -> bool:
    return device.platform == "gpu" and not device.addressable_memories()
