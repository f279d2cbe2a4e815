"""The compiled programs of runs, such as denoise; those of autoencoders are `autoencoding`.

Every value that a user changes between calls is an argument of a program. Programs are cached by
networks, which hold no parameters: a second checkpoint of the same architecture, or another task on
the same shapes, compiles nothing. docs/serving/compilation.md lists what does.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.models.caches import Evaluation, zero_memory
from diffusax.models.hooks import Hooks
from diffusax.models.layers.layers import ArrangedLinear
from diffusax.models.network import Network, Params
from diffusax.models.parameter_tree import replaced
from diffusax.pipelines.families import Denoiser
from diffusax.pipelines.plan.branches import AdjacentLanes, Branches, lane_inputs
from diffusax.pipelines.plan.guidance import active_branches, guidance_by
from diffusax.pipelines.plan.plan import (
    Conditions,
    Inpainting,
    Plan,
    StepInputs,
)
from diffusax.pipelines.run.mixing import with_mixture
from diffusax.runtime.devices.splitting import split_lanes, tensor_parts
from diffusax.runtime.programs.program import Program
from diffusax.runtime.random.noise import draw_rows
from diffusax.samplers import Schedule, Table, init_state
from diffusax.samplers.step import run_with_memory

RowModel = Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]]
"""A function (x: b h w c, timestep, row, what a cache of steps or hooks have kept) -> (prediction
b h w c, what they keep)."""


@functools.partial(Program, static=("denoiser",), donate=("state", "memory"), shape_of="state")
def denoise(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    plan: Plan,
    start: Any,
    stop: Any,
    memory: Any = None,
) -> Any:
    """Runs the rows start..stop of the plan's table, compiled; see `run_rows`.

    Returns the state, and with a cache of steps or hooks the pair of it and of what these keep.

    state: 6 b h w c, the latents in slot 0. memory: what a cache of steps or hooks have kept, from
    `first_memory` or an earlier call. The plan's control images are embedded by `embed_control`.
    """
    if plan.cache is None and plan.hooks is None:
        return run_rows(denoiser, params, state, plan, start, stop)[0]
    model = _row_model(denoiser, params, state, plan)
    state, memory = _run(model, state, memory, plan, start, stop)
    return state, memory if plan.cache is None else split_lanes(memory)


@functools.partial(Program, static=("denoiser",), shape_of="state")
def first_memory(denoiser: Denoiser, params: Params, state: jax.Array, plan: Plan) -> Any:
    """Returns what a cache of steps keeps before the first row; arguments as those of `denoise`."""
    return split_lanes(_first_memory(_row_model(denoiser, params, state, plan), state, plan))


@functools.partial(Program, static=("denoiser",))
def nothing_kept(denoiser: Denoiser, params: Params, state: jax.Array, plan: Plan) -> Any:
    """Returns zeros of the shapes of what hooks keep in a row; arguments as those of `denoise`."""
    return zero_memory(_shapes_of_kept(_row_model(denoiser, params, state, plan), state, plan))


def in_rows(kept: Any, rows: int) -> Any:
    """Returns what hooks keep before the first of so many rows, a tree of arrays n ....

    kept: the result of `nothing_kept`.
    """
    return jax.tree.map(lambda x: jnp.broadcast_to(x, (rows, *x.shape)), kept)


def run_rows(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    plan: Plan,
    start: Any,
    stop: Any,
    *,
    rematerialize: bool = False,
) -> tuple[jax.Array, Any]:
    """Runs the rows start..stop of the plan's table; returns the sampler's state, 6 b h w c, and
    what a cache of steps or hooks have kept, None without either.

    This is the pure function that `denoise` compiles. Static bounds allow gradients in reverse. A
    cache of steps begins with nothing kept.

    rematerialize: whether to compute predictions again for a gradient, instead of keeping their
    activations in memory.
    """
    model = _row_model(denoiser, params, state, plan, rematerialize=rematerialize)
    memory = None if plan.cache is None else _first_memory(model, state, plan)
    if plan.hooks is not None:
        kept = zero_memory(_shapes_of_kept(model, state, plan))
        memory = in_rows(kept, len(plan.table.timestep))
    return _run(model, state, memory, plan, start, stop)


def _run(
    model: RowModel, state: jax.Array, memory: Any, plan: Plan, start: Any, stop: Any
) -> tuple[jax.Array, Any]:
    """Runs rows by a model; returns the state and what the model remembers."""

    def draw(i: jax.Array) -> jax.Array:
        given = plan.row_noise
        return draw_rows(plan.noise, state.shape[2:], i + 1) if given is None else given

    constrain = None if plan.inpainting is None else keep_known(plan.inpainting)
    return run_with_memory(model, state, memory, plan.table, start, stop, draw, constrain)


def _first_memory(model: RowModel, state: jax.Array, plan: Plan) -> Any:
    return zero_memory(_shapes_of_kept(model, state, plan))


def _shapes_of_kept(model: RowModel, state: jax.Array, plan: Plan) -> Any:
    """Returns the shapes of what is kept of one row."""
    timestep = jnp.asarray(plan.table.timestep)[0]
    return jax.eval_shape(model, state[0], timestep, jnp.int32(0), None)[1]


def _row_model(
    denoiser: Denoiser,
    params: Params,
    state: jax.Array,
    plan: Plan,
    *,
    rematerialize: bool = False,
) -> RowModel:
    """Returns the model of the rows of a plan; see `samplers.run_with_memory`."""
    cached, hooked = plan.cache is not None, plan.hooks is not None
    predict: Any = denoiser.with_memory if cached else denoiser
    predict = denoiser.with_hooks if hooked else predict
    predict = jax.checkpoint(predict) if rematerialize else predict
    branches = AdjacentLanes(plan.step_inputs.weights.shape[-1] + 1)
    conditions = jax.tree.map(branches.from_branches, plan.conditions)
    adapters = plan.step_inputs.adapters
    if adapters is not None:
        adapters = jnp.asarray(adapters)[0]
        params = with_mixture(denoiser, params, adapters) if adapters.ndim == 1 else params
    params = arrange_kernels(denoiser, params)
    given = lane_inputs(StepInputs(None, None, adapters=adapters), branches, state.shape[1])
    conditions = denoiser.prepare(params, conditions, given)

    def model(
        x: jax.Array, timestep: jax.Array, i: jax.Array, memory: Any
    ) -> tuple[jax.Array, Any]:
        inputs = jax.tree.map(lambda column: jnp.asarray(column)[i], plan.step_inputs)
        combine = guidance_by(denoiser.guide, plan.guide, i, timestep, x)
        evaluation: Any = None
        if cached:
            active = branches.from_branches(active_branches(inputs.weights, len(x)))
            evaluation = Evaluation(plan.cache, memory, active)
        elif plan.hooks is not None:
            times = branches.from_images(jnp.broadcast_to(timestep, x.shape[:1]))
            evaluation = Hooks(plan.hooks, i, times, branches.k)
        given = x, timestep, conditions, inputs, branches
        y, kept = guided(predict, combine, params, *given, evaluation)
        return y, _at_row(memory, kept, i) if hooked and memory is not None else kept

    return model


def _at_row(memory: Any, kept: Any, row: jax.Array) -> Any:
    """Returns what hooks have kept so far, with what they keep of a row: a tree of arrays n ..."""

    def put(all_rows: jax.Array, own: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(all_rows, own, row, 0)

    return jax.tree.map(put, memory, kept)


def arrange_kernels(denoiser: Denoiser, params: Params) -> Params:
    """Returns the parameters with kernels arranged once for all steps of a run."""
    own = denoiser.networks.items()
    return {**params, **{name: _with_arranged_kernels(net, params[name]) for name, net in own}}


def guided(
    predict: Callable[..., Any],
    combine: Callable[..., jax.Array],
    params: Params,
    x: jax.Array,
    timestep: jax.Array,
    conditions: Conditions,
    inputs: StepInputs,
    branches: Branches,
    evaluation: Evaluation | Hooks | None = None,
) -> tuple[jax.Array, Any]:
    """Returns the guided prediction for images, b h w c, float32, and what is kept beside it.

    Args:
        predict: a denoiser, or a function with its arguments; with a cache its `with_memory`, and
            with hooks its `with_hooks`.
        combine: the denoiser's `guide`, or a rule with its arguments, see `guidance_by`.
        params: the parameters by component.
        x: b h w c, the scaled latents.
        timestep: a scalar or b.
        conditions: those of each lane.
        inputs: those of one row.
        branches: the lanes of the network's batch.
        evaluation: the cache of steps, or the hooks; None without either, where nothing is kept.
    """
    # The number of images may be a symbol, where the program is exported.
    b = x.shape[0]
    t = branches.from_images(jnp.broadcast_to(timestep, (b,)))
    given = branches.from_images(x), t, conditions, lane_inputs(inputs, branches, b)
    if evaluation is None:
        y, kept = predict(params, *given), None
    else:
        y, kept = predict(params, *given, evaluation)
    return combine(branches.to_branches(y.astype(jnp.float32)[..., : x.shape[-1]]), inputs), kept


def keep_known(known: Inpainting) -> Callable[..., jax.Array]:
    """Returns the function that puts the known region back after a row; see `samplers.run`."""

    def put_back(x: jax.Array, signal: jax.Array, noise: jax.Array, *_: Any) -> jax.Array:
        given = signal * known.latents + noise * known.noise
        return (1 - known.mask) * given + known.mask * x

    return put_back


@functools.partial(Program, static=("denoiser",), shape_of="images")
def embed_control(
    denoiser: Denoiser,
    params: Params,
    images: tuple[jax.Array, ...],
    weights: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Embeds the images of `Conditions.control` for `denoise`; see `Denoiser.embed`.

    weights: the weights of a adapters for each image, b a, or a where they agree; None without
    adapters.
    """
    if weights is None:
        return denoiser.embed(params, images)
    rows = jnp.broadcast_to(weights, (images[0].shape[0], weights.shape[-1]))
    return denoiser.embed(params, images, rows)


