"""The programs of a running batch, which images join and leave at any row.

Every image of it is at a row of its own, with its own sampler, guidance, prompt, noise and mask.
These are data of the compiled programs, so that whatever joins compiles nothing. The network's
batch counts lanes, the branches of guidance, and not images: an image without guidance takes one
lane, with classifier-free guidance two, and InstructPix2Pix's three.

An image's values are the same bits whatever else is in the batch, as long as it has the same place
and lanes in a batch of the same size.

Shapes in the docstrings: s places for images, m lanes, k the most branches of an image, r rows of a
table.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffusax.models.caches import Evaluation, zero_memory
from diffusax.models.network import Params
from diffusax.pipelines.families import Denoiser
from diffusax.pipelines.plan.branches import ScatteredLanes, lane_inputs
from diffusax.pipelines.plan.guidance import active_branches, guidance_by
from diffusax.pipelines.plan.plan import Conditions, Inpainting, StepInputs
from diffusax.pipelines.run.programs import arrange_kernels, guided, keep_known
from diffusax.runtime.devices.shares import images_sharding
from diffusax.runtime.devices.splitting import split_lanes
from diffusax.runtime.programs.program import Program
from diffusax.runtime.random.noise import draw_rows
from diffusax.samplers.step import init_state, step_with_memory

MIN_ROWS = 128
"""The least rows of the tables in a running batch."""


class Entry(NamedTuple):
    """One image as it joins a running batch."""

    latents: Any
    """The latents at the start of its run, h w c."""
    noise: Any
    """Its random key."""
    inpainting: Inpainting
    """Its known latents, without the axis of images; a mask of ones where all is generated."""
    control: tuple[Any, ...]
    """For each ControlNet the embedding of its image, h w c; for each T2I-Adapter its maps."""
    conditions: Any
    """The `Conditions` of its branches, k ..., without `control`."""
    table: Any = None
    """The rows of its sampler, a `Table` of r ...."""
    step_inputs: Any = None
    """The inputs of its rows, `StepInputs` of r ... with k-1 weights of guidance."""
    guide: Any = None
    """Its rule of guidance, see `Plan`."""
    cache: Any = None
    """The cache of steps, see `Plan`."""


class Batch(NamedTuple):
    """The arrays of a running batch."""

    state: Any
    """The samplers' states, 6 s h w c."""
    noise: Any
    """The random key of each place, s."""
    inpainting: Inpainting
    """The known latents of each place, s ...."""
    control: tuple[Any, ...]
    """For each ControlNet or T2I-Adapter the same of each place, s h w c."""
    conditions: Any
    """The `Conditions` of each lane, m ...."""
    table: Any
    """The rows of each place, a `Table` of s r ...."""
    step_inputs: Any
    """The inputs of the rows of each place, `StepInputs` of s r ...."""
    guide: Any = None
    """The rule of guidance, with the numbers of each place, s ...; None for the denoiser's."""
    cache: Any = None
    """The cache of steps, with the numbers of each place, s; None without one."""
    memory: Any = None
    """What the cache has kept of each lane, m ...; None without one."""


@functools.partial(jax.jit, static_argnames=("branches",))
def entry_arrays(
    latents: jax.Array,
    noise: jax.Array,
    conditions: Conditions,
    inpainting: Inpainting | None,
    index: Any,
    *,
    branches: int,
) -> Entry:
    """Returns image `index` of a plan of b images, without its table and its rows' inputs.

    Args:
        latents: b h w c.
        noise: b.
        conditions: b k ..., with embedded control images.
        inpainting: b ..., or None.
        index: the index of the image.
        branches: the most branches k; of a plan with fewer the last is repeated.
    """

    def padded(x: jax.Array) -> jax.Array:
        return x[index, jnp.minimum(jnp.arange(branches), x.shape[1] - 1)]

    x = latents[index].astype(jnp.float32)
    known = Inpainting(jnp.ones_like(x[..., :1]), jnp.zeros_like(x), jnp.zeros_like(x))
    if inpainting is not None:
        known = jax.tree.map(lambda x: x[index], inpainting)
    hints = jax.tree.map(lambda hint: hint[index, 0], conditions.control)
    own = jax.tree.map(padded, conditions._replace(control=()))
    return Entry(x, noise[index], known, hints, own)


