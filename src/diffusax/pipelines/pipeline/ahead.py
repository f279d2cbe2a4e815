"""Lists the programs that a call needs, with the shapes and places of their arguments."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh
from PIL import Image

from diffusax.checkpoints import read_model_index
from diffusax.checkpoints.networks import read_network
from diffusax.models.arranged import arranged_tree
from diffusax.networks import Model
from diffusax.pipelines.components.adapters import resolve_adapters
from diffusax.pipelines.components.components import Components, on_host
from diffusax.pipelines.components.loading import class_for, component_shapes
from diffusax.pipelines.families import placement
from diffusax.pipelines.families.family import NUMBERED_ROLES, Role
from diffusax.pipelines.plan.arguments import Call, read_call
from diffusax.pipelines.plan.plan import Plan
from diffusax.pipelines.run.images import decode
from diffusax.pipelines.run.sample import at_once, load_denoiser, sample
from diffusax.pipelines.tasks.tasks import Task, text_to_image
from diffusax.pipelines.tasks.videos import video_to_video
from diffusax.runtime.devices.chips import chip_of
from diffusax.runtime.devices.host import first_place, host_place, in_host_memory, placed_shape
from diffusax.runtime.devices.layouts import place_of, tree_places
from diffusax.runtime.devices.lowering import lowering_for, lowering_platforms
from diffusax.runtime.devices.memory import array_bytes
from diffusax.runtime.devices.mesh import (
    Rules,
    batch_sharding,
    batch_size,
    replicated,
    tree_sharding,
)
from diffusax.runtime.devices.shares import NO_IMAGES, pad_images
from diffusax.runtime.programs.cost import Cost, cost_of
from diffusax.runtime.programs.program import (
    Request,
    describe,
    key,
    lower,
    recorded_requests,
    streams,
    work_of,
)
from diffusax.runtime.programs.topology import (
    DoesNotFitError,
    compile_there,
    topology_mesh,
)
from diffusax.runtime.switches import in_mesh

_IMAGE_ARGUMENTS = ("image", "mask_image", "control_image")
_COUNTS = ("num_images_per_prompt", "num_videos_per_prompt", "batch_size")
"""The arguments that say how many images or videos a call makes; a pipeline has one of them."""
_USUAL_FRAMES = 81
"""The length of a video that stands for one that is not given, that of the other calls."""


def example_call(pipe: Any, b: int, size: tuple[int, int] | None, given: dict[str, Any]) -> Call:
    """Returns a call of the pipeline for b images of a size, as its programs would see it.

    Args:
        pipe: the pipeline, whose class declares the arguments.
        b: the number of images.
        size: height and width in pixels; the pipeline's own by default.
        given: further arguments; images that are required and not given are blank.

    Raises:
        ValueError: an argument is unknown or not valid.
    """
    signature = inspect.signature(type(pipe).__call__)
    known = signature.parameters
    height, width = size or _usual_size(pipe, known)
    count = next(name for name in _COUNTS if name in known)
    prompt = {} if count == "batch_size" else {"prompt": ""}
    arguments: dict[str, Any] = {**prompt, count: b, **given}
    blank = Image.new("RGB", (width, height))
    for name in _IMAGE_ARGUMENTS:
        # Text to image looks at an image only where one is given.
        optional = name == "image" and type(pipe).task is text_to_image
        if name in known and not optional:
            arguments.setdefault(name, blank)
    if type(pipe).task is video_to_video:
        arguments.setdefault("video", [blank] * _USUAL_FRAMES)
    if "height" in known:
        arguments |= {"height": height, "width": width}
    try:
        signature.bind(pipe, **arguments)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__}: {error}") from None
    return resolve_adapters(pipe.parts, read_call(pipe, (), arguments, pure=True))[1]


def _usual_size(pipe: Any, arguments: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the height and width of a call that says neither."""
    height, width = (
        arguments[name].default if name in arguments else None for name in ("height", "width")
    )
    size: tuple[int, int] = pipe.parts.default_size
    return (height, width) if height and width else size


