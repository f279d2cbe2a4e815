"""Runs a plan to latents.

Every caller runs `sample`: calls, compilation ahead of time, gradients, tracing and callbacks. They
differ in its argument `loop`, which goes through the rows from the first state to the last.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from tqdm.auto import tqdm

from diffusax.lora.lora import Lora
from diffusax.models.adapters.image_prompts import ImageLayers
from diffusax.models.network import Params
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families import Denoiser
from diffusax.pipelines.families.placement import put_plan
from diffusax.pipelines.plan.plan import Later, Plan, PreparedRun
from diffusax.pipelines.run import programs
from diffusax.runtime.devices.mesh import batch_size
from diffusax.runtime.devices.shares import NO_IMAGES, own_images, put
from diffusax.runtime.random.brownian import BrownianNoise
from diffusax.runtime.random.noise import TorchNoise
from diffusax.runtime.switches import in_mesh

# A piece shorter than this is made twice as long, so that watching costs little.
_SECONDS_PER_PIECE = 0.1


class LoadedDenoiser(NamedTuple):
    """A denoiser with its parameters, and the devices that these lie on."""

    denoiser: Denoiser
    params: Params
    mesh: Mesh | None = None


def load_denoiser(
    c: Components,
    loras: Mapping[str, Lora] | None = None,
    ip_adapters: tuple[ImageLayers, ...] = (),
) -> LoadedDenoiser:
    """Returns the denoiser of a pipeline with its parameters, and with adapters, if any.

    loras: the LoRAs by name, as in `PreparedRun`; what they change elsewhere is left out.
    ip_adapters: the layers of IP-Adapters.
    """
    params = c.denoiser_params
    if ip_adapters:
        params["ip_adapters"] = ip_adapters
    if loras and (own := c.adapters.stacked(c, loras, components=params)):
        params["adapters"] = own
    return LoadedDenoiser(c.denoiser, params, c.mesh)


class Sampled(NamedTuple):
    """The result of a run."""

    latents: jax.Array
    """b h w c; on a mesh, those of this process's images."""
    kept: dict[str, Any] | None = None
    """What hooks have kept by the names of points, trees of arrays n ... for n rows; None without
    hooks."""


Loop = Callable[[LoadedDenoiser, jax.Array, Plan], tuple[jax.Array, Any]]
"""A function (denoiser, the sampler's state, a plan on the devices) -> the state after the rows,
and what a cache of steps or hooks have kept."""
OnRow = Callable[[int, jax.Array, PreparedRun], tuple[jax.Array, PreparedRun, bool]]
"""A function (row, this process's state, run) -> (state, run, stop) that is called after each
row."""


def sample(model: LoadedDenoiser, plan: Plan, loop: Loop) -> Sampled:
    """Returns the latents after a run, and what hooks have kept.

    Args:
        model: the denoiser with its parameters and devices.
        plan: the run, with arrays on the host or on any device.
        loop: goes through the rows: `at_once`, `differentiably`, or in pieces as in `run_plan`.

    Raises:
        ValueError: there are hooks, and the devices do not divide the images.
    """
    images, mesh = len(plan.latents), model.mesh
    if plan.hooks is not None and mesh is not None:
        _check_whole(mesh, images)
    placed = place(model, plan)
    state, kept = loop(model, programs.first_state(placed.latents), placed)
    latents: jax.Array = programs.final_latents(state)
    latents = latents if mesh is None else own_images(mesh, latents, images)
    return Sampled(latents, None if plan.hooks is None else kept)


def _check_whole(mesh: Mesh, images: int) -> None:
    """Raises ValueError where hooks would see images that are no part of the call, or not all."""
    if mesh != mesh.local_mesh or images % batch_size(mesh):
        raise ValueError(
            f"hooks see all images together: on {batch_size(mesh)} parts of a mesh, of one process "
            f"each, their number must be a multiple of these (got {images})"
        )


