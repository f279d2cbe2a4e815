"""Compiled programs within a bound: those whose shapes were not used for longest are let go.

On CPUs every program takes memory maps, of which Linux gives a process 65,530; XLA ends the process
when they are used up. Elsewhere a program's code takes the device's memory.
"""

import functools
import gc
import itertools
import logging
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from diffusax.runtime.memory import device_memory

log = logging.getLogger(__name__)

_MAPS = 1 / 2
"""The part of a process's memory maps that may be in use."""
_MEMORY = 1 / 16
"""The part of a device's memory that the programs' code may take."""
_BYTES = 2**30
"""The same where the device does not say how much memory it has."""
# Letting go of more than is needed keeps the search for what is oldest rare.
_ENOUGH = 3 / 4
_CLOCK = itertools.count()
_LOCK = threading.Lock()
_FUNCTIONS: "weakref.WeakSet[BoundedJit]" = weakref.WeakSet()


class _Shape:
    """The program of one shape, when it was last used, and what its code takes."""

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.used = next(_CLOCK)
        self.bytes = 0


class BoundedJit:
    """A jitted function with a program for each shape, which can be let go one by one.

    Calling a shape again whose program was let go compiles it again, or reads it from the
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
        """The jitted function.

        Args:
            function: of positional arguments.
            static_argnums: the arguments to specialise on, which must be hashable.
            uncounted: arguments of many leaves, such as parameters, whose shapes follow from the
                others'; nothing breaks where they do not, but their programs go together.
            **options: further ones of `jax.jit`.
        """
        functools.update_wrapper(self, function)
        self._function = function
        self._static = frozenset(static_argnums)
        self._uncounted = frozenset(uncounted)
        self._options = {**options, "static_argnums": tuple(static_argnums)}
        self.jitted: Any = jax.jit(function, **self._options)
        """All shapes together: for other functions' traces, and to be compiled ahead of time."""
        self._shapes: dict[Any, _Shape] = {}
        _FUNCTIONS.add(self)

    def __call__(self, *args: Any) -> Any:
        """The function's result."""
        return self.call(args)[0]

    def call(self, args: tuple[Any, ...]) -> tuple[Any, bool]:
        """The function's result, and whether these shapes had no program yet."""
        key = self._key(args)
        shape = self._shapes.get(key)
        if shape is not None:
            shape.used = next(_CLOCK)
            return shape.jitted(*args), False
        if is_traced(args):
            return self.jitted(*args), False
        make_room()
        shape = _Shape(self._jit())
        if _counts_bytes():
            # The call finds what this compiles.
            shape.bytes = _code_bytes(shape.jitted.lower(*args).compile())
        result = shape.jitted(*args)
        with _LOCK:
            self._shapes[key] = shape
        return result, True

    def __len__(self) -> int:
        """How many shapes have a program."""
        return len(self._shapes)

    def _jit(self) -> Any:
        function = self._function

        # A function of its own: JAX keeps the programs of equal ones together.
        def call(*args: Any) -> Any:
            return function(*args)

        call.__name__ = call.__qualname__ = getattr(function, "__name__", "call")
        return jax.jit(call, **self._options)

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
    """Lets go of programs while they take more than their bound, the longest unused first.

    Where that is not enough, JAX's own caches are cleared, which hold the programs of all other
    jitted functions of the process.
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
    """Lets go of the programs of all shapes."""
    with _LOCK:
        for function in list(_FUNCTIONS):
            function._shapes.clear()


def _drop_oldest() -> int:
    """Lets go of a quarter of the programs, and says how many they were."""
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
    """What programs take, as a part of what they may take."""
    if not _counts_bytes():
        return memory_maps() / _map_limit()
    taken = sum(s.bytes for f in list(_FUNCTIONS) for s in list(f._shapes.values()))
    return taken / _byte_limit()


def _counts_bytes() -> bool:
    """Whether programs take a device's memory, and not this process's memory maps."""
    return jax.default_backend() != "cpu"


def _code_bytes(compiled: jax.stages.Compiled) -> int:
    memory: Any = compiled.memory_analysis()
    return getattr(memory, "generated_code_size_in_bytes", 0)


def memory_maps() -> int:
    """How many memory maps this process has; 0 where the system does not say."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@functools.cache
def _map_limit() -> float:
    """How many memory maps may be in use."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * _MAPS
    except (OSError, ValueError):
        return math.inf


@functools.cache
def _byte_limit() -> float:
    """How many bytes of a device's memory the code of programs may take."""
    memory = device_memory(jax.local_devices()[0])
    return _BYTES if memory is None else memory * _MEMORY


def _aval(leaf: Any) -> Any:
    return getattr(leaf, "shape", ()), getattr(leaf, "dtype", type(leaf))


def is_traced(tree: Any) -> bool:
    """Whether a function that JAX traces has given some of these arguments."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))
