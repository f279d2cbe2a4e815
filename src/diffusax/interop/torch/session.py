"""Records the denoising loop of a pipeline's call, or replaces it."""

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
    """The loop cannot be one program; the message says why."""


@dataclasses.dataclass
class Iteration:
    """The operations of one iteration, between two calls of the scheduler's step.

    operations: names, shapes and settings of the operations on the latents, in order. lifted: the
    arrays of the host that took part, in order. places: for each of these arrays the component, the
    number of its call and the argument; None for arrays outside the networks.
    """

    operations: list[Any] = dataclasses.field(default_factory=list)
    lifted: list[np.ndarray] = dataclasses.field(default_factory=list)
    places: list[Any] = dataclasses.field(default_factory=list)


class Session:
    """A pass through a pipeline's call, in which the loop is watched or replaced."""

    def __init__(self, lift: Callable[[Iteration, np.ndarray], Any]):
        """Starts a pass. lift: traces an array of the host, given the iteration so far."""
        self.iterations = [Iteration()]
        self._lift, self._inside = lift, 0
        self.calls, self.draws = 0, True

    @property
    def now(self) -> Iteration:
        """The iteration that is running."""
        return self.iterations[-1]

    def begin(self) -> None:
        """Begins the next iteration."""
        self.iterations.append(Iteration())
        self.calls = 0

    @contextlib.contextmanager
    def network(self, *, draws: bool = True) -> Iterator[None]:
        """Marks, inside the context, that a network is traced, whose operations are not the loop's.

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
        """Whether operations belong to the loop itself."""
        return not self._inside

    def call(self, method: Any, leaves: list[Any], structure: Any) -> Any:
        """Returns the result of a compiled method that is called in the pass."""
        return method.run(leaves, structure)

    def lift(self, value: Any, place: Any = None) -> Any:
        """Returns the traced array for a tensor of the host."""
        array = to_array(value)
        found = self._lift(self.now, array)
        self.now.lifted.append(array)
        self.now.places.append(place)
        return found

    def operation(self, name: str, settings: Any) -> None:
        """Records an operation of the loop."""
        self.now.operations.append((name, settings))


def current() -> Session | None:
    """Returns the session of the call that is running."""
    found: Session | None = _CURRENT.get()
    return found


@contextlib.contextmanager
def running(session: Session) -> Iterator[Session]:
    """Makes the session current, inside the context, for compiled methods and traced tensors."""
    token = _CURRENT.set(session)
    try:
        yield session
    finally:
        _CURRENT.reset(token)


def takes_scale(name: str) -> bool:
    """Returns whether an operation multiplies by, or adds, a number that may be data."""
    base = name.split("::")[-1].split(".")[0].strip("_")
    return base in _SCALED or base.removeprefix("r") in _SCALED


def columns(iterations: Sequence[Iteration], first: dict[Any, np.ndarray]) -> list[Any]:
    """Returns the program's input for each lifted array: itself, or the values of all rows.

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
