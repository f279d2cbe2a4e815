"""JAX's switches of a user's program, which do not change what networks and calls compute.

A program may compute its own numbers in 64 bits, forbid implicit promotions and transfers, choose
another implementation of random numbers, or set a mesh whose axes are explicit. What is computed
here says its dtypes, and draws its numbers from `runtime.random.noise.seed_key`; for the rest,
functions run in a context in which these switches are JAX's defaults; programs for a mesh run
`in_mesh`. A program that sets no switch needs none of this, and a reader who follows a call may
skip it.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from diffusax.runtime.compat import is_tracing

F = TypeVar("F", bound=Callable[..., Any])
_ENUMS: dict[str, tuple[Any, Any]] = {
    "jax_numpy_dtype_promotion": (jax.numpy_dtype_promotion, "standard"),
    "jax_numpy_rank_promotion": (jax.numpy_rank_promotion, "allow"),
    "jax_threefry_partitionable": (jax.threefry_partitionable, True),
}
_GUARDS = {
    f"jax_transfer_guard_{way}": getattr(jax, f"transfer_guard_{way}")
    for way in ("host_to_device", "device_to_device", "device_to_host")
}
_PERMISSIVE = (None, "allow", "log")
_NO_CONTEXT = contextlib.nullcontext()
_DOUBLE: contextvars.ContextVar[bool] = contextvars.ContextVar("double", default=False)


def are_default() -> bool:
    """Returns whether the user's program sets none of these switches."""
    for name, (_, value) in _ENUMS.items():
        if getattr(jax.config, name, value) != value:
            return False
    for name in _GUARDS:
        if getattr(jax.config, name, None) not in _PERMISSIVE:
            return False
    explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
    return not (explicit or jax.config.read("jax_enable_x64"))


@contextlib.contextmanager
def standard_promotion() -> Iterator[None]:
    """Sets the switches that concern how arrays are combined; it may be entered in a trace."""
    with contextlib.ExitStack() as stack:
        for name, (context, value) in _ENUMS.items():
            if getattr(jax.config, name, value) != value:
                stack.enter_context(context(value))
        yield


@contextlib.contextmanager
def own_switches(*, x64: bool = False) -> Iterator[None]:
    """Sets all switches, for a call that is not part of a user's trace; inside one, what can be.

    x64: whether 64 bits stay as the user has them, here and in contexts within, because parameters
    are of 64 bits.
    """
    with contextlib.ExitStack() as stack:
        if x64:
            stack.callback(_DOUBLE.reset, _DOUBLE.set(True))
        stack.enter_context(standard_promotion())
        for name, guard in _GUARDS.items():
            if getattr(jax.config, name, None) not in _PERMISSIVE:
                stack.enter_context(guard("allow"))
        is_double = jax.config.read("jax_enable_x64") and not _DOUBLE.get()
        if (is_double or is_explicit()) and not is_tracing():
            if is_explicit():
                stack.enter_context(jax.set_mesh(_no_mesh()))
            if is_double:
                stack.enter_context(jax.enable_x64(False))
        yield


def in_mesh(mesh: Mesh | None) -> Any:
    """Returns the context in which programs for the mesh are traced and called.

    None, for a single device, leaves `own_switches` alone.
    """
    if mesh is not None:
        return _in_mesh(mesh)
    return _NO_CONTEXT if are_default() else own_switches()


@contextlib.contextmanager
def _in_mesh(mesh: Mesh) -> Iterator[None]:
    with own_switches(), jax.set_mesh(mesh):
        yield


def under_own_switches(function: F) -> F:
    """Makes a public function run under `own_switches`.

    Its arrays of 64 bits become ones of 32, unless the object whose method it is has parameters of
    64 bits, as its `is_double` says. On a mesh of the user's with explicit axes, what it returns is
    on that mesh.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A model on the user's mesh takes arrays there as they are.
        own = bool(args) and getattr(args[0], "is_explicit", False)
        if are_default() and (own or _explicit_mesh((args[1:], kwargs)) is None):
            return function(*args, **kwargs)
        may_be = jax.config.read("jax_enable_x64") and bool(args)
        x64 = may_be and bool(getattr(args[0], "is_double", False))
        return call_under_own_switches(x64, function, *args, **kwargs)

    return call  # type: ignore[return-value]


def call_under_own_switches(
    x64: bool, function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Calls a function as `under_own_switches` does.

    x64: whether arrays of 64 bits stay as they are.
    """
    if jax.config.read("jax_enable_x64") and not x64:
        args, kwargs = jax.tree.map(_in_32_bits, (args, kwargs))
    outside = None if is_tracing() else _explicit_mesh((args, kwargs))
    if outside is None:
        with own_switches(x64=x64):
            return function(*args, **kwargs)
    args, kwargs = jax.tree.map(_in_auto_mesh, (args, kwargs))
    with own_switches(x64=x64):
        result = function(*args, **kwargs)
    return jax.tree.map(functools.partial(_on_mesh, outside), result)