def empty(entry: Entry, places: int, lanes: int, mesh: Mesh | None = None) -> Batch:
    """Returns a batch without images, for images like this one."""
    if mesh is None:
        return _empty_here(entry, places, lanes)
    make = jax.jit(_empty, static_argnums=(1, 2), out_shardings=_shardings(entry, mesh))
    return make(entry, places, lanes)


def _empty(entry: Entry, places: int, lanes: int) -> Batch:
    def stack(n: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: jnp.broadcast_to(x, (n, *jnp.shape(x))), tree)

    x = entry.latents
    rest = stack(places, entry._replace(latents=None, conditions=None))
    conditions = stack(lanes, jax.tree.map(lambda x: x[0], entry.conditions))
    state = jnp.zeros((init_state(x[None]).shape[0], places, *x.shape), jnp.float32)
    return Batch(
        state,
        rest.noise,
        rest.inpainting,
        rest.control,
        conditions,
        rest.table,
        rest.step_inputs,
        rest.guide,
        rest.cache,
    )


_empty_here: Any = jax.jit(_empty, static_argnums=(1, 2))


def _shardings(entry: Entry, mesh: Mesh) -> Batch:
    shapes = jax.eval_shape(functools.partial(_empty, places=1, lanes=1), entry)
    shardings = jax.tree.map(lambda _: images_sharding(mesh, 0), shapes)
    return shardings._replace(state=images_sharding(mesh, 1))


@functools.partial(Program, donate=("batch",), shape_of="batch")
def insert(batch: Batch, entry: Entry, place: Any, lanes: Any) -> Batch:
    """Puts an image into a place, and the conditions of its branches into lanes.

    A cache of steps begins with nothing kept there, unless the place is none of the batch's.

    Arrays are selected and not updated at an index, which on a mesh would move them.

    Args:
        batch: the batch.
        entry: the image.
        place: the index of the place.
        lanes: k, the indices of the branches' lanes; the number of lanes for a branch without one.
    """
    m = jax.tree.leaves(batch.conditions)[0].shape[0]
    here = jnp.arange(batch.state.shape[1]) == place
    taken = jnp.arange(m)[:, None] == lanes
    branch = taken.argmax(1)

    def put(all_: jax.Array, one: jax.Array) -> jax.Array:
        return jnp.where(_aligned(here, all_), jnp.asarray(one).astype(all_.dtype), all_)

    def put_lanes(all_: jax.Array, one: jax.Array) -> jax.Array:
        return jnp.where(_aligned(taken.any(1), all_), one.astype(all_.dtype)[branch], all_)

    def forget(kept: jax.Array) -> jax.Array:
        return jnp.where(_aligned(taken.any(1) & here.any(), kept), 0, kept)

    state = jnp.where(
        _aligned(here, batch.state[0])[None], init_state(entry.latents[None]), batch.state
    )
    known = jax.tree.map(put, batch.inpainting, entry.inpainting)
    return Batch(
        state,
        jnp.where(here, entry.noise, batch.noise),
        known,
        jax.tree.map(put, batch.control, entry.control),
        jax.tree.map(put_lanes, batch.conditions, entry.conditions),
        jax.tree.map(put, batch.table, entry.table),
        jax.tree.map(put, batch.step_inputs, entry.step_inputs),
        jax.tree.map(put, batch.guide, entry.guide),
        jax.tree.map(put, batch.cache, entry.cache),
        jax.tree.map(forget, batch.memory),
    )


