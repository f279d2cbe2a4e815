"""The images of a running batch: how a call's are prepared, and what is known of each."""

import dataclasses
import enum
import functools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffusax.batch.programs import MIN_ROWS, Entry, entry_arrays
from diffusax.lora.lora import Lora
from diffusax.lora.stacks import Shapes, WeightGroups, covers, room_for, stack_shapes
from diffusax.models.adapters.image_prompts import ImageLayers
from diffusax.pipelines.components.adapters import adaptable_networks
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.guidance import last_guided_row
from diffusax.pipelines.plan.plan import (
    Conditions,
    DecoderCondition,
    Decoding,
    PreparedRun,
    StepInputs,
)
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.sample import load_denoiser
from diffusax.pipelines.tasks.tasks import Task, most_branches
from diffusax.runtime.devices.mesh import batch_size
from diffusax.runtime.random.noise import TorchNoise
from diffusax.runtime.switches import in_mesh
from diffusax.samplers import Schedule, Table


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedImage:
    """One image that is ready to join a running batch."""

    entry: Entry
    key: tuple[Any, ...]
    """What all images of a batch have in common besides adapters, because programs are compiled for
    it."""
    rows: int
    """The number of rows of its run."""
    branches: int
    """The number of branches that it needs, 1 without guidance."""
    guided_until: int
    """The row from which on it needs only its first branch."""
    later: Mapping[int, Conditions]
    """The conditions of its branches, k ..., from later rows on, which replace the entry's."""
    levels: np.ndarray
    """The (signal, noise) of its latents before each row and after the last, n+1 2."""
    adapters: Mapping[Lora, np.ndarray]
    """The adapters of the denoiser, and the weights of their groups of layers."""
    ip_adapters: tuple[ImageLayers, ...]
    """The layers of the IP-Adapters, which all images of a batch have in common."""
    decoding: Decoding
    decoder_condition: DecoderCondition | None
    """The image and the mask that the decoder reads beside the latents, or None."""


@dataclasses.dataclass(frozen=True, eq=False)
class Kind:
    """What decides the programs of a batch besides its size; equal ones are the same object."""

    key: tuple[Any, ...]
    """The key of its images, see `PreparedImage`."""
    shapes: Shapes
    """The shapes of the adapters of its images; empty where they have none."""
    adapters: int
    """The adapters that there is room for; 0 where the images have none."""
    devices: int
    """The devices that share such a batch."""

    def has_room_for(self, adapters: Sequence[Lora], shapes: Shapes) -> bool:
        """Returns whether the programs have room for these adapters, whose stacks need `shapes`."""
        return len(adapters) <= self.adapters and covers(self.shapes, shapes)


_KINDS: weakref.WeakValueDictionary[tuple[Any, ...], Kind] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def kind_of(c: Components, prepared: PreparedImage, rank: int = 0) -> Kind:
    """Returns the kind of a batch that is made for an image.

    rank: the least total rank of the adapters, if the image has any.
    """
    shapes: Shapes = {}
    count = 0
    if prepared.adapters:
        shapes = stack_shapes(tuple(prepared.adapters), networks_in_batch(c), rank=rank)
        count = room_for(len(prepared.adapters))
    parts = prepared.key, tuple(sorted(shapes.items())), count
    with _LOCK:
        kind = Kind(prepared.key, shapes, count, count_shares(c.mesh))
        return _KINDS.setdefault(parts, kind)


def count_shares(mesh: Mesh | None) -> int:
    """Returns the number of parts into which a mesh splits a batch."""
    return 1 if mesh is None else batch_size(mesh)


def networks_in_batch(c: Components) -> dict[str, Any]:
    """Returns the networks that run in a batch."""
    return {name: c.networks[name] for name in c.denoiser.components}


class Status(enum.Enum):
    """Where an image stands."""

    READY = "ready"
    """It is prepared and can join a batch."""
    RUNNING = "running"
    """It has a seat in a batch."""
    DONE = "done"
    """All its rows are dispatched, or its request has ended."""


@dataclasses.dataclass(eq=False)
class Image:
    """An image of a request, from when it is prepared on."""

    request: Any
    """The request that it belongs to."""
    index: int
    """Which of the request's images it is."""
    prepared: PreparedImage
    kind: Kind
    """The kind of batch that it joins."""
    status: Status = Status.READY
    at: int = 0
    """The next row of its run to be dispatched."""

    @property
    def lanes(self) -> int:
        """The lanes that it takes now."""
        return self.prepared.branches if self.at < self.prepared.guided_until else 1

    @property
    def rows(self) -> int:
        """The rows that it has left."""
        return self.prepared.rows - self.at

    @property
    def settings(self) -> Any:
        """What images that make a whole batch have in common."""
        return self.kind, self.request.c.scheduler, self.prepared.rows, self.prepared.branches


def table_height(rows: int) -> int:
    """Returns the rows of the tables of a batch that an image of so many rows joins."""
    return max(MIN_ROWS, 1 << (rows - 1).bit_length())