def requests(c: Components, task: Task, call: Call, mesh: Mesh | None = None) -> list[Request]:
    """Returns the programs of a call with the shapes, and the places, of their arguments.

    Nothing is computed, and parameters may be shapes.

    Args:
        c: the components of the pipeline.
        task: the task of the pipeline.
        call: its arguments.
        mesh: the mesh to split parameters and images over; by default the pipeline's, and for
            text encoders their own.
    """
    encoder_mesh = c.encoder_mesh if mesh is None else mesh
    mesh = mesh or c.mesh
    params = jax.tree.map(_shape_of, c.params)
    with recorded_requests() as found, lowering_for(lowering_platforms(mesh)):
        jax.eval_shape(functools.partial(_whole_call, c, task, call, mesh), params)
    device = None if mesh is not None else placement.device_of(c.denoiser_params)
    unique = {}
    for request in found:
        own = (encodes_texts(request) and encoder_mesh) or mesh
        placed = request._replace(dynamic=_placed(request, own, device))
        unique[key(placed)] = placed
    return list(unique.values())


def encodes_texts(request: Request) -> bool:
    """Returns whether a program encodes texts, perhaps on devices of its own."""
    return "encoders" in dict(request.static)


def mesh_of_program(request: Request, mesh: Mesh) -> Mesh:
    """Returns the part of a mesh on which a program runs, see `placement.component_mesh`."""
    role: Role = "denoiser" if "denoiser" in dict(request.static) else "autoencoder"
    return placement.component_mesh(mesh, role)


_WITHOUT_IMAGES = ("params", "adapters", "start", "stop", "tokens", "prompt_images", "features")
"""The arguments of programs that do not count the call's images: tokens count the prompts and the
negative prompts one after the other."""


def image_axes(request: Request) -> tuple[Any, ...]:
    """Returns the axis of each argument of a program that counts images; NO_IMAGES for none."""

    def axes(name: str, x: Any) -> Any:
        if isinstance(x, Plan):
            return placement.image_axes(x)
        without = name in _WITHOUT_IMAGES
        if name == "weights" and x is not None and x.ndim == 1:
            return NO_IMAGES
        return jax.tree.map(lambda _: NO_IMAGES if without else int(name == "state"), x)

    return tuple(map(axes, request.program.dynamic, request.dynamic))


def shapes_only(
    cls: Any,
    folder: Path,
    *,
    dtype: str,
    vae_dtype: str | None = None,
    weights: Any = None,
    **components: Any,
) -> Any:
    """Returns a checkpoint's pipeline with shapes for parameters, to compile for absent devices.

    Args:
        cls: a class of pipelines, or DiffusionPipeline for the one that the checkpoint names.
        folder: a checkpoint; only its configs are read.
        dtype: the dtype of the parameters.
        vae_dtype: that of the autoencoder's, where it differs.
        weights: what kernels are stored as, see `from_pretrained`.
        components: further components, such as a ControlNet, with shapes for parameters, too.

    Raises:
        ValueError: a config cannot be read; says which file and why.
    """
    _, listed, _ = read_model_index(folder)
    models = {}
    family = class_for(None, folder).family
    for name in listed:
        if not (folder / name / "config.json").is_file() or name == "safety_checker":
            continue
        role = family.role(name)
        if role == "t2i_adapter" and not hasattr(cls, "family"):
            # Classes that choose a pipeline by its task choose one without.
            continue
        network = read_network(folder / name, family.changes(name))
        other = vae_dtype if role == "autoencoder" else None
        kind = other or dtype
        models[name] = Model(network, component_shapes(network, kind, weights, name, role))
    return cls.from_pretrained(folder, device=jax.local_devices()[0], **models, **components)


def _whole_call(c: Components, task: Task, call: Call, mesh: Mesh | None, params: Any) -> Any:
    """Computes all of a call, from prompts to images; it is only traced for its shapes."""
    c = dataclasses.replace(c, params=params, mesh=None, encoder_mesh=None)
    run = task(c, call)
    plan, shown = run.plan, run.decoder_condition
    if mesh is not None:
        parts = batch_size(mesh)
        shown = jax.tree.map(lambda x: pad_images(x, parts), shown)
        plan = jax.tree.map(
            lambda x, axis: pad_images(x, parts, axis), plan, placement.image_axes(plan)
        )
    rows = len(plan.table.timestep)
    sampled = sample(load_denoiser(c, run.loras, run.ip_adapters), plan, at_once(rows))
    return decode(c, sampled.latents, run.decoding, shown)


