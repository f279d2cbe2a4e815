"""Compiled programs that can be made ahead of time, saved and loaded."""

import contextlib
import contextvars
import functools
import hashlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, Sharding

from diffusax.runtime.devices.layouts import ORDERS, order_of, platform_of
from diffusax.runtime.devices.lowering import compiler_options
from diffusax.runtime.devices.mesh import in_mesh
from diffusax.runtime.programs.bounded import BoundedJit, forget_shapes, is_traced
from diffusax.runtime.programs.cache import check_compilation_cache
from diffusax.runtime.programs.flops import count_flops

log = logging.getLogger(__name__)

PROGRAMS: dict[str, "Program"] = {}
"""All programs by name."""


class Request(NamedTuple):
    """A program and the shapes of a call."""

    program: "Program"
    static: tuple[tuple[str, Any], ...]
    """The static arguments, on which the program is specialised, by name."""
    dynamic: tuple[Any, ...]
    """The other arguments, as trees of shapes or of arrays."""


_REQUESTS: contextvars.ContextVar[list[Request] | None] = contextvars.ContextVar(
    "requests", default=None
)


@contextlib.contextmanager
def recorded_requests() -> Iterator[list[Request]]:
    """Yields a list that gets every call of a program inside the context."""
    requests: list[Request] = []
    token = _REQUESTS.set(requests)
    try:
        yield requests
    finally:
        _REQUESTS.reset(token)


class Program:
    """A jitted function, and the executables that were compiled or loaded for it.

    A call uses the executable for its shapes if there is one. Otherwise JAX compiles it, unless it
    has before, and one line in the log says so. Inside another trace the function is traced.
    """

    __wrapped__: Callable[..., Any]
    """The function itself."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: Sequence[str] = (),
        donate: Sequence[str] = (),
        shape_of: str,
    ):
        """Makes the program of a function.

        Args:
            function: a function of arrays, trees of arrays, and static arguments.
            static: the arguments to specialise on, which must be hashable.
            donate: the arguments whose memory the result may use.
            shape_of: the argument whose shape the log names.
        """
        functools.update_wrapper(self, function)
        self.name = function.__name__
        self.signature = inspect.signature(function)
        self.static = tuple(static)
        self.dynamic = tuple(n for n in self.signature.parameters if n not in static)
        self.shape_of = shape_of
        self.executables: dict[Any, jax.stages.Compiled] = {}
        self.compiled_here: dict[Any, tuple[Request, Mesh | None]] = {}
        """The requests, with their meshes, of the executables that this process compiled."""

        def call(static: tuple[tuple[str, Any], ...], *dynamic: Any) -> Any:
            return function(**dict(static), **dict(zip(self.dynamic, dynamic)))

        call.__name__ = call.__qualname__ = self.name
        donated = [1 + self.dynamic.index(name) for name in donate]
        parameters = [1 + i for i, name in enumerate(self.dynamic) if name == "params"]
        self.bounded = BoundedJit(
            call, static_argnums=[0], uncounted=parameters, donate_argnums=donated
        )
        PROGRAMS[self.name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the function's result."""
        request = self.request(*args, **kwargs)
        found = _REQUESTS.get()
        if found is not None:
            found.append(request)
            return self._unrecorded(request)
        if self.executables and not is_traced(request.dynamic):
            compiled = self.executables.get(key(request))
            if compiled is not None:
                return compiled(*request.dynamic)
        began = time.perf_counter()
        result, is_new = self.bounded.call((request.static, *request.dynamic))
        if is_new:
            seconds = time.perf_counter() - began
            log.info("%s: compiled, or read from the cache, in %.1f s", describe(request), seconds)
        return result

    def _unrecorded(self, request: Request) -> Any:
        """Calls the program without recording the programs that it calls, which are parts of it."""
        token = _REQUESTS.set(None)
        try:
            return self.bounded.jitted(request.static, *request.dynamic)
        finally:
            _REQUESTS.reset(token)

    def request(self, *args: Any, **kwargs: Any) -> Request:
        """Returns the request of a call with these arguments."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        static = tuple((name, given[name]) for name in self.static)
        return Request(self, static, tuple(given[name] for name in self.dynamic))


def lower(request: Request, **options: Any) -> jax.stages.Lowered:
    """Lowers the request's program to StableHLO; options: those of `jax.stages.Traced.lower`."""
    traced = request.program.bounded.jitted.trace(request.static, *request.dynamic)
    return traced.lower(**options)


def compile_request(request: Request, mesh: Mesh | None = None) -> jax.stages.Compiled:
    """Compiles a program for the request; calls with the same shapes use the executable."""
    check_compilation_cache()
    with in_mesh(mesh):
        compiled = lower(request).compile(compiler_options(mesh) or None)
    request.program.executables[key(request)] = compiled
    request.program.compiled_here[key(request)] = request, mesh
    return compiled


def forget_executables() -> None:
    """Releases all executables, whether compiled ahead of time, compiled in a call, or loaded."""
    forget_shapes()
    for program in PROGRAMS.values():
        program.executables.clear()
        program.compiled_here.clear()


def key(request: Request) -> Any:
    """Returns a hashable key that is equal for requests with the same executable."""
    leaves, treedef = jax.tree.flatten(request.dynamic)
    shardings = [getattr(leaf, "sharding", None) for leaf in leaves]
    # There are hundreds of parameters but few shardings, and comparing shardings is slow.
    distinct = {id(sharding): sharding for sharding in shardings}
    placements = {number: _placement(sharding) for number, sharding in distinct.items()}
    dtypes = {dtype: str(dtype) for dtype in {leaf.dtype for leaf in leaves}}
    bound = [s.device_set for s in distinct.values() if s is not None and s.num_devices == 1]
    single = set().union(*bound) - {jax.local_devices()[0]}
    return (
        *(request.program.name, request.static, treedef),
        tuple([(leaf.shape, dtypes[leaf.dtype]) for leaf in leaves]),
        tuple(sorted(device.id for device in single)),
        tuple([placements[id(sharding)] for sharding in shardings]),
        *_orders(leaves),
    )


def _orders(leaves: Sequence[Any]) -> tuple[Any, ...]:
    """Returns the unusual orders of axes in memory, by the numbers of the arrays."""
    sharding = next((s for x in leaves if (s := getattr(x, "sharding", None)) is not None), None)
    if sharding is None or platform_of(next(iter(sharding.device_set))) not in ORDERS:
        return ()
    found = ((i, order_of(x)) for i, x in enumerate(leaves) if x.ndim == 4)
    return tuple([(i, order) for i, order in found if order is not None])


def _placement(sharding: Sharding | None) -> Any:
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
    leaf = request.dynamic[request.program.dynamic.index(request.program.shape_of)]
    leaf = jax.tree.leaves(leaf)[0]
    shape = "x".join(map(str, leaf.shape))
    return f"{request.program.name} for {request.program.shape_of} {shape} {leaf.dtype}"


def operations_of(request: Request) -> int:
    """Returns the operations that a program needs, over all devices; see `count_flops`.

    A loop without a known end, as that over a sampler's steps, counts once.
    """
    function = functools.partial(inspect.unwrap(request.program), **dict(request.static))
    arguments = dict(zip(request.program.dynamic, request.dynamic))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arguments)
    return count_flops(lambda kwargs: function(**kwargs), shapes)


def digest(request_key: Any) -> str:
    """Returns a short text that identifies a key."""
    return hashlib.sha256(repr(request_key).encode()).hexdigest()[:16]