def at_once(rows: int) -> Loop:
    """Returns a function that runs all rows in one dispatch of the compiled program."""

    def loop(model: LoadedDenoiser, state: jax.Array, plan: Plan) -> tuple[jax.Array, Any]:
        return _denoise(model, state, plan, 0, rows, _first_memory(model, state, plan, rows))

    return loop


def differentiably(rows: int, *, rematerialize: bool = True) -> Loop:
    """Returns a function that runs all rows with static bounds, so that reverse gradients exist.

    rematerialize: whether activations are computed again for a gradient instead of being kept.
    """

    def loop(model: LoadedDenoiser, state: jax.Array, plan: Plan) -> tuple[jax.Array, Any]:
        return programs.run_rows(
            model.denoiser, model.params, state, plan, 0, rows, rematerialize=rematerialize
        )

    return loop


def place(model: LoadedDenoiser, plan: Plan, before: Plan | None = None) -> Plan:
    """Returns the plan on the devices, with its control images embedded.

    before: an earlier plan of the same run on the devices, whose embedded control images are
    reused; None embeds them.
    """
    control, mesh = plan.conditions.control, model.mesh
    if control and before is not None:
        plan = plan._replace(conditions=plan.conditions._replace(control=()))
    placed: Plan = jax.device_put(plan) if mesh is None else put_plan(mesh, plan)
    if not control:
        return placed
    if before is not None:
        hints = before.conditions.control
    else:
        given = model.denoiser, model.params, placed.conditions.control
        with in_mesh(mesh):
            hints = programs.embed_control(*given, _first_weights(mesh, plan))
    return placed._replace(conditions=placed.conditions._replace(control=hints))


def run_plan(
    c: Components,
    run: PreparedRun,
    on_row: OnRow | None = None,
    *,
    interrupted: Callable[[], bool] = lambda: False,
    bar: Mapping[str, Any],
) -> Sampled:
    """Runs a plan to its latents: in one dispatch, or in pieces if something comes between rows.

    That is a progress bar, a callback, PyTorch's noise, or prompts that change. Without them this
    is `sample` with `at_once`. No other function cuts a run into pieces.

    Args:
        c: the components.
        run: the run.
        on_row: called after every row; the plan that it returns applies from the next row on.
        interrupted: called before every piece; true ends the run.
        bar: options of the tqdm bar.

    Raises:
        ValueError: see `sample`.
    """
    n, mesh = len(run.schedule.rows), c.mesh
    model = load_denoiser(c, run.loras, run.ip_adapters)
    row_noise = None
    if isinstance(run.noise, TorchNoise) and run.schedule.draws_noise.any():
        row_noise = _row_noise(run, run.noise, getattr(c.scheduler, "draws_in_vain", False))
    shown = tqdm(total=n, **{"leave": True, **bar, "desc": "compiling"})
    # Processes that share a mesh must dispatch alike, whatever their clocks and bars say.
    shared = mesh is not None and mesh != mesh.local_mesh
    if (shown.disable or shared) and on_row is None and row_noise is None and not run.later:
        return sample(model, run.plan, at_once(n))
    between = _Between(on_row, row_noise, interrupted, shown, bar.get("desc"))
    with shown:
        return sample(model, run.plan, functools.partial(_in_pieces, run, between))


class _Between(NamedTuple):
    """What comes between the rows of a run."""

    on_row: OnRow | None
    row_noise: Callable[[int], Any] | None
    """Returns PyTorch's noise of a row, b h w c."""
    interrupted: Callable[[], bool]
    bar: Any
    description: str | None
    """The text of the bar, once the program is compiled."""