@jax.jit
def initial_latents(
    noise: jax.Array, scale: Any, clean: jax.Array | None, signal: Any
) -> jax.Array:
    """Returns the latents at the start of a run, signal * clean + scale * noise, b h w c.

    clean: latents b h w c, or fewer, which are repeated; None for pure noise.
    """
    x = noise.astype(jnp.float32) * scale
    return x if clean is None else x + signal * repeat_to(clean, x.shape[0])


@jax.jit
def final_latents(state: jax.Array) -> jax.Array:
    """Returns the latents in the sampler's state, b h w c."""
    return state[0]


@jax.jit
def first_state(latents: jax.Array) -> jax.Array:
    """Returns the sampler's state before the first row, 6 b h w c."""
    return init_state(latents)


@functools.partial(jax.jit, static_argnames=("order", "repeats"))
def stack_branches(
    branches: tuple[Any, ...], *, order: tuple[int | None, ...], repeats: int
) -> tuple[jax.Array, ...]:
    """Stacks the embeddings of prompts into leaves of `Conditions`, (n repeats) k ....

    branches: for each kind of prompt a tuple of arrays n ... (context, pooled). order: the index
    into `branches` for each of the k branches; None stands for zeros. repeats: the number of copies
    of each prompt, which stay beside each other.
    """

    def one(*leaves: jax.Array) -> jax.Array:
        chosen = [jnp.zeros_like(leaves[0]) if i is None else leaves[i] for i in order]
        return jnp.repeat(jnp.stack(chosen, axis=1), repeats, axis=0)

    return jax.tree.map(one, *branches)


