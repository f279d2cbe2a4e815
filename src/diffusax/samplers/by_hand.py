"""Runs that their callers step row by row, like those of diffusers' schedulers.

Such a run is the only thing of a scheduler that changes. Hashes, comparisons, configs and the calls
of pipelines do not see it.
"""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import Output, alike, as_numpy
from diffusax.runtime.programs.program import Program
from diffusax.runtime.random.step_noise import StepNoise, default_generator, is_stateful
from diffusax.runtime.switches import is_traced, under_own_switches
from diffusax.samplers.rows import SLOTS, Row, Schedule, Table
from diffusax.samplers.runs import Sampler, cached_schedule
from diffusax.samplers.step import step
from diffusax.samplers.terms import NAMES

_X, _RAW, _NOISE = (NAMES.index(name) for name in ("X", "RAW", "NOISE"))
METHOD = ("eta", "use_clipped_model_output")
"""The arguments of a schedule that diffusers' `step` takes instead of `set_timesteps`."""


class Stepping(Sampler, Protocol):
    """What a run by hand uses of a scheduler; `Stepped` explains each."""

    counts_rows: bool
    draws_in_vain: bool
    second_output: str | None

    def _row_at(self, timestep: float, steps: int, **method: Any) -> Row: ...

    def _second_output(self, row: Row) -> np.ndarray: ...


@dataclasses.dataclass
class HandRun:
    """A run, and how far its caller has stepped.

    options: the arguments of `cached_schedule` that give it. whole: all its rows. begin_index: the
    row to begin at, or None to find it by the first timestep. first: the row that it began at.
    step_index: the next row, or None before the first step. memory: 5 ..., the sampler's memory
    slots; None before the first step and after the last, and for samplers that count no rows.
    """

    options: dict[str, Any]
    whole: Schedule
    noise: StepNoise
    begin_index: int | None = None
    first: int = 0
    step_index: int | None = None
    memory: jax.Array | None = None

    def __len__(self) -> int:
        return len(self.whole)


@flax.struct.dataclass
class SchedulerOutput(Output):
    """The result of a step; fields that are None are those that diffusers' class does not have.

    prev_sample: the sample after the step. pred_original_sample: the predicted clean sample.
    denoised: that of LCM. pred_noised_sample: that of TCD, at the noise level of its intermediate
    step. All have the sample's shape and dtype, and are tensors of PyTorch where it or the
    prediction is one.
    """

    prev_sample: Any
    pred_original_sample: Any = None
    denoised: Any = None
    pred_noised_sample: Any = None


class StepOptions(NamedTuple):
    """What a step takes besides prediction, timestep and sample.

    generator, variance_noise: the source of the row's noise, or the noise itself. noise_scale: the
    factor of the noise. method: the arguments of the schedule in `METHOD` that are given.
    """

    generator: Any = None
    variance_noise: Any = None
    noise_scale: float = 1.0
    method: Mapping[str, Any] = MappingProxyType({})


def new_run(scheduler: Stepping, options: dict[str, Any]) -> HandRun:
    """Makes a run from arguments of `cached_schedule`; it may have rows without a finite step.

    Raises:
        ValueError: for the reasons of `Scheduler.schedule`.
    """
    whole = cached_schedule(scheduler, uncut=True, **options)
    return HandRun(options, whole, StepNoise(whole.motion))


