"""Functions that are compiled for each shape of their arguments, and the programs made of them."""

import contextlib
import contextvars
import functools
import hashlib
import inspect
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding, SingleDeviceSharding

from diffusax.runtime.compat import is_tracing
from diffusax.runtime.devices.host import KIND, in_host_memory
from diffusax.runtime.devices.layouts import ORDERS, order_of
from diffusax.runtime.devices.lowering import (
    Int8Activations,
    compiler_options,
    int8_choice,
    lowering_for,
    platform_for,
    platform_of,
)
from diffusax.runtime.programs import room
from diffusax.runtime.programs.cache import check_compilation_cache
from diffusax.runtime.programs.flops import Work, count_work
from diffusax.runtime.switches import in_mesh

log = logging.getLogger(__name__)

PROGRAMS: dict[str, "Program"] = {}
"""The programs that can be compiled ahead of time and saved, by name."""

_STRIDE = 7
"""Every so many parameters one is looked at: kernels, scales and biases follow each other."""
_CLOCK = itertools.count()
_LOCK = threading.Lock()
_REQUESTS: contextvars.ContextVar[list["Request"] | None] = contextvars.ContextVar(
    "requests", default=None
)
_WATCHER: contextvars.ContextVar[Callable[[], None] | None] = contextvars.ContextVar(
    "watcher", default=None
)


class Request(NamedTuple):
    """A program and the arguments of a call, or their shapes."""

    program: "Program"
    static: tuple[tuple[str, Any], ...]
    """The static arguments, on which the program is specialised, by name."""
    dynamic: tuple[Any, ...]
    """The other arguments, as trees of shapes or of arrays."""


class Shape(NamedTuple):
    """What is equal for the calls of a program that JAX compiles together."""

    platform: str
    static: tuple[tuple[str, Any], ...]
    arrays: tuple[Any, ...]
    """The shapes and dtypes of the arguments; of parameters their number, the first one's dtype
    and whether some lie in the host's memory."""
    int8: Int8Activations = "auto"
    """See `int8_activations`."""


class Key(NamedTuple):
    """What is equal for the calls of a program that can use one executable."""

    name: str
    shape: Shape
    arrays: tuple[Any, ...]
    """The shapes and dtypes of all arrays, their devices, and their order in memory."""


class Executable(NamedTuple):
    """What was compiled before a call, or loaded."""

    compiled: jax.stages.Compiled
    request: Request | None = None
    """What it was compiled for, if it can be saved."""
    mesh: Mesh | None = None


class _Compiled:
    """What a program's calls of one shape use: an executable by their key, or what JAX compiles."""

    def __init__(self) -> None:
        self.executables: dict[Key, Executable] = {}
        self.jitted: Any = None
        self.used, self.bytes = 0, 0
        """The time of the last use, and the size of the code, of what JAX has compiled."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there that a call could use."""
        return self.jitted is None and not self.executables


