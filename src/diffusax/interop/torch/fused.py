"""The denoising loop of a PyTorch pipeline as one program: networks, guidance and sampler.

A call is gone through twice on the host. The first time the loop is recorded: it is given traced
latents, and what each iteration computes from them, with which arrays, is noted. If all iterations
do the same, that becomes the model that diffusax's sampler asks, in one compiled loop. The second
time the loop is skipped: the scheduler's first step gives the latents that the program ended with.
Networks that run before the loop run once; random numbers are drawn as they would have been.
"""

import contextlib
import inspect
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax.extras import require_extra
from diffusax.interop.torch.compiling import CompiledMethod
from diffusax.interop.torch.environment import environment, is_traced, unwrap, wrap
from diffusax.interop.torch.session import Iteration, NotUniform, Session, columns, running
from diffusax.interop.torch.structures import Structure, flatten, rebuild
from diffusax.interop.torch.tensors import to_array, to_tensor
from diffusax.pipelines.programs import device_table
from diffusax.runtime.mesh import in_mesh
from diffusax.samplers import Schedule, init_state, run, scheduler_from_config

log = logging.getLogger(__name__)

_BEFORE_THE_LOOP = ("text_encoder", "image_encoder", "vae", "movq", "vqvae", "tokenizer")
"""What components are called that no loop runs."""


class _Done(BaseException):
    """Ends a pass; pipelines that catch errors do not catch it."""