@under_own_switches
def take_step(
    scheduler: Stepping,
    run: HandRun,
    model_output: Any,
    timestep: Any,
    sample: Any,
    options: StepOptions,
) -> SchedulerOutput:
    """Runs the next row, or that of the timestep for samplers that do not count rows.

    Raises:
        ValueError: the run is over, the timestep is not that of the row, shapes do not agree, or
            arrays are traced.
    """
    check_eager("step", model_output, timestep, sample, options.variance_noise)
    if options.variance_noise is not None and options.generator is not None:
        raise ValueError("only one of generator and variance_noise can be given")
    if options.generator is None:
        options = options._replace(generator=default_generator(model_output, sample))
    x = as_jax(sample)
    raw = _prediction(as_jax(model_output), x)
    if run.memory is not None and run.memory.shape[1:] != x.shape:
        raise ValueError(
            f"sample must have the shape of the steps before, {run.memory.shape[1:]} (got "
            f"{x.shape}); call set_timesteps for another run"
        )
    row, number = _next_row(scheduler, run, timestep, options.method)
    draws = bool(row.x[_NOISE]) or any(m[_NOISE] for m in row.memory)
    noise = _noise(scheduler, run, x, number, options, draws=draws)
    memory = run.memory
    if memory is None:
        memory = jnp.zeros((SLOTS - 1, *x.shape), jnp.float32)
    second = scheduler.second_output
    shown = np.zeros(SLOTS + 3) if second is None else scheduler._second_output(row)
    after, predicted, memory = _ADVANCE(x, memory, raw, noise, *_coefficients(row, shown))
    run.memory = memory if scheduler.counts_rows and run.step_index != len(run) else None
    output = SchedulerOutput(after, **({} if second is None else {second: predicted}))
    return alike(output, sample, model_output)


def functional_step(
    state: jax.Array, row: Table, prediction: jax.Array, noise: jax.Array | None = None
) -> jax.Array:
    """Returns the state after a row, as a pure function to jit, scan and differentiate.

    Args:
        state: 6 b ..., of which slot 0 is the sample.
        row: a row of the table, without the table's first axis.
        prediction: b ..., what the network says of row.in_scale * state[0] at row.timestep.
        noise: b ..., standard normal; None for samplers that draw none.
    """
    _check_shapes(state, row, prediction, noise)
    x = state[0]
    drawn = jnp.zeros_like(x) if noise is None else noise
    return step(lambda *_: prediction, state, row, lambda: drawn)


def _check_shapes(state: Any, row: Any, prediction: Any, noise: Any) -> None:
    """Raises ValueError unless the arguments of `functional_step` are of its shapes."""
    shapes = [np.shape(x) for x in (state, row.in_scale, prediction, noise)]
    slots, scale, predicted, drawn = shapes
    if not slots or slots[0] != SLOTS:
        raise ValueError(
            f"state must have shape ({SLOTS}, batch, ...), as scheduler.functional and each step "
            f"return it, with the sample in slot 0 (got {slots})"
        )
    if scale not in ((), slots[1:2]):
        raise ValueError(
            "row must be one row of the table, jax.tree.map(lambda column: column[i], table), as "
            f"jax.lax.scan gives it (got one whose in_scale has shape {scale})"
        )
    if (*predicted[:-1], 0) != (*slots[1:-1], 0) or predicted[-1] < slots[-1]:
        raise ValueError(
            f"prediction must have the sample's shape {slots[1:]}, in the same layout (got "
            f"{predicted})"
        )
    if noise is not None and drawn != slots[1:]:
        raise ValueError(f"noise must have the sample's shape {slots[1:]} (got {drawn})")


def noisy_step(
    state: jax.Array, row: Table, prediction: jax.Array, noise: jax.Array | None = None
) -> jax.Array:
    """Computes `functional_step` for samplers that draw noise.

    Raises:
        ValueError: the noise is None.
    """
    if noise is None:
        raise ValueError("noise must be given to this sampler's step: normal numbers b ...")
    return functional_step(state, row, prediction, noise)


def check_alike(name: str, x: jax.Array, other: jax.Array, called: str = "noise") -> None:
    """Raises ValueError unless the argument `called` so has the shape of the one of this name."""
    if other.shape != x.shape:
        raise ValueError(
            f"{called} must have the shape of {name}, {x.shape}, in the same layout (got "
            f"{other.shape})"
        )


def check_eager(name: str, *arrays: Any) -> None:
    """Raises an error inside jit, grad, vmap and scan, where a run's rows cannot be counted.

    Raises:
        ValueError: an array is a tracer.
    """
    if is_traced(arrays):
        raise ValueError(
            f"{name} counts the rows of a run and cannot be traced by jit, grad, vmap or scan; "
            "state, table, step = scheduler.functional(num_inference_steps, sample) gives a pure "
            "step for them"
        )