class Program:
    """A function, and the programs that were made of it, one for each shape of its arguments.

    A call uses the executable that was compiled ahead of time or loaded, if there is one. Otherwise
    JAX compiles the function, or reads it from the compilation cache, and later calls use what it
    has compiled, until `make_room` releases it. Inside another trace the function is traced.
    """

    __wrapped__: Callable[..., Any]
    """The function itself."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        uncounted: Sequence[str] = ("params",),
        shape_of: str = "",
        **options: Any,
    ):
        """Makes the program of a function.

        Args:
            function: a function of arrays, trees of arrays, and static arguments.
            static: the arguments to specialise on, which must be hashable.
            donate: the arguments whose memory the result may use.
            uncounted: arguments of many leaves, whose shapes follow from those of the others; if
                they do not, the programs that JAX has compiled for them are released together.
            shape_of: the argument whose shape the log names, for a program that can be compiled
                ahead of time and saved.
            **options: further options of `jax.jit`.
        """
        functools.update_wrapper(self, function)
        self.name = getattr(function, "__name__", "call")
        self.signature = inspect.signature(function)
        self.static = tuple(static)
        self.dynamic = tuple(n for n in self.signature.parameters if n not in static)
        self.uncounted = frozenset(uncounted)
        self.shape_of = shape_of
        self._cache: dict[Shape, _Compiled] = {}
        donated = [1 + self.dynamic.index(name) for name in donate]
        self._options = {"static_argnums": 0, "donate_argnums": donated, **options}
        self._function = function
        self._any_shape = self._jit()
        room.ALL.add(self)
        if shape_of:
            PROGRAMS[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result."""
        return self.call(self.request(*args, **kwargs))[0]

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """Returns the request of a call with these arguments."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        value_of = bound.arguments.__getitem__
        static = tuple(zip(self.static, map(value_of, self.static)))
        return Request(self, static, tuple(map(value_of, self.dynamic)))

    def call(self, request: Request) -> tuple[Any, bool]:
        """Returns the function's result, and whether JAX had to compile it for these shapes."""
        found = _REQUESTS.get()
        if found is not None and self.shape_of:
            found.append(request)
            return self._unrecorded(request), False
        if is_tracing():
            # Programs with options of their own cannot be part of another.
            return self._any_shape(request.static, *request.dynamic), False
        shape = call_shape(request)
        compiled = self._cache.get(shape)
        if compiled is not None and compiled.executables:
            executable = compiled.executables.get(key(request, shape))
            if executable is not None:
                return executable.compiled(*request.dynamic), False
        with lowering_for([shape.platform]):
            if compiled is None or compiled.jitted is None:
                return self._first_call(request, shape), True
            compiled.used = next(_CLOCK)
            return compiled.jitted(request.static, *request.dynamic), False

    @property
    def executables(self) -> dict[Key, Executable]:
        """What was compiled ahead of time, or loaded, by key."""
        with _LOCK:
            found = [compiled.executables.items() for compiled in self._cache.values()]
            return dict(itertools.chain.from_iterable(found))

    def keep(self, request_key: Key, executable: Executable) -> None:
        """Lets calls with this key use an executable."""
        with _LOCK:
            compiled = self._cache.setdefault(request_key.shape, _Compiled())
            compiled.executables[request_key] = executable

    def forget(self, request_key: Key) -> None:
        """Releases the executable with this key, if there is one."""
        with _LOCK:
            compiled = self._cache.get(request_key.shape)
            if compiled is None:
                return
            compiled.executables.pop(request_key, None)
            if compiled.is_empty:
                del self._cache[request_key.shape]

    def forget_all(self) -> None:
        """Releases all executables, and all that JAX has compiled for calls."""
        with _LOCK:
            self._cache.clear()

    @property
    def compiled_shapes(self) -> int:
        """The number of shapes for which JAX has compiled the program in a call."""
        return sum(compiled.jitted is not None for compiled in list(self._cache.values()))

    def uses(self) -> list[tuple[Shape, int, int]]:
        """Returns the shapes that JAX has compiled, with the time of the last use and the bytes."""
        with _LOCK:
            found = self._cache.items()
            return [(shape, c.used, c.bytes) for shape, c in found if c.jitted is not None]

    def release(self, shape: Shape) -> None:
        """Releases what JAX has compiled for calls of this shape."""
        with _LOCK:
            compiled = self._cache.get(shape)
            if compiled is None:
                return
            compiled.jitted, compiled.bytes = None, 0
            if compiled.is_empty:
                del self._cache[shape]

    def _unrecorded(self, request: Request) -> Any:
        """Calls the program without recording the programs that it calls, which are parts of it."""
        token = _REQUESTS.set(None)
        try:
            return self._any_shape(request.static, *request.dynamic)
        finally:
            _REQUESTS.reset(token)

    def _first_call(self, request: Request, shape: Shape) -> Any:
        """Returns the result of the first call with these shapes, which compiles the program."""
        began = time.perf_counter()
        if (watcher := _WATCHER.get()) is not None:
            watcher()
        room.make_room()
        check_compilation_cache()
        options = compiler_options(streams=streams(request))
        jitted, code = self._jit(compiler_options=options or None), 0
        given = request.static, *request.dynamic
        if room.counts_bytes():
            # The call uses the program that this compiles.
            code = room.code_bytes(jitted.lower(*given).compile())
        result = jitted(*given)
        with _LOCK:
            compiled = self._cache.setdefault(shape, _Compiled())
            compiled.jitted, compiled.bytes, compiled.used = jitted, code, next(_CLOCK)
        if self.shape_of:
            seconds = time.perf_counter() - began
            log.info("%s: compiled, or read from the cache, in %.1f s", describe(request), seconds)
        return result

    def _jit(self, **options: Any) -> Any:
        function, names = self._function, self.dynamic

        # Each shape gets its own function: JAX keeps the programs of equal functions together.
        def call(static: tuple[tuple[str, Any], ...], *dynamic: Any) -> Any:
            return function(**dict(static), **dict(zip(names, dynamic)))

        call.__name__ = call.__qualname__ = self.name
        return jax.jit(call, **{**options, **self._options})


@contextlib.contextmanager
def recorded_requests() -> Iterator[list[Request]]:
    """Yields a list that gets every call of a program inside the context."""
    requests: list[Request] = []
    token = _REQUESTS.set(requests)
    try:
        yield requests
    finally:
        _REQUESTS.reset(token)


@contextlib.contextmanager
def watched_compilations(watcher: Callable[[], None]) -> Iterator[None]:
    """Calls a function before each program that this thread compiles inside the context."""
    token = _WATCHER.set(watcher)
    try:
        yield
    finally:
        _WATCHER.reset(token)


def lower(
    request: Request, *, lowering_platforms: Sequence[str] | None = None
) -> jax.stages.Lowered:
    """Lowers the request's program to StableHLO.

    lowering_platforms: see `jax.stages.Traced.lower`; by default that of the request's arrays.
    """
    with lowering_for(lowering_platforms or [call_shape(request).platform]):
        traced = request.program._any_shape.trace(request.static, *request.dynamic)
        return traced.lower(lowering_platforms=lowering_platforms and tuple(lowering_platforms))


