"""Limits the number of compiled programs: those unused for longest are released.

On CPUs every program takes memory maps, of which Linux gives a process 65,530; XLA ends the process
when they are used up. Elsewhere a program's code takes the device's memory.
"""

import contextlib
import contextvars
import functools
import gc
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from diffusax.runtime.compat import is_tracing
from diffusax.runtime.devices.lowering import compiler_options
from diffusax.runtime.devices.memory import device_memory
from diffusax.runtime.programs.cache import check_compilation_cache

log = logging.getLogger(__name__)

_MAPS = 1 / 2
"""The part of a process's memory maps that may be in use."""
_MEMORY = 1 / 16
"""The part of a device's memory that the programs' code may take."""
_BYTES = 2**30
"""The number of bytes, if the device does not tell how much memory it has."""
# Releasing more than is needed makes the search for the oldest rare.
_ENOUGH = 3 / 4
_CLOCK = itertools.count()
_LOCK = threading.Lock()
_FUNCTIONS: "weakref.WeakSet[BoundedJit]" = weakref.WeakSet()

_WATCHER: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar(
    "watcher", default=None
)


@contextlib.contextmanager
def watched_compilations(watcher: Callable[[], None]) -> Iterator[None]:
    """Calls a function before each program that this thread compiles inside the context."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


class _Shape:
    """The program of one shape, the time of its last use, and the size of its code."""

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.used = next(_CLOCK)
        self.bytes = 0


class BoundedJit:
    """A jitted function whose programs, one for each shape, can be released one by one.

    If the program of a shape was released, the next call compiles it again, or reads it from the
    compilation cache.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static_argnums: Sequence[int] = (),
        uncounted: Sequence[int] = (),
        **options: Any,
    ):
        """Jits the function.

        Args:
            function: a function of positional arguments.
            static_argnums: the arguments to specialise on, which must be hashable.
            uncounted: arguments of many leaves, such as parameters, whose shapes follow from those
                of the others; if they do not, their programs are released together.
            **options: further options of `jax.jit`.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._static = frozenset(static_argnums)
        self._uncounted = frozenset(uncounted)
        self._options = {**options, "static_argnums": tuple(static_argnums)}
        self.jitted: Any = jax.jit(function, **self._options)
        """The function for all shapes, for other functions' traces and for ahead-of-time
        compilation.
        """
        self._shapes: dict[Any, _Shape] = {}
        _FUNCTIONS.add(self)

    def __call__(self, *args: Any) -> Any:
        """Returns the function's result."""
        return self.call(args)[0]

    def call(self, args: tuple[Any, ...]) -> tuple[Any, bool]:
        """Returns the function's result, and whether these shapes had no program yet."""
        if is_tracing():
            # Programs with options of their own cannot be part of another.
            return self.jitted(*args), False
        key = self._key(args)
        shape = self._shapes.get(key)
        if shape is not None:
            shape.used = next(_CLOCK)
            return shape.jitted(*args), False
        if (watcher := _WATCHER.get()) is not None:
            watcher()
        make_room()
        check_compilation_cache()
        shape = _Shape(self._jit())
        if _counts_bytes():
            # The call uses the program that this compiles.
            shape.bytes = _code_bytes(shape.jitted.lower(*args).compile())
        result = shape.jitted(*args)
        with _LOCK:
            self._shapes[key] = shape
        return result, True

    def __len__(self) -> int:
        """Returns the number of shapes that have a program."""
        return len(self._shapes)

    def _jit(self) -> Any:
        function = self._function

        # Each shape gets its own function: JAX keeps the programs of equal functions together.
        def call(*args: Any) -> Any:
            return function(*args)

        call.__name__ = call.__qualname__ = getattr(function, "__name__", "call")
        return jax.jit(call, compiler_options=compiler_options() or None, **self._options)

    def _key(self, args: tuple[Any, ...]) -> Any:
        parts: list[Any] = []
        for i, arg in enumerate(args):
            if i in self._static:
                parts.append(arg)
            elif i in self._uncounted:
                leaf = next(iter(jax.tree.leaves(arg)), None)
                parts.append(getattr(leaf, "dtype", None))
            else:
                leaves, tree = jax.tree.flatten(arg)
                parts.append((tree, *[_aval(leaf) for leaf in leaves]))
        return tuple(parts)


def make_room() -> None:
    """Releases programs while they take more than their limit, the longest unused first.

    If that is not enough, it clears JAX's own caches, which hold the programs of all other jitted
    functions of the process.
    """
    if _fullness() <= 1:
        return
    dropped = 0
    while _fullness() > _ENOUGH and (count := _drop_oldest()):
        dropped += count
        gc.collect()
    log.info("let go of the programs of %d shapes, which were not used for longest", dropped)
    if _fullness() > 1:
        jax.clear_caches()
        gc.collect()
        log.info("cleared all of JAX's caches of compiled programs")


def forget_shapes() -> None:
    """Releases the programs of all shapes."""
    with _LOCK:
        for function in list(_FUNCTIONS):
            function._shapes.clear()


def _drop_oldest() -> int:
    """Releases a quarter of the programs, and returns their number."""
    with _LOCK:
        found = [
            (shape.used, function, key)
            for function in list(_FUNCTIONS)
            for key, shape in function._shapes.items()
        ]
        found.sort(key=lambda entry: entry[0])
        oldest = found[: math.ceil(len(found) / 4)]
        for _, function, key in oldest:
            del function._shapes[key]
    return len(oldest)


def _fullness() -> float:
    """Returns what programs take, as a part of their limit."""
    if not _counts_bytes():
        return memory_maps() / _map_limit()
    taken = sum(s.bytes for f in list(_FUNCTIONS) for s in list(f._shapes.values()))
    return taken / _byte_limit()


def _counts_bytes() -> bool:
    """Returns whether programs take a device's memory, and not this process's memory maps."""
    return jax.default_backend() != "cpu"


def _code_bytes(compiled: jax.stages.Compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return getattr(memory, "generated_code_size_in_bytes", 0)


def memory_maps() -> int:
    """Returns the number of this process's memory maps; 0 if the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@functools.cache
def _map_limit() -> float:
    """Returns the number of memory maps that may be in use."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * _MAPS
    except (OSError, ValueError):
        return math.inf


@functools.cache
def _byte_limit() -> float:
    """Returns the number of bytes of a device's memory that the code of programs may take."""
    memory = device_memory(jax.local_devices()[0])
    return _BYTES if memory is None else memory * _MEMORY


def _aval(leaf: Any) -> Any:
    return getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))


def check_untraced(given: Mapping[str, Any], instead: str) -> None:
    """Raises an error for values that jit, grad, vmap or scan trace where numbers are needed.

    given: the values by the arguments' names. instead: what can be traced, for the error.

    Raises:
        ValueError: a value is, or holds, a tracer; names it.
    """
    for name, value in given.items():
        if is_traced(value):
            raise ValueError(
                f"{name} is traced by jit, grad, vmap or scan (got {value!s:.80}) and must be "
                f"known when a function is traced; {instead}"
            )


def is_traced(tree: Any) -> bool:
    """Returns whether some of these arguments are tracers of a function that JAX is tracing."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