def place_of(timesteps: np.ndarray, timestep: Any) -> int | None:
    """Returns the row from which a run starts at a timestep; None if there is none.

    Of equal timesteps it is the second, unless the run begins with them: that is where a step of
    two rows begins (index_for_timestep of diffusers' schedulers).
    """
    wanted = read_timestep(timestep)
    distances = np.abs(timesteps - np.float32(wanted))
    nearest = timesteps[distances.argmin()]
    # Timesteps that are not finite, as extreme options make them, are near none.
    if not distances.min() <= _tolerance(timesteps):
        return None
    places = np.flatnonzero(timesteps == nearest)
    return int(places[0] if len(places) == 1 or not places[0] else places[1])


def row_number(run: HandRun, timestep: Any) -> int:
    """Returns the row of the next step, and remembers it if it is the first one.

    Raises:
        ValueError: the run is over, or has no such row.
    """
    timesteps = run.whole.timesteps
    if run.step_index is None:
        number = run.begin_index
        if number is None:
            number = place_of(timesteps, timestep)
        if number is None:
            raise ValueError(no_timestep(timesteps, timestep))
        run.first = run.step_index = number
    if not 0 <= run.step_index < len(run):
        raise ValueError(
            f"step_index={run.step_index} is beyond the {len(run)} rows of the run; call "
            "set_timesteps for another run"
        )
    return run.step_index


def no_timestep(timesteps: np.ndarray, timestep: Any) -> str:
    """Describes the error of a timestep that a run does not have."""
    return (
        f"timestep must be one of the run's timesteps, {timesteps.max():g} to {timesteps.min():g} "
        f"(got {read_timestep(timestep):g}); scheduler.timesteps has them"
    )


def read_timestep(timestep: Any) -> float:
    """Returns a timestep, or an array of one, as a number.

    Raises:
        ValueError: it is not one number.
    """
    try:
        value = as_numpy(timestep)
        if value.size != 1 or value.dtype.kind not in "iuf":
            raise ValueError
    except (TypeError, ValueError):
        raise ValueError(f"timestep must be one number (got {timestep!r})") from None
    return float(value.reshape(()))


def as_jax(value: Any) -> jax.Array:
    """Returns an array, or a tensor of PyTorch, as an array of JAX."""
    if isinstance(value, jax.Array):
        return value
    array = as_numpy(value)
    if array.dtype.kind not in "biufV":
        raise ValueError(f"arrays of numbers are needed here (got {value!r:.80})")
    return jnp.asarray(array)


def _tolerance(timesteps: np.ndarray) -> float:
    """Returns how far a timestep may be off: fractional ones may be cut to integers."""
    return min(0.999, 1e-3 * float(np.abs(timesteps).max()))


def _next_row(
    scheduler: Stepping, run: HandRun, timestep: Any, method: Mapping[str, Any]
) -> tuple[Row, int]:
    """Returns the row to run and its number, from the first row of the run, and counts it."""
    timesteps = run.whole.timesteps
    if not scheduler.counts_rows:
        place = place_of(timesteps, timestep)
        if place is None:
            return scheduler._row_at(read_timestep(timestep), len(run), **method), 0
        run.step_index = place + 1
        return cached_schedule(scheduler, **method, **run.options).rows[place], place
    number = row_number(run, timestep)
    number = _check_timestep(run, number, read_timestep(timestep))
    rows = cached_schedule(scheduler, begin=run.first, **method, **run.options).rows
    run.step_index = number + 1
    return rows[number - run.first], number - run.first


