"""A pass on the host that checks that a pipeline's loop does the same as its recording.

Recording a loop with traced latents takes longer than everything else that a call does on the host.
After that a loop is only watched: its latents, and all tensors that are computed from them, are
zeros of a tensor class that notes each operation. If the notes are those of the recording, with the
same settings, numbers and tensors, the loop does the same, and only the inputs of its networks are
taken from the call.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from diffusax.interop.torch.compat import plain_tensors
from diffusax.interop.torch.compiling import CompiledMethod
from diffusax.interop.torch.passes import Pass, Run, stepped
from diffusax.interop.torch.session import Iteration, NotUniform, columns, current
from diffusax.interop.torch.structures import Structure, fix, flatten, rebuild
from diffusax.interop.torch.tensors import to_array

_READS = frozenset(
    ("__bool__", "__float__", "__index__", "__int__", "item", "numpy", "tolist", "__array__")
)


class Unlike(Exception):
    """The error of a loop that differs from the recorded one."""


class Watched(torch.Tensor):
    """A tensor that depends on the latents; its values are not used."""

    mark: tuple[int, int]
    """The iteration in which the tensor was made, and its number in that iteration."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Records an operation."""
        session, name = current(), func.__name__
        if not isinstance(session, Watching) or not session.watches or name == "__get__":
            return super().__torch_function__(func, types, args, kwargs or {})
        if name in _READS:
            raise Unlike("its values are read")
        noted = session.noted(args, kwargs)
        found = super().__torch_function__(func, types, args, kwargs or {})
        session.now.operations.append((name, noted))
        session.mark(found)
        return found


@dataclasses.dataclass
class Known:
    """The record of a loop, and the notes of watching it.

    model: an iteration of the recording. components: the networks that it calls. watched: the notes
    of an iteration; None before the first time. columns: the program's inputs in the recording;
    None where another call's are not to be compared.
    """

    model: Iteration
    components: dict[str, CompiledMethod]
    watched: list[Any] | None = None
    columns: list[Any] | None = None