def draws_torch_noise(run: PreparedRun) -> bool:
    """Returns whether a run draws PyTorch's numbers at its steps, and so cannot join others."""
    return isinstance(run.noise, TorchNoise) and bool(run.schedule.draws_noise.any())


def prepare_images(
    c: Components, task: Task, run: PreparedRun, count: int | None = None
) -> list[PreparedImage]:
    """Returns the images of a run, each ready to join a running batch.

    Args:
        c: the components.
        task: the task that prepared the run.
        run: the run of one or several images.
        count: how many of them are prepared, the first ones; None prepares all.
    """
    plan, branches = run.plan, max(most_branches(c, task), 1 + len(run.weights))
    conditions = plan.conditions
    if conditions.control:
        table = plan.step_inputs.adapters
        weights = None if table is None else np.asarray(table[0])
        params = load_denoiser(c, run.loras).params
        with in_mesh(c.mesh):
            hints = programs.embed_control(c.denoiser, params, conditions.control, weights)
        conditions = conditions._replace(control=hints)
    images = range(len(plan.latents) if count is None else count)
    return [_prepared(c, run, conditions, i, branches) for i in images]


def _prepared(
    c: Components, run: PreparedRun, conditions: Conditions, i: int, branches: int
) -> PreparedImage:
    """Returns image i of a run. conditions: its first, with embedded control images."""
    plan, rows = run.plan, len(run.schedule)
    height, later = table_height(rows), dict[int, Conditions]()
    with in_mesh(c.mesh):
        given = plan.latents, plan.noise, conditions, plan.inpainting
        arrays = entry_arrays(*given, np.int32(i), branches=branches)
        # Equal ones are the same object.
        made = {id(own.conditions): own.applied(conditions) for own in run.later}
        for one, other in made.items():
            given = plan.latents, plan.noise, other, plan.inpainting
            made[one] = entry_arrays(*given, np.int32(i), branches=branches).conditions
        later = {own.row: made[id(own.conditions)] for own in run.later}
    inputs = _step_inputs(plan.step_inputs, height, branches)
    table = _table(run.schedule, height)
    entry = arrays._replace(table=table, step_inputs=inputs, guide=plan.guide, cache=plan.cache)
    until = last_guided_row(inputs.weights)
    shown = run.decoder_condition
    if shown is not None:
        shown = DecoderCondition(*(x[i : i + 1] for x in shown))
    return PreparedImage(
        entry,
        _key(c, entry, run.ip_adapters),
        rows,
        len(run.weights) + 1 if until else 1,
        until,
        later,
        run.schedule.levels,
        _adapters(c, run, i),
        run.ip_adapters,
        run.decoding,
        shown,
    )


def _adapters(c: Components, run: PreparedRun, i: int) -> dict[Lora, np.ndarray]:
    """Returns the adapters of an image that change the denoiser, with their groups' weights."""
    table = run.plan.step_inputs.adapters
    if table is None:
        return {}
    groups = WeightGroups(adaptable_networks(c))
    first = np.asarray(table)[0]
    weights = (first if first.ndim == 1 else first[i]).reshape(-1, groups.count)
    own = {*c.denoiser.components}
    pairs = zip(run.loras.values(), weights)
    return {one: w for one, w in pairs if w.any() and not own.isdisjoint(one.components)}


def _key(c: Components, entry: Entry, ip_adapters: tuple[ImageLayers, ...]) -> tuple[Any, ...]:
    leaves, structure = jax.tree.flatten(entry)
    params = tuple(id(c.params[name]) for name in c.denoiser.components)
    params += tuple(map(id, ip_adapters))
    arrays = [x if isinstance(x, jax.Array) else jax.numpy.asarray(x) for x in leaves]
    return c.denoiser, params, structure, tuple([(x.shape, x.dtype) for x in arrays])


def _step_inputs(inputs: StepInputs, height: int, branches: int) -> StepInputs:
    """Returns the inputs of the first rows, for the most branches that an image may have."""
    weights = np.asarray(inputs.weights)[:height]
    absent = branches - 1 - weights.shape[1]
    # An image without guidance is not rescaled either.
    rescale = np.asarray(inputs.rescale)[:height] * bool(weights.shape[1])
    control = inputs.control
    if control is not None:
        control = np.asarray(control)[:height]
        control = np.pad(control, ((0, 0), (0, 0), (0, branches - control.shape[2]), (0, 0)))
    rows = inputs.freeu, inputs.target
    freeu, target = (None if column is None else np.asarray(column)[:height] for column in rows)
    weights = np.pad(weights, ((0, 0), (0, absent)))
    return StepInputs(weights, rescale, control, freeu, target=target)


@functools.lru_cache(64)
def _table(schedule: Schedule, height: int) -> Table:
    return jax.device_put(jax.tree.map(lambda x: x[:height], schedule.table()))
