"""Programs made before the first call: which they are, compiled, saved, loaded, exported."""

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image
from tqdm.auto import tqdm

from diffusax.checkpoints import read_model_index
from diffusax.checkpoints.networks import read_network
from diffusax.models.network import Model, cast_shapes
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call, check_call
from diffusax.pipelines.components import Components
from diffusax.pipelines.loading import IGNORED
from diffusax.pipelines.placement import component_mesh, image_axes, pad_images, plan_sharding
from diffusax.pipelines.tasks import Task
from diffusax.runtime.mesh import Rules, batch_sharding, batch_size, tree_sharding
from diffusax.runtime.program import (
    PROGRAMS,
    Request,
    compile_request,
    describe,
    digest,
    key,
    recorded_requests,
)
from diffusax.runtime.topology import cost_of

_PICTURES = ("image", "mask_image", "control_image")


def example_call(pipe: Any, b: int, size: tuple[int, int] | None, given: dict[str, Any]) -> Call:
    """A call of the pipeline for b images of a size, as its programs would see it.

    Args:
        pipe: whose class says which arguments there are.
        b: how many images.
        size: height and width in pixels; the pipeline's own by default.
        given: further arguments; pictures that are not given are blank.

    Raises:
        ValueError: an argument is unknown or cannot be.
    """
    signature = inspect.signature(type(pipe).__call__)
    height, width = size or pipe.parts.default_size
    arguments: dict[str, Any] = {"prompt": "", "num_images_per_prompt": b, **given}
    for name in _PICTURES:
        if name in signature.parameters:
            arguments.setdefault(name, Image.new("RGB", (width, height)))
    if "height" in signature.parameters:
        arguments |= {"height": height, "width": width}
    try:
        bound = signature.bind(pipe, **arguments)
    except TypeError as error:
        raise ValueError(f"{type(pipe).__name__}: {error}") from None
    bound.apply_defaults()
    return check_call(bound.arguments)


def requests(c: Components, task: Task, call: Call, mesh: Mesh | None = None) -> list[Request]:
    """The programs of a call with the shapes, and the places, of their arguments.

    Nothing is computed, and parameters may be shapes.

    Args:
        c: the pipeline's.
        task: what the call does.
        call: its arguments.
        mesh: to spread parameters and images over; by default the pipeline's.
    """
    mesh = mesh or c.mesh
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), c.params)
    with recorded_requests() as found:
        jax.eval_shape(functools.partial(_whole_call, c, task, call, mesh), params)
    device = None if mesh is not None else _single_device(c)
    unique = {}
    for request in found:
        placed = request._replace(dynamic=_placed(request, mesh, device))
        unique[key(placed)] = placed
    return list(unique.values())


def compile_all(found: Sequence[Request], mesh: Mesh | None, *, threads: int = 4) -> None:
    """Compiles the programs, several at once, and shows how far it is; calls then find them."""
    bar = tqdm(total=len(found), desc="compiling", disable=None if len(found) > 1 else True)

    def one(request: Request) -> None:
        compile_request(request, mesh)
        bar.set_postfix_str(describe(request))
        bar.update()

    with bar, ThreadPoolExecutor(threads) as pool:
        list(pool.map(one, found))


def shapes_only(cls: Any, folder: Path, *, dtype: str, vae_dtype: str | None = None) -> Any:
    """A checkpoint's pipeline whose parameters are shapes, to compile for machines not here.

    Args:
        cls: a class of pipelines, or DiffusionPipeline for the one that the checkpoint names.
        folder: a checkpoint; only its configs are read.
        dtype: of the parameters.
        vae_dtype: of the autoencoder's, where it differs.

    Raises:
        ValueError: a config cannot be read; says which file and why.
    """
    _, listed, _ = read_model_index(folder)
    models = {}
    for name in listed:
        if not (folder / name / "config.json").is_file() or name in IGNORED:
            continue
        network = read_network(folder / name)
        kind = vae_dtype if name == "vae" and vae_dtype else dtype
        models[name] = Model(network, cast_shapes(network.shapes, kind))
    return cls.from_pretrained(folder, device=jax.local_devices()[0], **models)


