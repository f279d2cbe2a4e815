"""Compiles the denoising loop of a PyTorch pipeline: networks, guidance and sampler.

The first call runs twice on the host. In the first pass the loop is recorded: its latents are
traced, and the operations and arrays of each iteration are noted. If all iterations do the same, an
iteration becomes the model of diffusax's sampler, in one compiled loop. In the second pass, as in
later calls that do the same, the loop is watched: its networks and the scheduler compute nothing
until the last step, which returns the program's latents. Networks before the loop run once, and
random generators end in the state that they would have had.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax.boundary.messages import require_extra
from diffusax.interop.torch.environment import computing, environment
from diffusax.interop.torch.passes import Done, Finishing, Recording, Run, Tracing, going_through
from diffusax.interop.torch.session import NotUniform
from diffusax.interop.torch.tensors import to_array, to_tensor
from diffusax.interop.torch.watching import Known, Unlike, Watching, outline
from diffusax.pipelines.run.programs import device_table
from diffusax.runtime.programs.program import Program
from diffusax.runtime.switches import in_mesh
from diffusax.samplers import Schedule, init_state, run, scheduler_from_config

log = logging.getLogger(__name__)

_KEPT = 16
"""The number of loops, and of their programs, that a pipeline keeps, those used last. Each keeps
the tensors that it was recorded with."""


class FusedLoop:
    """The replacement of a pipeline's call, which keeps the compiled loops."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call
        self.programs: dict[Any, Any] = {}
        self.known: dict[Any, Known] = {}

    def __call__(self, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns the call's result."""
        seeds = _Seeds((args, kwargs))
        if kwargs.get("callback_on_step_end") is None and kwargs.get("callback") is None:
            try:
                return self._fused(pipe, args, kwargs, seeds)
            except NotUniform as reason:
                log.warning("the loop of %s runs step by step: %s", type(pipe).__name__, reason)
                seeds.restore()
        return self.call(pipe, *args, **kwargs)

    def _fused(self, pipe: Any, args: Any, kwargs: Any, seeds: "_Seeds") -> Any:
        key = type(pipe.scheduler), outline(args, kwargs)
        invoke = lambda: self.call(pipe, *args, **kwargs)  # noqa: E731
        compute = lambda run: self._compute(pipe, run, invoke, seeds)  # noqa: E731
        if key in self.known:
            try:
                found = _keep(self.known, key, self.known[key])
                return _watched(pipe, found, [], compute, invoke, seeds)
            except Unlike as reason:
                log.info("the loop of %s is recorded again: %s", type(pipe).__name__, reason)
                del self.known[key]
                seeds.restore()
        recording = Recording()
        _record(pipe, recording, invoke)
        run = recording.run()
        _schedule(pipe.scheduler, run)
        seeds.restore()
        known = Known(run.model, run.components, columns=run.columns)
        try:
            result = _watched(pipe, known, recording.tape, compute, invoke, seeds)
        except Unlike as reason:
            log.info("the loop of %s is recorded each time: %s", type(pipe).__name__, reason)
            seeds.restore()
            with going_through(pipe, Finishing(recording, lambda: compute(run))):
                return invoke()
        _keep(self.known, key, known)
        return result

    def _compute(
        self, pipe: Any, run: Run, invoke: Callable[[], Any], seeds: "_Seeds"
    ) -> torch.Tensor:
        """Runs the program, and compiles it where that was not done before."""
        schedule, sample, model = _schedule(pipe.scheduler, run), run.sample, run.model
        varies = tuple(x.shape != y.shape for x, y in zip(run.columns, model.lifted))
        flags = {n: m.component.refresh() for n, m in run.components.items()}
        shapes = tuple((x.shape, x.dtype) for x in (*model.lifted, to_array(sample)))
        key = (tuple(model.operations), varies, shapes, tuple(flags.items()))
        states = {n: m.component.state for n, m in run.components.items()}
        noises = _noises(schedule, sample, run.options)
        table = device_table(schedule)
        height = len(table.timestep)
        given = [_padded(x, height) if v else x for x, v in zip(run.columns, varies)]
        program = self.programs.get(key)
        if program is None:
            program = _program(pipe, run.tape, varies, invoke, seeds)
        _keep(self.programs, key, program)
        after = seeds.now()
        place = next(iter(run.components.values())).component.placement
        x = to_array(sample)
        with in_mesh(place.mesh):
            found = program(
                x, [_narrow(g) for g in given], states, noises, table, np.int32(len(schedule))
            )
        seeds.set(after)
        return to_tensor(found).to(sample.dtype)


def _keep(store: dict[Any, Any], key: Any, value: Any) -> Any:
    """Returns the value in the store, and marks it as the one used last."""
    store.pop(key, None)
    store[key] = value
    while len(store) > _KEPT:
        del store[next(iter(store))]
    return value


def _watched(
    pipe: Any,
    known: Known,
    tape: list[Any],
    compute: Callable[[Run], torch.Tensor],
    invoke: Callable[[], Any],
    seeds: "_Seeds",
) -> Any:
    """Returns a call's result, with its loop watched and computed by the program.

    Raises:
        Unlike: the loop is not the one that was recorded.
    """
    watching = Watching(known, tape, lambda: pipe.scheduler.timesteps, seeds.now, compute)
    with going_through(pipe, watching):
        result = invoke()
    if not watching.ended:
        raise Unlike("it ends before its last timestep")
    return result


def _program(
    pipe: Any,
    tape: list[Any],
    varies: tuple[bool, ...],
    invoke: Callable[[], Any],
    seeds: "_Seeds",
) -> Any:
    def program(x: Any, lifted: Any, states: Any, noises: Any, table: Any, rows: Any) -> jax.Array:
        scales, plain = table.in_scale, table._replace(in_scale=jnp.ones_like(table.in_scale))

        def model(latents: jax.Array, timestep: jax.Array, i: jax.Array) -> jax.Array:
            arrays = [a[i] if v else jnp.asarray(a) for a, v in zip(lifted, varies)]
            traced = Tracing(tape, latents.astype(x.dtype), scales[i], arrays, states)
            seeds.restore()
            with contextlib.suppress(Done), going_through(pipe, traced), computing():
                invoke()
            return traced.output.astype(jnp.float32)

        draw = (lambda i: noises[i]) if noises is not None else (lambda i: jnp.zeros(x.shape))
        return run(model, init_state(x), plain, 0, rows, draw)[0]

    return Program(program, uncounted=("states",))


def _record(pipe: Any, recording: Recording, invoke: Callable[[], Any]) -> None:
    def body() -> int:
        with contextlib.suppress(Done), going_through(pipe, recording), computing():
            invoke()
        return 0

    environment()  # Its own state must not belong to the trace.
    try:
        jax.eval_shape(body)
    except NotUniform:
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise NotUniform(f"{type(error).__name__}: {reason}") from error
    if recording.steps < 2:
        raise NotUniform("it has fewer than two steps")


def _schedule(scheduler: Any, run: Run) -> Schedule:
    """Returns diffusax's schedule of a run."""
    asked = {k: v for k, v in run.asked.items() if v is not None and k != "device"}
    steps = asked.pop("num_inference_steps", None)
    if not scheduler.config.get("use_dynamic_shifting"):
        asked.pop("mu", None)
    custom: dict[str, Any] = {
        k: [float(x) for x in asked.pop(k)] for k in ("timesteps", "sigmas") if k in asked
    }
    found = np.array(run.timesteps)
    begin = _offset(scheduler.timesteps.numpy(), found)
    config = {**scheduler.config, "_class_name": type(scheduler).__name__}
    try:
        ours = scheduler_from_config(config)
        eta = run.options.get("eta") or 0.0
        asked |= {"begin": begin, "end": begin + len(found), "eta": eta}
        schedule = ours.schedule(None if custom else steps, **custom, **asked)
    except (ValueError, TypeError) as error:
        raise NotUniform(str(error)) from error
    if schedule.motion is not None:
        raise NotUniform("its noise is that of a Brownian motion")
    if len(schedule) != len(found) or not np.allclose(schedule.timesteps, found, rtol=1e-4):
        raise NotUniform("its timesteps are not those of the scheduler's run")
    return schedule


def _offset(timesteps: np.ndarray, found: np.ndarray) -> int:
    """Returns the index in the scheduler's timesteps at which a run began."""
    for begin in range(len(timesteps) - len(found) + 1):
        if np.allclose(timesteps[begin : begin + len(found)], found, rtol=1e-5):
            return begin
    raise NotUniform(f"its timesteps {found} are not among the scheduler's {timesteps}")


def _noises(schedule: Schedule, sample: torch.Tensor, options: dict[str, Any]) -> Any:
    """Returns the noise of each row as the scheduler would draw it; None where it draws none."""
    if not schedule.draws_noise.any():
        return None
    draw = require_extra("diffusers.utils.torch_utils", "torch").randn_tensor
    rows = np.zeros((1 << (len(schedule) - 1).bit_length(), *sample.shape), np.float32)
    for i in np.flatnonzero(schedule.draws_noise):
        drawn = draw(sample.shape, generator=options.get("generator"), dtype=sample.dtype)
        rows[i] = to_array(drawn).astype(np.float32)
    return rows


class _Seeds:
    """The states of the random generators among a call's arguments, and of PyTorch's own."""

    def __init__(self, value: Any):
        self._generators = [torch.default_generator, *_generators(value)]
        self._first = self.now()

    def now(self) -> list[Any]:
        """Returns the generators' states."""
        return [generator.get_state() for generator in self._generators]

    def set(self, states: list[Any]) -> None:
        """Sets the generators' states to those that `now` returned."""
        for generator, state in zip(self._generators, states):
            generator.set_state(state)

    def restore(self) -> None:
        """Sets the generators' states to the first ones."""
        self.set(self._first)


def _generators(value: Any) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, dict):
        yield from _generators(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _generators(part)


def _padded(rows: np.ndarray, height: int) -> np.ndarray:
    """Pads rows to a height that is the same for all numbers of steps."""
    return np.concatenate([rows, np.zeros((height - len(rows), *rows.shape[1:]), rows.dtype)])


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