class _Pass(Session):
    """One pass. `tape` holds what networks before the loop gave."""

    def __init__(self, tape: list[Any], lift: Callable[[Iteration, np.ndarray], Any]):
        super().__init__(lift)
        self.tape, self._played, self.steps = tape, 0, 0
        self.has_timesteps = False

    def call(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """A compiled method's result."""
        if not self._is_in_loop(method) and not any(map(is_traced, leaves)):
            return self.outside(method, leaves, structure)
        self.calls += 1
        return self.inside(method, leaves, structure, (method.component.name, self.calls))

    def _is_in_loop(self, method: CompiledMethod) -> bool:
        name = method.component.name
        return self.has_timesteps and not self._ended and not name.startswith(_BEFORE_THE_LOOP)

    @property
    def _ended(self) -> bool:
        return False

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """The result of a network outside the loop: played, or computed and kept."""
        if self._played == len(self.tape):
            with jax.ensure_compile_time_eval():
                self.tape.append(method.run(leaves, structure))
        self._played += 1
        kept, around = flatten(self.tape[self._played - 1])
        return rebuild(around, (leaf.clone() for leaf in kept))

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """The result of a network in the loop."""
        raise NotUniform(f"{place} is called")

    def scale(self, sample: Any, timestep: Any = None) -> Any:
        """In the place of the scheduler's scale_model_input."""
        return sample


class _Recording(_Pass):
    """The first pass."""

    def __init__(self) -> None:
        super().__init__([], lambda now, array: jnp.asarray(array))
        self.first: dict[Any, np.ndarray] = {}
        self.timesteps: list[float] = []
        self.asked: dict[str, Any] = {}
        self.components: dict[str, CompiledMethod] = {}
        self.sample: Any = None
        self.options: dict[str, Any] = {}
        self._latents: Any = None

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """As `_Pass.outside`; after the loop there is nothing left to record."""
        if self.steps:
            raise _Done
        return super().outside(method, leaves, structure)

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Zeros of the result's shapes."""
        if method.name == "decode":
            raise _Done
        self.components[method.component.name] = method
        traced = self.steps > 0
        arrays = []
        for p, leaf in enumerate(leaves):
            if is_traced(leaf):
                arrays.append(leaf.jax())
            elif traced:
                arrays.append(self.lift(leaf, (*place, p)))
            else:
                self.first[(*place, p)] = to_array(leaf)
                arrays.append(jnp.asarray(to_array(leaf)))
        shapes, around = method.abstract(structure, arrays)
        self.operation("network", (place, structure))
        if traced:
            return rebuild(around, (wrap(jnp.zeros(x.shape, x.dtype)) for x in shapes))
        return rebuild(around, (to_tensor(np.zeros(x.shape, x.dtype)) for x in shapes))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of the scheduler's step: hands out traced latents."""
        if self.steps == 0:
            self.sample, self.options = sample, kwargs
        elif not (is_traced(output) and is_traced(sample) and _is_same(sample, self._latents)):
            raise NotUniform("the latents are changed between its steps")
        elif tuple(output.shape) != tuple(sample.shape):
            raise NotUniform("its networks predict a variance, too")
        self.timesteps.append(float(timestep))
        self.steps += 1
        self.begin()
        self._latents = wrap(jnp.zeros(tuple(self.sample.shape), to_array(self.sample).dtype))
        return _stepped(self._latents, kwargs)

    @property
    def finished(self) -> list[Iteration]:
        """The iterations from the second on."""
        return self.iterations[1 : self.steps]


class _Tracing(_Pass):
    """A pass while the program is traced: one iteration, as the model that the sampler asks."""

    def __init__(self, tape: list[Any], x: jax.Array, scale: Any, lifted: Any, states: Any):
        arrays = iter(lifted)
        super().__init__(tape, lambda now, array: next(arrays))
        self.x, self.in_scale, self.states = x, scale, states
        self.output: Any = None

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """The network's own result; before the first step, zeros."""
        if not self.steps:
            shapes, around = method.abstract(structure, [jnp.asarray(to_array(x)) for x in leaves])
            return rebuild(around, (to_tensor(np.zeros(x.shape, x.dtype)) for x in shapes))
        arrays = [x.jax() if is_traced(x) else self.lift(x) for x in leaves]
        with self.network():
            return method.inline(structure, arrays, self.states[method.component.name])

    def scale(self, sample: Any, timestep: Any = None) -> Any:
        """The sampler's scale of what networks are given."""
        if not is_traced(sample):
            return sample
        return wrap((sample.jax() * self.in_scale).astype(sample.jax().dtype))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Hands out the latents, and takes the prediction that is made of them."""
        if self.steps:
            self.output = unwrap(output)
            raise _Done
        self.steps += 1
        self.begin()
        return _stepped(wrap(self.x), kwargs)


class _Finishing(_Pass):
    """The last pass, whose loop is skipped."""

    def __init__(self, recording: _Recording, compute: Callable[[], torch.Tensor]):
        super().__init__(recording.tape, lambda now, array: array)
        self._recording, self._compute = recording, compute

    @property
    def _ended(self) -> bool:
        return self.steps == self._recording.steps

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """As `_Pass.outside`, after the loop as ever."""
        if self._ended:
            return method.run(leaves, structure)
        return super().outside(method, leaves, structure)

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Zeros."""
        shapes, around = method.abstract(structure, [jnp.asarray(to_array(x)) for x in leaves])
        return rebuild(around, (to_tensor(np.zeros(x.shape, x.dtype)) for x in shapes))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """The program's latents first, which then stay as they are."""
        self.steps += 1
        return _stepped(self._compute() if self.steps == 1 else sample, kwargs)


class FusedLoop:
    """What a pipeline's call is replaced by; keeps the compiled loops."""

    def __init__(self, call: Callable[..., Any]):
        self.call = call
        self.programs: dict[Any, Any] = {}

    def __call__(self, pipe: Any, /, *args: Any, **kwargs: Any) -> Any:
        """The call's result."""
        seeds = _Seeds((args, kwargs))
        if kwargs.get("callback_on_step_end") is None and kwargs.get("callback") is None:
            try:
                return self._fused(pipe, args, kwargs, seeds)
            except NotUniform as reason:
                log.warning("the loop of %s runs step by step: %s", type(pipe).__name__, reason)
                seeds.restore()
        return self.call(pipe, *args, **kwargs)

    def _fused(self, pipe: Any, args: Any, kwargs: Any, seeds: "_Seeds") -> Any:
        recording = _Recording()
        invoke = lambda: self.call(pipe, *args, **kwargs)  # noqa: E731
        _record(pipe, recording, invoke)
        schedule = _schedule(pipe.scheduler, recording)
        lifted = columns(recording.finished, recording.first)
        compute = lambda: self._compute(pipe, recording, schedule, lifted, invoke, seeds)  # noqa: E731
        seeds.restore()
        last = _Finishing(recording, compute)
        with _pass(pipe, last):
            return invoke()

    def _compute(
        self,
        pipe: Any,
        recording: _Recording,
        schedule: Schedule,
        lifted: list[Any],
        invoke: Callable[[], Any],
        seeds: "_Seeds",
    ) -> torch.Tensor:
        """Runs the program, compiled if need be."""
        sample, model = recording.sample, recording.finished[0]
        varies = tuple(x.shape != y.shape for x, y in zip(lifted, model.lifted))
        flags = {n: m.component.refresh() for n, m in recording.components.items()}
        shapes = tuple((x.shape, x.dtype) for x in (*model.lifted, to_array(sample)))
        key = (tuple(model.operations), varies, shapes, tuple(flags.items()))
        states = {n: m.component.state for n, m in recording.components.items()}
        noises = _noises(schedule, sample, recording.options)
        table = device_table(schedule)
        height = len(table.timestep)
        given = [_padded(x, height) if v else x for x, v in zip(lifted, varies)]
        if key not in self.programs:
            self.programs[key] = _program(pipe, recording.tape, varies, invoke, seeds)
        after = seeds.now()
        place = next(iter(recording.components.values())).component.placement
        x = to_array(sample)
        with in_mesh(place.mesh):
            found = self.programs[key](
                x, [_narrow(g) for g in given], states, noises, table, np.int32(len(schedule))
            )
        seeds.set(after)
        return to_tensor(found).to(sample.dtype)


def _program(
    pipe: Any,
    tape: list[Any],
    varies: tuple[bool, ...],
    invoke: Callable[[], Any],
    seeds: "_Seeds",
) -> Any:
    @jax.jit
    def program(x: Any, lifted: Any, states: Any, noises: Any, table: Any, rows: Any) -> jax.Array:
        scales, plain = table.in_scale, table._replace(in_scale=jnp.ones_like(table.in_scale))

        def model(latents: jax.Array, timestep: jax.Array, i: jax.Array) -> jax.Array:
            arrays = [a[i] if v else jnp.asarray(a) for a, v in zip(lifted, varies)]
            traced = _Tracing(tape, latents.astype(x.dtype), scales[i], arrays, states)
            seeds.restore()
            with contextlib.suppress(_Done), _pass(pipe, traced), environment():
                invoke()
            return traced.output.astype(jnp.float32)

        draw = (lambda i: noises[i]) if noises is not None else (lambda i: jnp.zeros(x.shape))
        return run(model, init_state(x), plain, 0, rows, draw)[0]

    return program


def _record(pipe: Any, recording: _Recording, invoke: Callable[[], Any]) -> None:
    def body() -> int:
        with contextlib.suppress(_Done), _pass(pipe, recording), environment():
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


@contextlib.contextmanager
def _pass(pipe: Any, found: Any) -> Iterator[None]:
    """Has the pipeline's scheduler answer for a pass."""
    scheduler, set_timesteps = pipe.scheduler, pipe.scheduler.set_timesteps

    def note_timesteps(*args: Any, **kwargs: Any) -> Any:
        names = ("num_inference_steps", "device")
        found.has_timesteps, found.asked = True, {**dict(zip(names, args)), **kwargs}
        return set_timesteps(*args, **kwargs)

    # Pipelines look at the signature for what may be asked for.
    note_timesteps.__signature__ = inspect.signature(set_timesteps)  # type: ignore[attr-defined]
    own = {"step": found.step, "set_timesteps": note_timesteps, "scale_model_input": found.scale}
    own["step"] = _with_signature(found.step, scheduler.step)
    attributes = vars(scheduler)
    # A program is traced in the middle of the last pass.
    before = {name: attributes[name] for name in own if name in attributes}
    attributes.update(own)
    try:
        with running(found):
            yield
    finally:
        for name in own.keys() - before.keys():
            del attributes[name]
        attributes.update(before)


def _with_signature(function: Callable[..., Any], original: Callable[..., Any]) -> Any:
    def answer(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    answer.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return answer


def _schedule(scheduler: Any, recording: _Recording) -> Schedule:
    """diffusax's schedule of the run that was recorded."""
    asked = {k: v for k, v in recording.asked.items() if v is not None and k != "device"}
    steps = asked.pop("num_inference_steps", None)
    if not scheduler.config.get("use_dynamic_shifting"):
        asked.pop("mu", None)
    custom: dict[str, Any] = {
        k: [float(x) for x in asked.pop(k)] for k in ("timesteps", "sigmas") if k in asked
    }
    found = np.array(recording.timesteps)
    begin = _offset(scheduler.timesteps.numpy(), found)
    config = {**scheduler.config, "_class_name": type(scheduler).__name__}
    try:
        ours = scheduler_from_config(config)
        eta = recording.options.get("eta") or 0.0
        schedule = ours.schedule(None if custom else steps, begin=begin, eta=eta, **custom, **asked)
    except (ValueError, TypeError) as error:
        raise NotUniform(str(error)) from error
    if len(schedule) != len(found) or not np.allclose(schedule.timesteps, found, rtol=1e-4):
        raise NotUniform("its timesteps are not those of the scheduler's run")
    return schedule


def _offset(timesteps: np.ndarray, found: np.ndarray) -> int:
    """Where in the scheduler's timesteps a run began."""
    for begin in range(len(timesteps) - len(found) + 1):
        if np.allclose(timesteps[begin : begin + len(found)], found, rtol=1e-5):
            return begin
    raise NotUniform(f"its timesteps {found} are not among the scheduler's {timesteps}")


def _noises(schedule: Schedule, sample: torch.Tensor, options: dict[str, Any]) -> Any:
    """The noise of each row, as the scheduler would have drawn it; None where it draws none."""
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
        """The generators' states."""
        return [generator.get_state() for generator in self._generators]

    def set(self, states: list[Any]) -> None:
        """Goes to states from `now`."""
        for generator, state in zip(self._generators, states):
            generator.set_state(state)

    def restore(self) -> None:
        """The generators as they were at first."""
        self.set(self._first)


def _generators(value: Any) -> Iterator[torch.Generator]:
    if isinstance(value, torch.Generator):
        yield value
    elif isinstance(value, dict):
        yield from _generators(list(value.values()))
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _generators(part)


def _stepped(latents: Any, options: dict[str, Any]) -> Any:
    if options.get("return_dict", True):
        return types.SimpleNamespace(prev_sample=latents)
    return (latents,)


def _is_same(left: Any, right: Any) -> bool:
    return left.jax() is right.jax()


def _padded(rows: np.ndarray, height: int) -> np.ndarray:
    """Rows up to a height that is the same for all numbers of steps."""
    return np.concatenate([rows, np.zeros((height - len(rows), *rows.shape[1:]), rows.dtype)])


def _narrow(array: np.ndarray) -> np.ndarray:
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