@functools.partial(Program, static=("denoiser",), donate=("state", "memory"), shape_of="state")
def advance_batch(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    batch: Batch,
    lanes: ScatteredLanes,
    at: Any,
    stop: Any,
    rows: Any,
    adapters: Any = None,
    memory: Any = None,
) -> tuple[jax.Array, jax.Array, Any]:
    """Runs the next rows of every image that has some left.

    Returns the states, 6 s h w c, the next row of each place, s, which tells that the rows are
    computed after the states were donated to the next call, and what a cache of steps has kept.

    Args:
        denoiser: the denoiser.
        params: the parameters by component.
        state: 6 s h w c.
        batch: the batch, whose own state and memory are None.
        lanes: the lanes of the places.
        at: s, the next row of each place.
        stop: s, the row after the last of each place; a place without an image has `at` here.
        rows: the number of rows to run.
        adapters: s n, the weights of n adapters in each place, whose layers are among the
            parameters; None without adapters.
        memory: what a cache of steps has kept of each lane, m ...; None without one.
    """
    model = _row_model(denoiser, params, state, batch, lanes, adapters)

    def one(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        state, memory = carry
        running = at + i < stop
        row = jnp.minimum(at + i, jnp.maximum(stop - 1, 0))
        table = _rows(batch.table, row)

        def noise() -> jax.Array:
            return draw_rows(batch.noise, state.shape[2:], row + 1)

        own = functools.partial(model, row=row, running=running, memory=memory)
        new, memory = step_with_memory(own, state, table, noise, keep_known(batch.inpainting))
        return jnp.where(_aligned(running, new[0])[None], new, state), memory

    state, memory = jax.lax.fori_loop(0, rows, one, (state, memory))
    return state, jnp.minimum(jnp.asarray(at) + rows, stop), split_lanes(memory)


@functools.partial(Program, static=("denoiser",))
def empty_memory(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    batch: Batch,
    lanes: ScatteredLanes,
    adapters: Any = None,
) -> Any:
    """Returns what a cache of steps keeps of lanes at first; arguments as of `advance_batch`."""
    model = _row_model(denoiser, params, state, batch, lanes, adapters)
    first = jnp.zeros(state.shape[1], jnp.int32)
    times = _rows(batch.table, first).timestep
    shapes = jax.eval_shape(model, state[0], times, first, first == 0, None)
    return split_lanes(zero_memory(shapes[1]))


def _row_model(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    batch: Batch,
    lanes: ScatteredLanes,
    adapters: Any,
) -> Callable[..., tuple[jax.Array, Any]]:
    """Returns the model of the rows of a batch.

    It is a function (x: s h w c, timestep: s, row: s, running: s, memory) -> (prediction s h w c,
    memory); running says which places have an image with rows left.
    """
    hints = jax.tree.map(lanes.from_images, batch.control)
    conditions = batch.conditions._replace(control=hints)
    given = lane_inputs(StepInputs(None, None, adapters=adapters), lanes, state.shape[1])
    params = arrange_kernels(denoiser, params)
    conditions = denoiser.prepare(params, conditions, given)
    cache = jax.tree.map(lanes.from_images, batch.cache)
    predict: Any = denoiser if cache is None else denoiser.with_memory

    def model(
        x: jax.Array, t: jax.Array, row: jax.Array, running: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        inputs = _rows(batch.step_inputs, row)._replace(adapters=adapters)
        guide = guidance_by(denoiser.guide, batch.guide, row, t, x, per_image=True)
        evaluation = None
        if cache is not None:
            active = lanes.from_branches(active_branches(inputs.weights, len(x)))
            active &= lanes.from_images(running) & lanes.taken()
            evaluation = Evaluation(cache, memory, active)
        return guided(predict, guide, params, x, t, conditions, inputs, lanes, evaluation)

    return model


def _rows(columns: Any, row: jax.Array) -> Any:
    """Returns the row of each place of a tree of columns s r .... row: s."""
    return jax.tree.map(lambda x: jax.vmap(lambda column, r: column[r])(x, row), columns)


@functools.partial(Program, shape_of="batch")
def rearrange(batch: Batch, places: Any, lanes: Any) -> Batch:
    """Returns a batch of another size.

    places, lanes: for each place and lane of the new batch, the index of the old one that it takes.
    """
    of_places = batch._replace(state=None, conditions=None, memory=None)
    rest = jax.tree.map(lambda x: x[places], of_places)
    conditions, memory = jax.tree.map(lambda x: x[lanes], (batch.conditions, batch.memory))
    return rest._replace(state=batch.state[:, places], conditions=conditions, memory=memory)


@jax.jit
def latents_at(state: jax.Array, place: Any) -> jax.Array:
    """Returns the latents at a place, 1 h w c, wherever on a mesh they lie."""
    here = jnp.arange(state.shape[1]) == place
    return jnp.where(_aligned(here, state[0]), state[0], 0).sum(0, keepdims=True)


def _aligned(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(-1, *[1] * (x.ndim - 1))
