"""What a pipeline takes on TPUs and GPUs that may be elsewhere, by their compilers."""

import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from diffusax.pipelines import placement
from diffusax.pipelines.ahead import encodes_texts, example_call, mesh_of_program, requests
from diffusax.pipelines.components import Components
from diffusax.pipelines.families.family import NUMBERED_ROLES, Role
from diffusax.runtime.chips import chip_of
from diffusax.runtime.cost import Cost, cost_of
from diffusax.runtime.lowering import lowering_platforms
from diffusax.runtime.mesh import in_mesh, tree_sharding
from diffusax.runtime.program import Request, describe, lower, operations_of
from diffusax.runtime.topology import (
    DoesNotFitError,
    compile_there,
    topology_mesh,
)

Figures = dict[str, dict[str, float]]


def memory_there(
    pipe: Any,
    topology: str,
    mesh: str | None,
    b: int,
    size: tuple[int, int] | None,
    arguments: dict[str, Any],
    *,
    watch: Callable[[str, Cost | DoesNotFitError], None] = lambda name, cost: None,
) -> Figures:
    """Compiles the programs of a call for a topology, and returns what they take on each device.

    Args:
        pipe: the pipeline, whose parameters may be shapes.
        topology: see `topology_mesh`.
        mesh: see `topology_mesh`.
        b: the number of images, over all devices.
        size: height and width in pixels; the pipeline's own by default.
        arguments: further arguments of the call.
        watch: is told each program, when it is compiled, and what it takes or why it does not fit.

    Raises:
        ValueError: there is no such topology, or an argument is not valid.
        ImportError: the compiler is not installed; names the extra.
    """
    devices = topology_mesh(topology, mesh)
    chip = chip_of(devices.devices.flat[0])
    call = example_call(pipe, b, size, arguments)
    shares = parameter_shares(pipe.parts, devices)
    figures: Figures = {"pipeline": {}, "parameters": shares}
    needed: list[float] | None = []
    for request in requests(pipe.parts, pipe.task, call, devices):
        name = describe(request)
        try:
            cost = compiled_cost(request, devices)
        except DoesNotFitError as error:
            figures[name], needed = {"fits": False}, None
            watch(name, error)
            continue
        figures[name] = cost.figures(chip)
        watch(name, cost)
        if needed is not None:
            resident = resident_parameters(request, pipe.parts, shares)
            needed.append(cost.peak - min(resident, cost.arguments))
    whole = {"parameters": sum(shares.values())}
    if needed is not None:
        whole["peak"] = whole["parameters"] + max(needed)
    if chip is not None:
        fits = whole.get("peak", math.inf) <= chip.usable
        whole |= {"memory": chip.memory, "usable": chip.usable, "fits": fits}
    figures["pipeline"] = whole
    return figures


def compiled_cost(request: Request, mesh: Mesh) -> Cost:
    """Compiles a program for devices that may be elsewhere, and returns what it takes on each.

    mesh: the devices of the whole call.

    Raises:
        DoesNotFitError: their memory does not hold it.
    """
    mesh = mesh_of_program(request, mesh)
    with in_mesh(mesh):
        lowered = lower(request, lowering_platforms=lowering_platforms(mesh))
        compiled = compile_there(lowered, mesh)
    return cost_of(compiled, needed=operations_of(request) / mesh.size)


def parameter_shares(c: Components, mesh: Mesh) -> dict[str, float]:
    """Returns the GB of each component's parameters that a device of the mesh holds.

    Components that stay in the host's memory but for their turn are left out.
    """
    shares = {}
    for name, params in c.params.items():
        if not placement.on_host(params):
            part = placement.component_mesh(mesh, c.family.role(name))
            places = tree_sharding(part, params, c.models[name].network.tensor_rules)
            shares[name] = sum(map(_share, jax.tree.leaves(params), jax.tree.leaves(places)))
    return shares


def resident_parameters(request: Request, c: Components, shares: dict[str, float]) -> float:
    """Returns the GB of a program's parameters that are on each device between programs, too.

    Those of a component that stays in the host's memory come only for their turn.

    shares: see `parameter_shares`.
    """
    static = dict(request.static)
    roles: tuple[Role, ...] = ("image_encoder",)
    if "denoiser" in static:
        roles = ("denoiser", *NUMBERED_ROLES)
    elif encodes_texts(request):
        roles = ("text_encoder",)
    elif "vae" in static:
        roles = ("autoencoder",)
    named = zip(request.program.dynamic, request.dynamic)
    leaves = jax.tree.leaves([x for name, x in named if name == "params"])
    there = sum(share for name, share in shares.items() if c.family.role(name) in roles)
    return min(float(sum(_share(x, x.sharding) for x in leaves)), there)


def _share(x: Any, place: Any) -> float:
    return float(math.prod(place.shard_shape(x.shape)) * x.dtype.itemsize / 1e9)