def _placed(request: Request, mesh: Mesh | None, device: Any) -> tuple[Any, ...]:
    """Returns the arguments' shapes, with their places on a mesh or on a device not the first."""
    names, given = request.program.dynamic, [jax.tree.map(_shape_of, x) for x in request.dynamic]
    if "params" in names:
        own = names.index("params")
        given[own] = arranged_tree(mesh, given[own], _tensor_rules(request))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), given)
    if mesh is None:
        placed = [_on_device(x, device, name) for name, x in zip(names, shapes)]
    else:
        placed = [_at(x, _place_of(request, name, x, mesh)) for name, x in zip(names, shapes)]
    return tuple(jax.tree.map(_where_it_lies, given, placed))


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Returns a parameter's shape, and where it lies if programs copy it from the host's memory."""
    return placed_shape(x, host_place(first_place()) if in_host_memory(x) else None)


def _where_it_lies(given: Any, placed: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """Returns a placed shape, in the host's memory of its devices if the argument lies there."""
    if not in_host_memory(given):
        return placed
    place = host_place(placed.sharding or first_place())
    # The place on a mesh, if only of one device, has room for an order of bytes.
    return placed_shape(placed, place_of(placed, placed_shape(placed, place).sharding))


def _tensor_rules(request: Request) -> Rules:
    """Returns the rules that split the parameters of the program's networks."""
    given = dict(request.static)
    if "denoiser" in given:
        rules: Rules = given["denoiser"].tensor_rules
        return rules
    network = next((given[name] for name in ("vae", "network") if name in given), None)
    rules = (network or given["encoders"][0]).tensor_rules
    return tuple(rules)


def _place_of(request: Request, name: str, x: Any, mesh: Mesh) -> Any:
    mesh = mesh_of_program(request, mesh)
    places: dict[str, Callable[[], Any]] = {
        "params": lambda: tree_places(x, tree_sharding(mesh, x, _tensor_rules(request))),
        "adapters": lambda: tree_sharding(mesh, x, _tensor_rules(request)),
        "plan": lambda: placement.plan_sharding(mesh, x),
        "state": lambda: batch_sharding(mesh, axis=1),
        "memory": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
        "latents": lambda: batch_sharding(mesh),
        "condition": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
        # Those that all images share have no axis of images.
        "weights": lambda: jax.tree.map(
            lambda w: replicated(mesh) if w.ndim == 1 else batch_sharding(mesh), x
        ),
        "images": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
    }
    return places[name]() if name in places else None


def _on_device(x: Any, device: Any, name: str) -> Any:
    """Returns shapes with their places on one device; device: None for the first."""
    x = _at(x, device)
    if name != "params":
        return x
    there = device or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])

    def one(shape: Any) -> Any:
        place = place_of(shape, there)
        return shape if place is there else _at(shape, place)

    return jax.tree.map(one, x)


def _at(x: Any, place: Any) -> Any:
    if place is None:
        return x
    single = isinstance(place, jax.sharding.Sharding | Format)
    places = jax.tree.map(lambda _: place, x) if single else place
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), x, places)


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
        compiled = compile_there(lowered, mesh, streams=streams(request))
    return cost_of(compiled, needed=work_of(request).operations / mesh.size)


def parameter_shares(c: Components, mesh: Mesh) -> dict[str, float]:
    """Returns the GB of each component's parameters that a device of the mesh holds.

    Components that stay in the host's memory but for their turn are left out, and so are parameters
    that programs copy from there.
    """
    shares = {}
    for name, params in c.params.items():
        if not on_host(params):
            part = placement.component_mesh(mesh, c.family.role(name))
            rules = c.models[name].network.tensor_rules
            params = arranged_tree(part, jax.tree.map(_shape_of, params), rules)
            places = tree_sharding(part, params, rules)
            both = zip(jax.tree.leaves(params), jax.tree.leaves(places))
            shares[name] = sum(_share(x, place) for x, place in both if not in_host_memory(x))
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
    return min(float(sum(_share(x, x.sharding) for x in leaves if not in_host_memory(x))), there)


def _share(x: Any, place: Any) -> float:
    return array_bytes(x, place) / 1e9
