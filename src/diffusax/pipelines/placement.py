"""A run's arrays on its devices: a batch is padded to fill a mesh, and split over it."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from diffusax.models.network import Network, Params
from diffusax.pipelines.programs import Plan
from diffusax.runtime.mesh import (
    batch_sharding,
    batch_size,
    make_mesh,
    pad,
    replicated,
    tree_sharding,
)

NO_IMAGES = -1
"""Stands for the axis of images of an array that has none."""


def mesh_of(params: Params) -> Mesh | None:
    """The mesh of several devices that parameters lie on, if they do."""
    sharding = getattr(jax.tree.leaves(params)[0], "sharding", None)
    several = isinstance(sharding, NamedSharding) and sharding.mesh.size > 1
    return sharding.mesh if several else None  # type: ignore[union-attr,return-value]


def devices_for(device: Any, mesh: Mesh | str | None) -> Any:
    """The device, or the mesh of several, that a pipeline is loaded on.

    Raises:
        ValueError: both are given, or the mesh does not fit the devices.
    """
    if device is not None and mesh is not None:
        raise ValueError("only one of device and mesh can be given")
    if mesh is None and (device is not None or jax.local_device_count() == 1):
        return device
    made = make_mesh(mesh, devices=None if mesh else jax.local_devices())
    return made if made.size > 1 else made.devices.flat[0]


def component_mesh(mesh: Mesh, name: str) -> Mesh:
    """The part of the mesh that a component lies on.

    Denoisers lie on the whole of it. The rest works for the images of its own process, on the
    devices of that process.
    """
    return mesh if name.startswith(("unet", "controlnet")) else mesh.local_mesh


def put_params(mesh: Mesh, name: str, network: Network, params: Params) -> Params:
    """A component's parameters on the mesh; those that lie there already stay."""
    shardings = tree_sharding(component_mesh(mesh, name), params, network.tensor_rules)
    return jax.device_put(params, shardings)


def put_plan(mesh: Mesh | None, plan: Plan) -> Plan:
    """The plan on the devices, so that no later call moves it; padded, and split by images."""
    if mesh is None:
        return jax.device_put(plan)
    return jax.tree.map(lambda x, axis: put(mesh, x, axis), plan, image_axes(plan))


def plan_sharding(mesh: Mesh, plan: Plan) -> Plan:
    """Where `put_plan` puts each array of a plan."""
    return jax.tree.map(lambda axis: _sharding(mesh, axis), image_axes(plan))


def put(mesh: Mesh | None, x: Any, axis: int = 0) -> Any:
    """An array of this process's images along an axis, padded with the last, over the mesh."""
    if mesh is None:
        return x
    x = pad_images(jnp.asarray(x), batch_size(mesh.local_mesh), axis)
    sharding = _sharding(mesh, axis)
    if mesh == mesh.local_mesh:
        return jax.device_put(x, sharding)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = _from_this_process(sharding, jax.random.key_data(x))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    return _from_this_process(sharding, x)


def pad_images(x: jax.Array, parts: int, axis: int = 0) -> jax.Array:
    """As `pad`; what has no images stays."""
    return x if axis == NO_IMAGES else pad(x, parts, axis)


def own_images(mesh: Mesh | None, x: jax.Array, n: int, axis: int = 0) -> jax.Array:
    """The first n images of this process, of an array over the mesh."""
    if mesh is None or x.is_fully_addressable:
        return x if x.shape[axis] == n else jax.lax.slice_in_dim(x, 0, n, axis=axis)
    parts = {shard.index[axis].start or 0: shard.data for shard in x.addressable_shards}
    whole = np.concatenate([np.asarray(parts[start]) for start in sorted(parts)], axis)
    return jnp.asarray(whole[(slice(None),) * axis + (slice(0, n),)])


def _from_this_process(sharding: NamedSharding, x: Any) -> jax.Array:
    return jax.make_array_from_process_local_data(sharding, np.asarray(x))


def _sharding(mesh: Mesh, axis: int) -> NamedSharding:
    return replicated(mesh) if axis == NO_IMAGES else batch_sharding(mesh, axis=axis)


def image_axes(plan: Plan) -> Plan:
    """Which axis of each array of a plan counts images."""
    table = 1 if plan.table.timestep.ndim == 2 else NO_IMAGES
    knobs = 1 if plan.knobs.rescale.ndim == 2 else NO_IMAGES
    axes = jax.tree.map(lambda _: 0, plan)
    return axes._replace(
        table=jax.tree.map(lambda _: table, plan.table),
        knobs=jax.tree.map(lambda _: knobs, plan.knobs),
    )