def check_untraced(given: Mapping[str, Any], instead: str) -> None:
    """Raises an error for values that jit, grad, vmap or scan trace where numbers are needed.

    given: the values by the arguments' names. instead: what can be traced, for the error.

    Raises:
        ValueError: a value is, or holds, a tracer; names it.
    """
    if not is_traced([*given.values()]):
        return
    for name, value in given.items():
        if is_traced(value):
            raise ValueError(
                f"{name} is traced by jit, grad, vmap or scan (got {value!s:.80}) and must be "
                f"known when a function is traced; {instead}"
            )


def is_traced(tree: Any) -> bool:
    """Returns whether some of these arguments are tracers of a function that JAX is tracing."""
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(tree))


def is_double(tree: Any) -> bool:
    """Returns whether some arrays have 64 bits."""
    return any(getattr(leaf, "dtype", None) == np.float64 for leaf in jax.tree.leaves(tree))


def is_explicit() -> bool:
    """Returns whether the user has set a mesh with explicit axes."""
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def _explicit_mesh(tree: Any) -> Any:
    """Returns the user's mesh with explicit axes, which is set or has some arrays; None for none.

    Arrays that are traced have an abstract mesh.
    """
    if is_explicit():
        return jax.sharding.get_abstract_mesh() if is_tracing() else jax.sharding.get_mesh()
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            sharding: Any = jax.typeof(leaf).sharding if is_traced(leaf) else leaf.sharding
            mesh = getattr(sharding, "mesh", None)
            if mesh is not None and AxisType.Explicit in mesh.axis_types:
                return mesh
    return None


def in_auto_axes(function: Callable[..., Any], *args: Any, rows: Any) -> Any:
    """Calls a function; on a mesh with explicit axes XLA chooses the shardings within it.

    The first axis of results is split as that of the first array among `rows`, a part of the
    arguments, whose first axis is split.
    """
    mesh = _explicit_mesh(args)
    if mesh is None:
        return function(*args)
    if not is_explicit():
        # It is the arguments' alone.
        abstract = isinstance(mesh, AbstractMesh)
        with jax.sharding.use_abstract_mesh(mesh) if abstract else jax.set_mesh(mesh):
            return in_auto_axes(function, *args, rows=rows)
    kinds = zip(mesh.axis_names, mesh.axis_types)
    mine = tuple(name for name, kind in kinds if kind == AxisType.Explicit)
    splits = (_first_split(leaf) for leaf in jax.tree.leaves(rows))
    split = next((found for found in splits if found is not None), None)
    leaves, tree = jax.tree.flatten(args)
    arrays = [leaf if isinstance(leaf, jax.Array | np.ndarray) else None for leaf in leaves]

    def call(arrays: Any) -> Any:
        merged = [own if array is None else array for array, own in zip(arrays, leaves)]
        return function(*jax.tree.unflatten(tree, merged))

    def in_auto(specs: Any) -> Callable[[Any], Any]:
        return jax.sharding.auto_axes(call, axes=mine, out_sharding=specs)

    shapes = jax.eval_shape(in_auto(PartitionSpec()), arrays)
    specs = jax.tree.map(lambda x: PartitionSpec(*[split] * bool(x.shape)), shapes)
    return in_auto(specs)(arrays)


def _first_split(x: Any) -> Any:
    """Returns the mesh's axes over which an array's first axis is split; None if it is not."""
    spec: Any = jax.typeof(x).sharding.spec if isinstance(x, jax.Array) else ()
    return spec[0] if len(spec) else None


@functools.cache
def _no_mesh() -> Mesh:
    return Mesh(np.empty((), object), ())


def _in_32_bits(x: Any) -> Any:
    if not isinstance(x, jax.Array) or x.dtype not in (np.float64, np.int64, np.uint64):
        return x
    return x.astype(f"{x.dtype.name[:-2]}32")


def _in_auto_mesh(x: Any) -> Any:
    """Returns an array on a mesh with explicit axes on the same mesh without them."""
    sharding = getattr(x, "sharding", None)
    if not isinstance(x, jax.Array) or not isinstance(sharding, NamedSharding):
        return x
    mesh = sharding.mesh
    if isinstance(mesh, AbstractMesh) or AxisType.Explicit not in mesh.axis_types:
        return x
    return jax.device_put(x, NamedSharding(Mesh(mesh.devices, mesh.axis_names), sharding.spec))


def _on_mesh(mesh: Mesh, x: Any) -> Any:
    """Returns an array that is on several devices on a mesh of the same ones.

    It is split as it is over axes of the same names, else there is one copy on each.
    """
    sharding = getattr(x, "sharding", None)
    several = isinstance(x, jax.Array) and isinstance(sharding, NamedSharding)
    if not several or sharding.device_set != {*mesh.devices.flat}:  # type: ignore[union-attr]
        return x
    same = sharding.mesh.shape == mesh.shape  # type: ignore[union-attr]
    spec = sharding.spec if same else PartitionSpec()  # type: ignore[union-attr]
    return jax.device_put(x, NamedSharding(mesh, spec))