class Watching(Pass):
    """A whole call, whose loop is watched; its last step returns the program's latents."""

    def __init__(
        self,
        known: Known,
        tape: list[Any],
        timesteps: Callable[[], torch.Tensor],
        states: Callable[[], list[Any]],
        compute: Callable[[Run], torch.Tensor],
    ):
        """Starts a pass. timesteps: returns the scheduler's. states: returns the generators'."""
        super().__init__(tape, lambda now, array: array)
        self._known, self._timesteps, self._states = known, timesteps, states
        self._compute = compute
        self._given: list[dict[Any, np.ndarray]] = [{}]
        self._run = Run(known.components, self.tape, known.model)
        self._latents: Any = None
        self._made, self._over = 0, False
        self._outlines: dict[Any, Any] = {}

    @property
    def ended(self) -> bool:
        """Whether the loop is over."""
        return self._over

    def depends(self, leaf: Any) -> bool:
        """Returns whether a tensor was computed from the latents."""
        return isinstance(leaf, Watched)

    def begin(self) -> None:
        """Begins the next iteration."""
        super().begin()
        self._given.append({})
        self._made = 0

    def mark(self, value: Any) -> Any:
        """Numbers the tensors in the result of an operation."""
        for leaf in flatten(value)[0]:
            if isinstance(leaf, Watched):
                leaf.mark = (len(self.iterations), self._made)
                self._made += 1
        return value

    def noted(self, args: Any, kwargs: Any = None) -> Any:
        """Returns the arguments of an operation, with numbers for tensors of the latents."""
        leaves, structure = flatten((args, kwargs or {}))
        watched, fixed = fix(structure, leaves, lambda leaf: not self.depends(leaf))
        return fixed, tuple(self._number(leaf) for leaf in watched)

    def _number(self, leaf: Watched) -> tuple[int, torch.Size, torch.dtype]:
        iteration, number = leaf.mark
        if iteration != len(self.iterations):
            raise NotUniform("something is carried from one iteration to the next")
        with plain_tensors():
            return number, leaf.shape, leaf.dtype

    def outside(self, method: CompiledMethod, leaves: list[Any], structure: Structure) -> Any:
        """Returns the result of a network outside the loop."""
        if any(map(self.depends, leaves)):
            raise Unlike("it ends before its last timestep")
        if not self.ended:
            return super().outside(method, leaves, structure)
        with self.network():
            return method.run(leaves, structure)

    def inside(
        self, method: CompiledMethod, leaves: list[Any], structure: Structure, place: Any
    ) -> Any:
        """Returns zeros in the place of a network's results."""
        marks: list[Any] = []
        for p, leaf in enumerate(leaves):
            if self.depends(leaf):
                marks.append(self._number(leaf))
            else:
                array = self._given[-1][*place, p] = to_array(leaf)
                marks.append((-1, array.shape, array.dtype))
        self.now.operations.append((place, method.name, structure, tuple(marks)))
        outline = method, structure, tuple(mark[1:] for mark in marks)
        if outline not in self._outlines:
            with plain_tensors():
                arrays = [_plain(leaf) for leaf in leaves]
                self._outlines[outline] = flatten(self.zeros(method, arrays, structure))
        zeros, around = self._outlines[outline]
        return self.mark(rebuild(around, (_watched(torch.zeros_like(x)) for x in zeros)))

    def step(self, output: Any, timestep: Any, sample: Any, *args: Any, **kwargs: Any) -> Any:
        """Returns zeros as latents, and in the last step the program's latents."""
        if self.ended:
            raise Unlike("it goes on after its last timestep")
        run = self._run
        if self.steps == 0:
            run.sample, run.options, self._first_states = sample, kwargs, self._states()
        elif not (isinstance(output, Watched) and sample is self._latents):
            raise Unlike("the latents are changed between its steps")
        else:
            self.now.operations.append(("step", self._number(output)))
        run.timesteps.append(float(timestep))
        self.steps += 1
        if self._is_last():
            return stepped(self._computed(), kwargs)
        self.begin()
        self._latents = self.mark(_watched(torch.zeros_like(run.sample)))
        return stepped(self._latents, kwargs)

    def _is_last(self) -> bool:
        timesteps, found = self._timesteps().numpy(), self._run.timesteps
        begin = int(np.argmax(np.isclose(timesteps, found[0], rtol=1e-5)))
        return begin + len(found) >= len(timesteps)

    def _computed(self) -> torch.Tensor:
        known, run = self._known, self._run
        if any(not torch.equal(x, y) for x, y in zip(self._first_states, self._states())):
            raise Unlike("random numbers are drawn in it")
        finished = self.iterations[1:]
        watched = known.watched if known.watched is not None else self.iterations[-1].operations
        if not finished or any(x.operations != watched for x in finished):
            raise Unlike("its iterations do something else")
        rows = [self._row(given) for given in self._given[1:]]
        run.asked, run.columns = self.asked, columns(rows, self._given[0])
        if known.columns is not None and not all(map(np.array_equal, run.columns, known.columns)):
            raise Unlike("its networks are given something else")
        known.watched, known.columns = watched, None
        self._over = True
        return self._compute(run)

    def _row(self, given: dict[Any, np.ndarray]) -> Iteration:
        """Returns an iteration in the form of the recording."""
        model = self._known.model
        places = [place for place in model.places if place is not None]
        if len(given) != len(set(places)) or any(place not in given for place in places):
            raise Unlike("its networks are given others")
        lifted = [x if p is None else given[p] for x, p in zip(model.lifted, model.places)]
        return Iteration(model.operations, lifted, model.places)


def _watched(tensor: torch.Tensor) -> Watched:
    return tensor.as_subclass(Watched)


def _plain(tensor: Any) -> Any:
    return tensor.as_subclass(torch.Tensor) if isinstance(tensor, Watched) else tensor


def outline(args: Any, kwargs: dict[str, Any]) -> Any:
    """Returns a hashable key that is equal for calls that may do the same.

    Texts, objects and the number of steps may differ; watching checks whether the calls do the
    same.
    """
    given = {k: v for k, v in kwargs.items() if k != "num_inference_steps"}
    return _outline(flatten((args, given))[1])


def _outline(structure: Any) -> Any:
    if hasattr(structure, "children"):
        return structure.kind, structure.names, tuple(map(_outline, structure.children))
    value = getattr(structure, "value", None)
    return structure if isinstance(value, bool | int | float) else type(value)