def _in_pieces(
    run: PreparedRun, between: _Between, model: LoadedDenoiser, state: jax.Array, placed: Plan
) -> tuple[jax.Array, Any]:
    """Runs all rows, a few at a time; returns the state after the last, or where it is stopped, and
    what is kept.
    """
    n, images, mesh = len(run.schedule.rows), len(run.plan.latents), model.mesh
    single = between.on_row is not None or between.row_noise is not None
    later = {one.row: one for one in run.later}
    row, size, memory = 0, 1, _first_memory(model, state, placed, n)
    while row < n and not between.interrupted():
        if row in later:
            run, placed = _with_later_prompts(model, run, placed, later[row])
        stop, began = row + 1 if single else min(row + size, n), time.perf_counter()
        stop = min([stop, *(start for start in later if start > row)])
        if between.row_noise is not None:
            placed = placed._replace(row_noise=put(mesh, between.row_noise(row)))
        state, memory = _denoise(model, state, placed, row, stop, memory)
        if between.on_row is not None:
            own = state if mesh is None else own_images(mesh, state, images, 1)
            changed, after, stopped = between.on_row(row, own, run)
            state = state if changed is own else put(mesh, changed, 1)
            if stopped:
                break
            if after.plan is not run.plan and stop < n:
                placed = _placed_anew(model, after.plan, run.plan, placed)
            run = after
        _update_bar(between, state, stop - row, first=row == 0)
        size *= 1 + (time.perf_counter() - began < _SECONDS_PER_PIECE)
        row = stop
    return state, memory


def _placed_anew(model: LoadedDenoiser, plan: Plan, before: Plan, placed: Plan) -> Plan:
    """Returns a changed plan on the devices. placed: the plan `before` on the devices."""
    same = plan.conditions.control is before.conditions.control
    return place(model, plan, placed if same else None)


def _with_later_prompts(
    model: LoadedDenoiser, run: PreparedRun, placed: Plan, later: Later
) -> tuple[PreparedRun, Plan]:
    """Returns a run, and its plan on the devices, with the prompts of `later` from its row on."""
    plan = run.plan._replace(conditions=later.applied(run.plan.conditions))
    return dataclasses.replace(run, plan=plan), place(model, plan, placed)


def _first_memory(model: LoadedDenoiser, state: jax.Array, plan: Plan, rows: int) -> Any:
    """Returns what a cache of steps or hooks keep before a run; None without either."""
    given = model.denoiser, model.params, state, plan
    with in_mesh(model.mesh):
        if plan.hooks is not None:
            return programs.in_rows(programs.nothing_kept(*given), rows)
        return None if plan.cache is None else programs.first_memory(*given)


def _denoise(
    model: LoadedDenoiser, state: jax.Array, plan: Plan, start: int, stop: int, memory: Any
) -> tuple[jax.Array, Any]:
    """Runs the rows start..stop of a plan on the devices by the compiled program.

    Returns the state, and what a cache of steps or hooks keep.
    """
    rows = np.int32(start), np.int32(stop)
    with in_mesh(model.mesh):
        if plan.cache is None and plan.hooks is None:
            return programs.denoise(model.denoiser, model.params, state, plan, *rows), None
        found: tuple[jax.Array, Any] = programs.denoise(
            model.denoiser, model.params, state, plan, *rows, memory
        )
        return found


def _first_weights(mesh: Mesh | None, plan: Plan) -> Any:
    """Returns the weights of adapters in the first row on the devices; None without adapters."""
    weights = plan.step_inputs.adapters
    if weights is None:
        return None
    return put(mesh, weights[0], 0 if weights.ndim == 3 else NO_IMAGES)


def _update_bar(between: _Between, state: jax.Array, rows: int, *, first: bool) -> None:
    bar = between.bar
    if bar.disable:
        return
    state.block_until_ready()
    bar.update(rows)
    if first:
        # It may have compiled; the estimate of what is left must not count that.
        bar.set_description(between.description)
        bar.unpause()


def _row_noise(run: PreparedRun, noise: TorchNoise, in_vain: bool) -> Callable[[int], Any]:
    """Returns a function from a row to PyTorch's noise for it, b h w c.

    in_vain: see `Stepped.draws_in_vain`. A generator goes on as after diffusers' call.
    """
    motion, draws = run.schedule.motion, run.schedule.draws_noise
    shape = run.plan.latents.shape
    if motion is not None and motion.seed is not None:
        return BrownianNoise(motion, shape).row

    def row_noise(row: int) -> Any:
        drawn = noise.draw("start", shape[1:]) if draws[row] or in_vain else None
        return drawn if draws[row] else np.zeros(shape, np.float32)

    return row_noise
