"""Passes through a pipeline's call, in which its loop is recorded, traced, or skipped."""

import contextlib
import dataclasses
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax.interop.torch.compiling import CompiledMethod, abstract_array
from diffusax.interop.torch.environment import is_traced, unwrap, wrap
from diffusax.interop.torch.session import Iteration, NotUniform, Session, columns, running
from diffusax.interop.torch.structures import Structure, flatten, rebuild
from diffusax.interop.torch.tensors import to_array, to_tensor

_BEFORE_THE_LOOP = ("text_encoder", "image_encoder", "vae", "movq", "vqvae", "tokenizer")
"""The names of components that no loop runs."""


class Done(BaseException):
    """The exception that ends a pass; pipelines that catch errors do not catch it."""


@dataclasses.dataclass
class Run:
    """The record of a loop in a call.

    components: the networks that it calls. tape: the results of networks before it. model: one of
    its iterations. columns: the inputs of its networks and operations, with one row for each step
    where they change. sample: its first latents. options: arguments of the scheduler's step. asked:
    arguments of set_timesteps.
    """

    components: dict[str, CompiledMethod]
    tape: list[Any]
    model: Iteration
    columns: list[Any] = dataclasses.field(default_factory=list)
    sample: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    timesteps: list[float] = dataclasses.field(default_factory=list)
    asked: dict[str, Any] = dataclasses.field(default_factory=dict)


class Pass(Session):
    """A pass through a call. `tape` holds the results of networks before the loop."""

    def __init__(self, tape: list[Any], lift: Callable[[Iteration, np.ndarray], Any]):
        super().__init__(lift)
        self.tape, self._played, self.steps = tape, 0, 0
        self.has_timesteps, self.asked = False, cast("dict[str, Any]", {})

    def call(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns a compiled method's result."""
        if not self._is_in_loop(method) and not any(map(self.depends, leaves)):
            return self.outside(method, leaves, structure)
        self.calls += 1
        return self.inside(method, leaves, structure, (method.component.name, self.calls))

    def _is_in_loop(self, method: CompiledMethod) -> bool:
        name = method.component.name
        return self.has_timesteps and not self.ended and not name.startswith(_BEFORE_THE_LOOP)

    @property
    def ended(self) -> bool:
        """Whether the loop is over."""
        return False

    def depends(self, leaf: Any) -> bool:
        """Returns whether a tensor was computed from the latents."""
        return is_traced(leaf)

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns the result of a network outside the loop, from the tape or computed and kept."""
        if self._played == len(self.tape):
            with self.network(), jax.ensure_compile_time_eval():
                self.tape.append(method.run(leaves, structure))
        self._played += 1
        kept, around = flatten(self.tape[self._played - 1])
        return rebuild(around, (leaf.clone() for leaf in kept))

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Returns the result of a network in the loop."""
        raise NotUniform(f"{place} is called")

    def abstract(
        self, method: CompiledMethod, structure: Structure, arrays: list[Any]
    ) -> tuple[list[Any], Structure]:
        """Returns the shapes of a network's results.

        Random numbers are not allowed, since they would be the same in each row.
        """
        with self.network(draws=False):
            return method.abstract(structure, arrays)

    def zeros(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns zeros on the host in the place of a network's results."""
        arrays = [abstract_array(leaf) for leaf in leaves]
        shapes, around = self.abstract(method, structure, arrays)
        return rebuild(around, (to_tensor(np.zeros(x.shape, x.dtype)) for x in shapes))

    def scale(self, sample: Any, timestep: Any = None) -> Any:
        """Replaces the scheduler's scale_model_input."""
        return sample


class Recording(Pass):
    """The first pass, which records the loop."""

    def __init__(self) -> None:
        super().__init__([], lambda now, array: jnp.asarray(array))
        self.first: dict[Any, np.ndarray] = {}
        self.timesteps: list[float] = []
        self.components: dict[str, CompiledMethod] = {}
        self.sample: Any = None
        self.options: dict[str, Any] = {}
        self._latents: Any = None

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns a result as `Pass.outside` does; after the loop it ends the pass."""
        if self.steps:
            raise Done
        return super().outside(method, leaves, structure)

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Returns zeros of the result's shapes."""
        if method.name == "decode":
            raise Done
        self.components[method.component.name] = method
        if not self.steps:
            self.first |= {(*place, p): to_array(leaf) for p, leaf in enumerate(leaves)}
            return self.zeros(method, leaves, structure)
        arrays = [
            unwrap(leaf) if is_traced(leaf) else self.lift(leaf, (*place, p))
            for p, leaf in enumerate(leaves)
        ]
        shapes, around = self.abstract(method, structure, arrays)
        self.operation("network", (place, structure))
        return rebuild(around, (wrap(jnp.zeros(x.shape, x.dtype)) for x in shapes))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Replaces the scheduler's step; returns traced latents."""
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
        return stepped(self._latents, kwargs)

    def run(self) -> Run:
        """Returns the record of the loop.

        Raises:
            NotUniform: the iterations do different things.
        """
        finished = self.iterations[1 : self.steps]
        given = columns(finished, self.first)
        found = Run(self.components, self.tape, finished[0], given, self.sample, self.options)
        found.timesteps, found.asked = self.timesteps, self.asked
        return found


class Tracing(Pass):
    """A pass while the program is traced: one iteration, as the model of the sampler."""

    def __init__(self, tape: list[Any], x: jax.Array, scale: Any, lifted: Any, states: Any):
        arrays = iter(lifted)
        super().__init__(tape, lambda now, array: next(arrays))
        self.x, self.in_scale, self.states = x, scale, states
        self.output: Any = None

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Returns the network's own result; before the first step, zeros."""
        if not self.steps:
            return self.zeros(method, leaves, structure)
        arrays = [unwrap(x) if is_traced(x) else self.lift(x) for x in leaves]
        with self.network():
            return method.inline(structure, arrays, self.states[method.component.name])

    def scale(self, sample: Any, timestep: Any = None) -> Any:
        """Applies the sampler's scale to the networks' input."""
        if not is_traced(sample):
            return sample
        return wrap((unwrap(sample) * self.in_scale).astype(unwrap(sample).dtype))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the latents, and takes the prediction that is computed from them."""
        if self.steps:
            self.output = unwrap(output)
            raise Done
        self.steps += 1
        self.begin()
        return stepped(wrap(self.x), kwargs)


class Finishing(Pass):
    """The last pass, whose loop is skipped."""

    def __init__(self, recording: Recording, compute: Callable[[], torch.Tensor]):
        super().__init__(recording.tape, lambda now, array: array)
        self._recording, self._compute = recording, compute

    @property
    def ended(self) -> bool:
        """Whether the loop is over."""
        return self.steps == self._recording.steps

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns a result as `Pass.outside` does; networks after the loop run as usual."""
        if self.ended:
            with self.network():
                return method.run(leaves, structure)
        return super().outside(method, leaves, structure)

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Returns zeros in the place of the result."""
        return self.zeros(method, leaves, structure)

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns the program's latents in the first step; later ones leave them unchanged."""
        self.steps += 1
        return stepped(self._compute() if self.steps == 1 else sample, kwargs)


@contextlib.contextmanager
def going_through(pipe: Any, found: Any) -> Iterator[None]:
    """Replaces the methods of the pipeline's scheduler by those of a pass, inside the context."""
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


def stepped(latents: Any, options: dict[str, Any]) -> Any:
    if options.get("return_dict", True):
        return types.SimpleNamespace(prev_sample=latents)
    return (latents,)


def _is_same(left: Any, right: Any) -> bool:
    return unwrap(left) is unwrap(right)