def memory_of(c: Components) -> dict[str, dict[str, float]]:
    """GB on each device, see `DiffusionPipeline.memory`."""

    def share(x: Any) -> float:
        shape = x.sharding.shard_shape(x.shape) if isinstance(x, jax.Array) else x.shape
        return math.prod(shape) * x.dtype.itemsize / 1e9

    parameters = {name: sum(map(share, jax.tree.leaves(tree))) for name, tree in c.params.items()}
    report = {"parameters": parameters}
    for program in PROGRAMS.values():
        for request_key, compiled in program.executables.items():
            cost = cost_of(compiled)
            report[f"{program.name} {digest(request_key)}"] = {
                "temporaries": cost.temporaries,
                "code": cost.code,
            }
    return report


def _whole_call(c: Components, task: Task, call: Call, mesh: Mesh | None, params: Any) -> Any:
    """What a call computes, for its shapes."""
    c = dataclasses.replace(c, params=params, mesh=None)
    job = task(c, call)
    plan, kept = job.plan, job.kept
    if mesh is not None:
        parts = batch_size(mesh)
        kept = jax.tree.map(lambda x: pad_images(x, parts), kept)
        plan = jax.tree.map(lambda x, axis: pad_images(x, parts, axis), plan, image_axes(plan))
    plan = programs.with_control(c.denoiser, c.denoiser_params, plan)
    state = programs.first_state(plan.latents)
    rows = np.int32(0), np.int32(len(plan.table.timestep))
    state = programs.denoise(c.denoiser, c.denoiser_params, state, plan, *rows)
    vae, options = c.networks["vae"], {"upcast": c.upcasts}
    options["normalize"] = c.family.normalizes_latents
    return programs.decode(vae, c.params["vae"], programs.final_latents(state), kept, **options)


def _placed(request: Request, mesh: Mesh | None, device: Any) -> tuple[Any, ...]:
    """The shapes of the arguments; with a mesh or a device not the first, also where each lies."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), request.dynamic)
    if mesh is None:
        return shapes if device is None else tuple(_at(x, device) for x in shapes)
    named = zip(request.program.dynamic, shapes)
    return tuple(_at(x, _place_of(request, name, x, mesh)) for name, x in named)


def _single_device(c: Components) -> Any:
    """Where the parameters lie, unless on the first device or nowhere."""
    sharding = getattr(jax.tree.leaves(c.params)[0], "sharding", None)
    if sharding is None or sharding.device_set == {jax.local_devices()[0]}:
        return None
    return sharding


def _tensor_rules(request: Request) -> Rules:
    """Those of the network that the program runs."""
    given = dict(request.static)
    if "denoiser" in given:
        return given["denoiser"].unet.tensor_rules
    network = given["vae"] if "vae" in given else given["encoders"][0]
    return network.tensor_rules


def _place_of(request: Request, name: str, x: Any, mesh: Mesh) -> Any:
    component = "unet" if request.program.name in ("denoise", "embed_control") else "vae"
    mesh = component_mesh(mesh, component)
    places: dict[str, Callable[[], Any]] = {
        "params": lambda: tree_sharding(mesh, x, _tensor_rules(request)),
        "plan": lambda: plan_sharding(mesh, x),
        "state": lambda: batch_sharding(mesh, axis=1),
        "latents": lambda: batch_sharding(mesh),
        "kept": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
        "pictures": lambda: jax.tree.map(lambda _: batch_sharding(mesh), x),
    }
    return places[name]() if name in places else None


def _at(x: Any, place: Any) -> Any:
    if place is None:
        return x
    single = isinstance(place, jax.sharding.Sharding)
    places = jax.tree.map(lambda _: place, x) if single else place
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), x, places)