def _check_timestep(run: HandRun, number: int, timestep: float) -> int:
    """Returns the row's number, which is one less where the second timestep shows it.

    A run that begins at a timestep which PNDM repeats may begin at either of its two rows; the
    second timestep tells which.

    Raises:
        ValueError: the timestep is that of another row.
    """
    if run.begin_index is not None:
        # As in diffusers, nothing is left for the timestep to say.
        return number
    timesteps = run.whole.timesteps
    distances = np.abs(timesteps - np.float32(timestep))
    near = distances <= max(_tolerance(timesteps), distances.min())
    if near[number]:
        return number
    first = run.first
    repeated = first > 0 and timesteps[first] == timesteps[first - 1]
    if number == first + 1 and repeated and near[first]:
        run.first, run.step_index = first - 1, first
        return first
    raise ValueError(
        f"timestep must be {timesteps[number]:g}, that of row {number} of the run (got "
        f"{timestep:g}); call set_timesteps, and set_begin_index to begin at another row"
    )


def _noise(
    scheduler: Stepping,
    run: HandRun,
    x: jax.Array,
    number: int,
    options: StepOptions,
    *,
    draws: bool,
) -> Any:
    """Returns the noise of a row; zeros where it draws none."""
    generator, given = options.generator, options.variance_noise
    # So that a generator goes on after the run as it does in diffusers.
    noisy = options.method.get("eta", 0) > 0 or run.whole.draws_noise.any()
    vain = scheduler.draws_in_vain and noisy and is_stateful(generator)
    if given is not None and draws:
        noise = as_jax(given).astype(jnp.float32)
        if noise.shape != x.shape:
            raise ValueError(
                f"variance_noise must have the sample's shape {x.shape} (got {noise.shape})"
            )
    elif given is None and (draws or vain):
        noise = run.noise.draw(generator, x.shape, number, first=run.first)
    else:
        return np.zeros(x.shape, np.float32)
    scale = options.noise_scale
    return noise if scale == 1 else noise * scale


def _prediction(raw: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a prediction without the channels of a learned variance, which follow the others.

    Raises:
        ValueError: its shape is neither the sample's nor the sample's with twice the channels.
    """
    if raw.shape == x.shape:
        return raw
    for axis in (1, x.ndim - 1):
        doubled = tuple(n * (1 + (i == axis)) for i, n in enumerate(x.shape))
        if x.ndim > 1 and raw.shape == doubled:
            return jax.lax.slice_in_dim(raw, 0, x.shape[axis], axis=axis)
    raise ValueError(
        f"model_output must have the shape of sample, {x.shape}, in the same layout (got "
        f"{raw.shape})"
    )


def _coefficients(row: Row, shown: np.ndarray) -> tuple[Any, ...]:
    """Returns what a row computes as arrays: prediction 2, clip, update 7 9, threshold 2 or None.

    shown: the coefficients of the second output, in the last row of the update.
    """
    update = np.zeros((SLOTS + 1, SLOTS + 3), np.float32)
    update[range(SLOTS), range(SLOTS)] = 1
    update[: 1 + len(row.memory)] = [row.x, *row.memory]
    update[SLOTS] = shown
    prediction = row.prediction[[_X, _RAW]].astype(np.float32)
    limited = row.threshold[1] > 0
    return (
        prediction,
        np.float32(row.clip),
        update,
        np.array(row.threshold, np.float32) if limited else None,
    )


def _advance(
    x: jax.Array,
    memory: jax.Array,
    raw: jax.Array,
    noise: jax.Array,
    prediction: Any,
    clip: Any,
    update: Any,
    threshold: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes a row: the next sample and the second output, like x, and the memory, 5 ....

    All numbers of the row are arguments, so that samplers and timesteps share one program.
    """
    unused = np.zeros(2, np.float32)
    row = Table(
        np.ones((), np.float32),
        np.zeros((), np.float32),
        clip,
        prediction,
        update,
        unused,
        threshold,
    )
    state = jnp.concatenate([x.astype(jnp.float32)[None], memory])
    after = step(lambda *_: raw, state, row, lambda: noise)
    return after[0].astype(x.dtype), after[SLOTS].astype(x.dtype), after[1:SLOTS]


_ADVANCE = Program(_advance)