@functools.lru_cache(64)
def device_table(schedule: Schedule) -> Table:
    """Returns the schedule's table on the device, where all calls share one copy."""
    # Also where a call is only traced: the cache must hold arrays.
    with jax.ensure_compile_time_eval():
        return jax.device_put(schedule.table())


@functools.partial(jax.jit, static_argnums=1)
def tile(x: jax.Array, b: int) -> jax.Array:
    """Repeats x along its first axis, as a whole, to length b, and casts it to float32."""
    return repeat_to(x.astype(jnp.float32), b)


@jax.jit
def join_channels(*parts: jax.Array) -> jax.Array:
    """Joins a mask and masked latents, further input channels, b h w c each -> b 1 h w c."""
    return jnp.concatenate(parts, axis=-1)[:, None]


def repeat_to(x: jax.Array, b: int) -> jax.Array:
    """Repeats x along its first axis, as a whole, to length b."""
    return x if x.shape[0] == b else jnp.tile(x, (b // x.shape[0], *(1,) * (x.ndim - 1)))


def _with_arranged_kernels(network: Any, params: Params) -> Params:
    """Returns a network's parameters with the kernels that are exchanged between devices arranged.

    The parameters are for calls of the network under the same mesh. Without a tensor axis, and
    those of other libraries' networks, they are returned as they are; so are kernels in the host's
    memory, which each step arranges.
    """
    if tensor_parts() == 1 or not isinstance(network, Network):
        return params
    params = network.fitted(params)
    for path, layer in nnx.iter_modules(network.module(params)):
        if isinstance(layer, ArrangedLinear) and layer.parts > 1 and not layer.is_streamed:
            params = replaced(params, (*map(str, path), "kernel"), layer.arranged())
    return params