def compile_request(request: Request, mesh: Mesh | None = None) -> jax.stages.Compiled:
    """Compiles a program for the request; calls with the same shapes use the executable."""
    check_compilation_cache()
    with in_mesh(mesh):
        options = compiler_options(mesh, streams=streams(request))
        compiled = lower(request).compile(options or None)
    request.program.keep(key(request), Executable(compiled, request, mesh))
    return compiled


def streams(request: Request) -> bool:
    """Returns whether the program copies parameters from the host's memory while it computes."""
    return any(map(in_host_memory, jax.tree.leaves(request.dynamic)))


def call_shape(request: Request) -> Shape:
    """Returns the shape of a call, which is quick: of parameters it looks at a few only."""
    program = request.program
    arrays: list[Any] = []
    placed: list[Any] = []
    for name, argument in zip(program.dynamic, request.dynamic):
        leaves, tree = jax.tree.flatten(argument)
        if name in program.uncounted:
            # Kernels of eight bits have more arrays.
            count, some, leaves = len(leaves), leaves[::_STRIDE], leaves[:1]
            # Programs that copy parameters while they compute are compiled with other options.
            arrays.append((count, *map(_dtype, leaves), *["host"] * any(map(_is_hosted, some))))
        else:
            arrays.append((tree, *[(getattr(x, "shape", ()), _dtype(x)) for x in leaves]))
        placed += leaves
    return Shape(platform_for(placed), request.static, tuple(arrays), int8_choice())


def _is_hosted(x: Any) -> bool:
    """Returns whether an array or a shape has a place in the host's memory."""
    sharding = getattr(x, "sharding", None)
    return sharding is not None and sharding.memory_kind == KIND


def key(request: Request, shape: Shape | None = None) -> Key:
    """Returns the key of a call. shape: its `call_shape`, if that is known already."""
    leaves, tree = jax.tree.flatten(request.dynamic)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    # There are hundreds of parameters, each of which may have a sharding of its own.
    alone = [s for s in shardings if type(s) is SingleDeviceSharding]
    others = {id(s): s for s in shardings if s is not None and type(s) is not SingleDeviceSharding}
    placements = {number: _placement(sharding) for number, sharding in others.items()}
    bound = [*alone, *[s for s in others.values() if s.num_devices == 1]]
    single = set().union(*[s.device_set for s in bound]) - {jax.local_devices()[0]}
    arrays = (
        tree,
        tuple([(getattr(x, "shape", ()), _dtype(x)) for x in leaves]),
        tuple(sorted(device.id for device in single)),
        tuple([placements.get(id(sharding)) for sharding in shardings]),
        *_hosted(shardings),
        *_orders(leaves),
    )
    return Key(request.program.name, shape or call_shape(request), arrays)


def _dtype(x: Any) -> str:
    kind: Any = x.dtype if hasattr(x, "dtype") else type(x)
    return _name(kind)


@functools.cache
def _name(kind: Any) -> str:
    return str(kind)


def _hosted(shardings: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the numbers of the arrays in the host's memory, if there are some."""
    found = [i for i, s in enumerate(shardings) if getattr(s, "memory_kind", None) == KIND]
    return (("host", *found),) if found else ()


def _orders(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the unusual orders of axes in memory, by the numbers of the arrays."""
    sharding = next((s for x in leaves if (s := getattr(x, "sharding", None)) is not None), None)
    if sharding is None or platform_of(next(iter(sharding.device_set))) not in ORDERS:
        return ()
    found = ((i, order_of(x)) for i, x in enumerate(leaves) if _may_have_order(x))
    return tuple([(i, order) for i, order in found if order is not None])


def _may_have_order(x: Any) -> bool:
    return x.ndim in (4, 5) or (x.ndim == 2 and x.dtype.itemsize == 1)


def _placement(sharding: Sharding) -> Any:
    """Returns how an array is split over which devices; None if it is not split."""
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return None
    # Axes of one device, and trailing ones without a name, do not matter.
    sizes = sharding.mesh.shape
    spec = [() if p is None else p if isinstance(p, tuple) else (p,) for p in sharding.spec]
    spec = [tuple(name for name in names if sizes[name] > 1) for names in spec]
    while spec and not spec[-1]:
        spec.pop()
    devices = tuple(device.id for device in sharding.mesh.devices.flat)
    return tuple(spec), tuple(sizes.items()), devices


def describe(request: Request) -> str:
    """Describes the program by name, shape and dtype, for messages."""
    named = dict(zip(request.program.dynamic, request.dynamic))
    leaf = jax.tree.leaves(named[request.program.shape_of])[0]
    shape = "x".join(map(str, leaf.shape))
    return f"{request.program.name} for {request.program.shape_of} {shape} {leaf.dtype}"


def work_of(request: Request) -> Work:
    """Returns the operations and bytes that a program needs, over all devices; see `count_flops`.

    A loop without a known end, as that over a sampler's steps, counts once.
    """
    function = functools.partial(inspect.unwrap(request.program), **dict(request.static))
    arguments = dict(zip(request.program.dynamic, request.dynamic))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return count_work(lambda kwargs: function(**kwargs), shapes)


def digest(request_key: Any) -> str:
    """Returns a short text that identifies a key."""
    return hashlib.sha256(repr(request_key).encode()).hexdigest()[:16]
