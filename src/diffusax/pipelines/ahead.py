"""Lists the programs that a call needs, with the shapes and places of their arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.layout import Format
from jax.sharding import Mesh
from PIL import Image

from diffusax.checkpoints import read_model_index
from diffusax.checkpoints.networks import read_network
from diffusax.models.network import Model, cast_shapes
from diffusax.pipelines import placement
from diffusax.pipelines.adapter_store import resolve_adapters
from diffusax.pipelines.arguments import Call, check_call
from diffusax.pipelines.components import Components
from diffusax.pipelines.families.family import Role
from diffusax.pipelines.loading import class_for
from diffusax.pipelines.plan import Plan
from diffusax.pipelines.sample import at_once, bind, decode, sample
from diffusax.pipelines.tasks import Task, text_to_image
from diffusax.runtime.devices.layouts import place_of, tree_places
from diffusax.runtime.devices.mesh import Rules, batch_sharding, batch_size, tree_sharding
from diffusax.runtime.devices.shares import NO_IMAGES, pad_images
from diffusax.runtime.programs.program import Request, key, recorded_requests

_PICTURES = ("image", "mask_image", "control_image")


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
    height, width = size or pipe.parts.default_size
    many: dict[str, Any] = {"prompt": "", "num_images_per_prompt": b}
    if "batch_size" in signature.parameters:
        many = {"batch_size": b}
    arguments: dict[str, Any] = {**many, **given}
    for name in _PICTURES:
        # Text to image looks at an image only where one is given.
        optional = name == "image" and type(pipe).task is text_to_image
        if name in signature.parameters and not optional:
            arguments.setdefault(name, Image.new("RGB", (width, height)))
    if "height" in signature.parameters:
        arguments |= {"height": height, "width": width}
    try:
        bound = signature.bind(pipe, **arguments)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__}: {error}") from None
    bound.apply_defaults()
    _, call = resolve_adapters(pipe.parts, check_call(bound.arguments))
    return call


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
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), c.params)
    with recorded_requests() as found:
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


def image_axes(request: Request) -> tuple[Any, ...]:
    """Returns the axis of each argument of a program that counts images; NO_IMAGES for none."""

    def axes(name: str, x: Any) -> Any:
        if isinstance(x, Plan):
            return placement.image_axes(x)
        # Tokens count prompts and negative prompts one after the other, not images.
        without = name in ("params", "adapters", "start", "stop", "tokens", "pictures")
        if name == "weights" and x is not None and x.ndim == 1:
            return NO_IMAGES
        return jax.tree.map(lambda _: NO_IMAGES if without else int(name == "state"), x)

    return tuple(map(axes, request.program.dynamic, request.dynamic))


def shapes_only(
    cls: Any, folder: Path, *, dtype: str, vae_dtype: str | None = None, **components: Any
) -> Any:
    """Returns a checkpoint's pipeline with shapes for parameters, to compile for absent devices.

    Args:
        cls: a class of pipelines, or DiffusionPipeline for the one that the checkpoint names.
        folder: a checkpoint; only its configs are read.
        dtype: the dtype of the parameters.
        vae_dtype: that of the autoencoder's, where it differs.
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
        network = read_network(folder / name)
        other = vae_dtype if role == "autoencoder" else None
        kind = other or dtype
        models[name] = Model(network, cast_shapes(network.shapes, kind))
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
    latents = sample(bind(c, run.adapters, run.ip_adapters), plan, at_once(rows))
    return decode(c, latents, run.decoding, shown)


def _placed(request: Request, mesh: Mesh | None, device: Any) -> tuple[Any, ...]:
    """Returns the arguments' shapes, with their places on a mesh or on a device not the first."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), request.dynamic)
    named = zip(request.program.dynamic, shapes)
    if mesh is None:
        return tuple(_on_device(x, device, name) for name, x in named)
    return tuple(_at(x, _place_of(request, name, x, mesh)) for name, x in named)


def _tensor_rules(request: Request) -> Rules:
    """Returns the rules that split the parameters of the program's network."""
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
        "latents": lambda: batch_sharding(mesh),
        "condition": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
        "weights": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
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
