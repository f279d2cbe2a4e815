"""What a pipeline's call does, seen from inside: its denoising loop, recorded and replaced."""

import contextlib
import contextvars
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from diffusax.interop.torch.tensors import to_array

_CURRENT: contextvars.ContextVar[Any] = contextvars.ContextVar("session", default=None)
_SCALED = frozenset(("add", "mul", "sub", "div", "truediv", "multiply", "subtract"))


class NotUniform(Exception):
    """The loop cannot be one program; says why."""


@dataclasses.dataclass
class Iteration:
    """What one iteration did between two calls of the scheduler's step.

    operations: names, shapes and settings of what was computed from the latents, in order.
    lifted: the arrays of the host that took part, in order.
    places: for each of these the component, the number of its call and the argument that it was;
        None for what took part outside the networks.
    """

    operations: list[Any] = dataclasses.field(default_factory=list)
    lifted: list[np.ndarray] = dataclasses.field(default_factory=list)
    places: list[Any] = dataclasses.field(default_factory=list)


class Session:
    """A pass through a pipeline's call, in which the loop is watched or replaced."""

    def __init__(self, lift: Callable[[Iteration, np.ndarray], Any]):
        """lift: makes the traced array for an array of the host, given what came before."""
        self.iterations = [Iteration()]
        self._lift, self._inside = lift, 0
        self.calls, self.draws = 0, True

    @property
    def now(self) -> Iteration:
        """The iteration that is running."""
        return self.iterations[-1]

    def begin(self) -> None:
        """The next iteration."""
        self.iterations.append(Iteration())
        self.calls = 0

    @contextlib.contextmanager
    def network(self, *, draws: bool = True) -> Iterator[None]:
        """Inside, a network is traced, whose own operations and tables are not the loop's.

        draws: whether it may draw random numbers of its own.
        """
        before, self.draws = self.draws, draws
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1
            self.draws = before

    @property
    def watches(self) -> bool:
        """Whether operations are the loop's own."""
        return not self._inside

    def call(self, method: Any, leaves: list[Any], structure: Any) -> Any:
        """The result of a compiled method that is called in the pass."""
        return method.run(leaves, structure)

    def lift(self, value: Any, place: Any = None) -> Any:
        """The traced array for a tensor of the host."""
        array = to_array(value)
        found = self._lift(self.now, array)
        self.now.lifted.append(array)
        self.now.places.append(place)
        return found

    def operation(self, name: str, settings: Any) -> None:
        """Notes an operation of the loop."""
        self.now.operations.append((name, settings))


def current() -> Session | None:
    """The session of the call that is running."""
    found: Session | None = _CURRENT.get()
    return found


@contextlib.contextmanager
def running(session: Session) -> Iterator[Session]:
    """Inside, calls of compiled methods and operations on traced tensors belong to the session."""
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


def takes_scale(name: str) -> bool:
    """Whether an operation multiplies by, or adds, a number that may be data."""
    base = name.split("::")[-1].split(".")[0].strip("_")
    return base in _SCALED or base.removeprefix("r") in _SCALED


def columns(iterations: Sequence[Iteration], first: dict[Any, np.ndarray]) -> list[Any]:
    """For each lifted array what the program is given: itself, or the values of all rows.

    Args:
        iterations: all but the first.
        first: the arguments of networks in the first iteration, by place.

    Raises:
        NotUniform: the iterations do different things.
    """
    model = iterations[0]
    for other in iterations[1:]:
        same = other.operations == model.operations and other.places == model.places
        if not same or [x.shape for x in other.lifted] != [x.shape for x in model.lifted]:
            raise NotUniform("its iterations do different things")
    given = []
    for j, place in enumerate(model.places):
        values = [iteration.lifted[j] for iteration in iterations]
        before = [first[place]] if place in first else []
        if all(x is values[0] or np.array_equal(x, values[0]) for x in [*before, *values[1:]]):
            given.append(values[0])
        elif not before or values[0].size > 2**14:
            raise NotUniform("something but the networks' arguments changes in it")
        else:
            given.append(np.stack([*before, *values]))
    return given
