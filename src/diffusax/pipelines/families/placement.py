"""Places a pipeline's parameters and plans on its devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from diffusax.models.arranged import arranged_tree
from diffusax.models.network import Network, Params
from diffusax.pipelines.families.family import NUMBERED_ROLES, Role
from diffusax.pipelines.plan.plan import Plan
from diffusax.runtime.devices.host import device_place, host_place, in_host_memory, placed_shape
from diffusax.runtime.devices.layouts import in_order, place_of
from diffusax.runtime.devices.mesh import tree_name, tree_sharding
from diffusax.runtime.devices.shares import NO_IMAGES, images_sharding, put
from diffusax.runtime.switches import is_traced


def component_mesh(mesh: Mesh, role: Role) -> Mesh:
    """Returns the part of the mesh on which a component of this role lies.

    Denoisers, ControlNets and T2I-Adapters use the whole mesh. Other components process the images
    of their own process, on the devices of that process.
    """
    return mesh if role in ("denoiser", *NUMBERED_ROLES) else mesh.local_mesh


def put_params(mesh: Mesh, role: Role, network: Network, params: Params) -> Params:
    """Puts a component's parameters on the mesh; those that lie there already are not copied."""
    params = for_devices(mesh, role, network, params)
    return in_order(jax.device_put(params, param_places(mesh, role, network, params)))


def for_devices(mesh: Mesh | None, role: Role, network: Network, params: Params) -> Params:
    """Returns a component's parameters, or shapes, in the order of the mesh's devices, if any."""
    own = None if mesh is None else component_mesh(mesh, role)
    return arranged_tree(own, params, network.tensor_rules)


def param_places(mesh: Mesh, role: Role, network: Network, params: Params) -> Any:
    """Returns the place of each of a component's parameters on the mesh."""
    return tree_sharding(component_mesh(mesh, role), params, network.tensor_rules)


def put_streamed(params: Params, places: Any, stay: str) -> Params:
    """Puts a component's parameters where they are between calls that stream them.

    What programs copy goes to the host's memory, the rest to the devices. Shapes are placed, too.

    Args:
        params: the parameters, which may lie anywhere.
        places: the place on the devices of each of them, or of all.
        stay: "blocks" or "everything" for what goes to the host's memory; "device" for nothing.
    """
    if isinstance(places, Sharding):
        single = places
        places = jax.tree.map(lambda _: single, params)

    def put_one(path: Any, x: Any, place: Sharding) -> Any:
        numbered = any(key.isdecimal() for key in tree_name(path).split("."))
        # Copies of biases, norms and scales would take the turns of kernels.
        streams = x.ndim > 1 and (stay == "everything" or (stay == "blocks" and numbered))
        wanted = host_place(place) if streams else place
        if isinstance(x, jax.ShapeDtypeStruct):
            return placed_shape(x, wanted)
        there = isinstance(x, jax.Array) and x.sharding.device_set == wanted.device_set
        if there and x.sharding.is_equivalent_to(wanted, x.ndim) and in_host_memory(x) == streams:
            return x
        return jax.device_put(x, place_of(x, wanted))

    return jax.tree_util.tree_map_with_path(put_one, params, places)


def to_host(params: Params, places: Any) -> Params:
    """Copies parameters to the host's memory; those that a CPU computes with are there already.

    places: the place on the devices of each of them, or of all.
    """
    first = jax.local_devices()[0]
    shardings = {x for x in jax.tree.leaves(places) if x is not None}
    used = [x.devices() for x in jax.tree.leaves(params) if isinstance(x, jax.Array)]
    used += [sharding.device_set for sharding in shardings]
    numpy = any(isinstance(x, np.ndarray) for x in jax.tree.leaves(params))
    if first.platform == "cpu" and not numpy and all(devices <= {first} for devices in used):
        return params
    return jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else np.array(x), params)


def device_of(params: Params) -> Any:
    """Returns the device or sharding of parameters, or of one of them.

    It is None for the first device, for shapes and in traces. Arrays on the first device are not
    bound to it: bound ones would compile other programs.
    """
    leaf = jax.tree.leaves(params)[0]
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    first = sharding is None or sharding.device_set == {jax.local_devices()[0]}
    return None if first else device_place(sharding)


def put_plan(mesh: Mesh, plan: Plan) -> Plan:
    """Puts the plan on the devices, padded and split by images, so that no later call moves it."""
    return jax.tree.map(lambda x, axis: put(mesh, x, axis), plan, image_axes(plan))


def plan_sharding(mesh: Mesh, plan: Plan) -> Plan:
    """Returns the sharding of each array of a plan, as used by `put_plan`."""
    return jax.tree.map(lambda axis: images_sharding(mesh, axis), image_axes(plan))


def image_axes(plan: Plan) -> Plan:
    """Returns the axis of each array of a plan that counts images."""
    table = 1 if plan.table.timestep.ndim == 2 else NO_IMAGES
    inputs = 1 if plan.step_inputs.rescale.ndim == 2 else NO_IMAGES
    of_rows = jax.tree.map(lambda _: inputs, plan.step_inputs)
    if (adapters := plan.step_inputs.adapters) is not None:
        of_rows = of_rows._replace(adapters=1 if adapters.ndim == 3 else NO_IMAGES)
    axes = jax.tree.map(lambda _: 0, plan)
    tables = jax.tree.map(lambda _: table, plan.table)
    own = plan.guide, plan.cache, plan.hooks
    rule, cache, hooks = jax.tree.map(lambda _: NO_IMAGES, own)
    return axes._replace(table=tables, step_inputs=of_rows, guide=rule, cache=cache, hooks=hooks)
