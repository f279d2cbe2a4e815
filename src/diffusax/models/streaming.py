"""Parameters in the host's memory, which a program copies to the device one block ahead.

A network whose parameters lie in the host's memory is traced twice: once to learn the order in
which its blocks read them, and once to begin each copy a block before. The copy for a block's n-th
layer begins when the block before has computed its layer n - 1, and XLA's schedulers run it beside
the layers that follow, so that the device holds the parameters of about one block. Unbound, the
GPU's compiler would begin all copies with the step, and hold the whole network; bound to the
beginning of the block before, it would wait for most of them there, as it runs two at a time.
"""

import contextlib
import contextvars
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from diffusax.models.shared import shared
from diffusax.runtime.devices.host import in_host_memory

_STREAM: contextvars.ContextVar["_Stream | None"] = contextvars.ContextVar("stream", default=None)
_Path = tuple[Any, ...]


@dataclasses.dataclass
class _Block:
    """What happens while a block is traced."""

    events: list[int] = dataclasses.field(default_factory=list)
    """The numbers of its events: its beginning, and each layer's result."""
    reads: list[_Path] = dataclasses.field(default_factory=list)
    """The parameters that it reads, in order."""


class _Stream:
    """The events of a network that is being traced, by blocks.

    What comes before the first block counts as one.
    """

    def __init__(
        self,
        starts: Mapping[int, Sequence[_Path]] | None = None,
        values: dict[_Path, Any] | None = None,
    ):
        """Begins to trace; without arguments, to learn the order.

        Args:
            starts: the parameters whose copies begin with an event.
            values: the parameters in the host's memory.
        """
        self.blocks = [_Block()]
        self.first: Any = None
        """The input of the block that is being traced."""
        self.starts = starts or {}
        self.values = {} if values is None else values
        self.copies: dict[_Path, Any] = {}
        """Those on the device."""
        self.count = 0

    def begin(self, args: Any) -> Any:
        """Begins a block, and returns its arguments.

        One that stands first in another, with the same input, goes with it.
        """
        leaves, tree = jax.tree.flatten(args)
        place = next((i for i, x in enumerate(leaves) if isinstance(x, jax.Array)), None)
        if place is None or leaves[place] is self.first:
            return args
        if self.first is not None:
            self.blocks.append(_Block())
        self.first = leaves[place] = self.event(leaves[place])
        return jax.tree.unflatten(tree, leaves)

    def event(self, y: jax.Array) -> jax.Array:
        """Returns an array, after which copies begin.

        XLA forgets the order unless both are read of what it returns.
        """
        paths = self.starts.get(self.count, ())
        self.blocks[-1].events.append(self.count)
        self.count += 1
        wanted = {path: self.values[path] for path in paths if path not in self.copies}
        if wanted:
            y, wanted = jax.lax.optimization_barrier((y, wanted))
            self.copies |= {path: _copied(value) for path, value in wanted.items()}
        return y

    def read(self, path: _Path, value: Any) -> Any:
        """Returns a parameter on the device."""
        self.values[path] = value
        if path not in self.blocks[-1].reads:
            self.blocks[-1].reads.append(path)
        if path not in self.copies:
            self.copies[path] = _copied(value)
        return self.copies[path]

    def plan(self) -> dict[int, list[_Path]]:
        """Returns the parameters whose copies begin with each event, a block before their layer."""
        starts: dict[int, list[_Path]] = {}
        for before, block in itertools.pairwise([_Block([0]), *self.blocks]):
            for i, path in enumerate(block.reads):
                event = before.events[min(i, len(before.events) - 1)]
                starts.setdefault(event, []).append(path)
        return starts


def ordered(run: Callable[[], Any]) -> Any:
    """Returns the result of a function, in which copies begin a block before they are read.

    It traces the function twice. In it blocks are `streamed`.
    """
    order = _Stream()

    def learn() -> Any:
        with _in_stream(order):
            return run()

    jax.eval_shape(learn)
    with _in_stream(_Stream(order.plan(), order.values)):
        return run()


def reordered(run: Callable[[], Any]) -> Any:
    """Does the same in a part that is traced apart, such as a branch, of what is `ordered`."""
    return run() if _STREAM.get() is None else ordered(run)


def stream_parameters(module: Any) -> None:
    """Lets the layers of a module copy those of their parameters that lie in the host's memory."""
    for path, variable in nnx.iter_graph(module):
        if isinstance(variable, nnx.Variable) and in_host_memory(variable.get_raw_value()):
            variable.set_metadata("on_get_value", functools.partial(_read, path))


def streamed(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a block, or a function that calls one, as a network calls it; others may be within.

    Its first array should be what the block before returns. Blocks of one form share their trace
    where they copy nothing, see `shared`.
    """
    together = shared(block)

    def call(*args: Any) -> Any:
        stream = _STREAM.get()
        return together(*args) if stream is None else block(*stream.begin(args))

    return call


def unordered() -> contextlib.AbstractContextManager[None]:
    """Copies parameters where they are read, as in a function that is traced apart."""
    return _in_stream(None)


def computed(y: jax.Array) -> jax.Array:
    """Returns what a layer has computed, after which copies for the next block may begin."""
    stream = _STREAM.get()
    return y if stream is None else stream.event(y)


@contextlib.contextmanager
def _in_stream(stream: _Stream | None) -> Iterator[None]:
    token = _STREAM.set(stream)
    try:
        yield
    finally:
        _STREAM.reset(token)


def _read(path: _Path, variable: Any, value: Any) -> Any:
    stream = _STREAM.get()
    return _copied(value) if stream is None else stream.read(path, value)


def _copied(value: Any) -> Any:
    return jax.device_put(value, jax.memory.Space.Device)
