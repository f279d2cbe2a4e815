"""Places a pipeline's parameters and plans on its devices."""

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffusax.models.network import Network, Params
from diffusax.pipelines.families.family import NUMBERED_ROLES, Role
from diffusax.pipelines.plan.plan import Plan
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import tree_sharding
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
    shardings = tree_sharding(component_mesh(mesh, role), params, network.tensor_rules)
    return in_order(jax.device_put(params, shardings))


def to_host(params: Params) -> Params:
    """Copies parameters to the host's memory; those that a CPU computes with are there already."""
    first = jax.local_devices()[0]
    leaves = jax.tree.leaves(params)
    if first.platform == "cpu" and all(getattr(x, "devices", set)() <= {first} for x in leaves):
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
    return None if first else sharding


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
    rule = jax.tree.map(lambda _: NO_IMAGES, plan.guide)
    cache = jax.tree.map(lambda _: NO_IMAGES, plan.cache)
    return axes._replace(table=tables, step_inputs=of_rows, guide=rule, cache=cache)
