"""Converts PyTorch modules to pure functions of (parameters, arguments)."""

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar
from unittest import mock

import jax
import jax.numpy as jnp
import torch

from diffusax.interop.torch.compat import all_hooks, forward_hooks
from diffusax.interop.torch.environment import computing, environment, is_traced, unwrap, wrap
from diffusax.interop.torch.explaining import KeepsTensor
from diffusax.interop.torch.structures import build_output, flatten, rebuild
from diffusax.interop.torch.tensors import to_array

State = dict[str, Any]
"""Parameters and buffers by the names in the checkpoint, arrays or `Kernel`s."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Kernel:
    """A convolution's weight d c kh kw, kept as kh kw c d, as `models.conv` takes it.

    A program that has to turn all weights around first takes a quarter longer (a full-size UNet on
    a CPU).
    """

    array: jax.Array

    AXES: ClassVar[tuple[int, ...]] = (2, 3, 1, 0)

    def weight(self) -> jax.Array:
        """Returns the weight in PyTorch's layout, d c kh kw."""
        return self.array.transpose(3, 2, 0, 1)


def read_state(module: torch.nn.Module, put: Callable[[str, Any], Any]) -> State:
    """Reads the parameters and buffers of a module; a tensor with several names is read once.

    put: converts a name and an array on the host to the array that is kept.
    """
    arrays: dict[int, Any] = {}
    state = {}
    for name, tensor in named_tensors(module):
        if id(tensor) not in arrays:
            arrays[id(tensor)] = put(name, to_array(tensor))
        state[name] = arrays[id(tensor)]
    return state


def named_tensors(module: torch.nn.Module) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields every place that holds a parameter or a buffer once; modules may occur in several."""
    own: dict[str, bool] = {"recurse": False, "remove_duplicate": False}
    for prefix, part in module.named_modules():
        yield from part.named_parameters(prefix, **own)
        yield from part.named_buffers(prefix, **own)


def run_traced(
    module: torch.nn.Module, method: Callable[..., Any], state: State, seed: Any, args: Any
) -> Any:
    """Returns a method's result while JAX traces, in PyTorch's structure, with traced tensors.

    Args:
        module: the module whose parameters are replaced.
        method: a function of the positional and keyword arguments.
        state: the replacements of the parameters.
        seed: the seed of random numbers that the module draws itself.
        args: (positional, keyword) arguments with tensors of the environment.
    """
    positional, keyword = args
    env = environment()
    plain = {n: x.weight() if isinstance(x, Kernel) else x for n, x in state.items()}
    tensors = {f"module.{name}": wrap(array) for name, array in plain.items()}
    with (
        _quiet_about_64_bits(),
        _kept_attributes(module),
        _without_stores(module),
        _without_observers(module),
        # diffusers and transformers then skip caches and branches on values.
        mock.patch("torch.compiler.is_compiling", return_value=True),
        env.override_property(prng=jax.random.key(seed)),
        torch.no_grad(),
        computing(),
    ):
        called = _Calling(module, method)
        return torch.func.functional_call(called, tensors, positional, keyword, tie_weights=False)


class _Calling(torch.nn.Module):
    """A module whose forward is any method of another one, for `functional_call`."""

    def __init__(self, module: torch.nn.Module, method: Callable[..., Any]):
        super().__init__()
        self.module, self.method = module, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the method's result."""
        return self.method(*args, **kwargs)


@contextlib.contextmanager
def _kept_attributes(module: torch.nn.Module) -> Iterator[None]:
    """Restores, after the context, attributes and caches that modules set for their next call.

    Their tensors are traced ones, which are not valid outside the trace. The tables of hooks are
    restored, too: transformers' models set hooks in their first call, and models that forgot having
    set them would set them twice and return each hidden state twice.
    """
    before = [(part, dict(vars(part)), _copied(all_hooks(part))) for part in module.modules()]
    caches = [
        function
        for part in module.modules()
        for kind in type(part).__mro__
        for function in vars(kind).values()
        if hasattr(function, "cache_clear")
    ]
    for cache in caches:
        cache.cache_clear()
    try:
        yield
    finally:
        for part, attributes, hooks in before:
            vars(part).clear()
            vars(part).update(attributes)
            for name, set_before in hooks.items():
                attributes[name].clear()
                attributes[name].update(set_before)
        for cache in caches:
            cache.cache_clear()


def _copied(tables: dict[str, dict[Any, Any]]) -> dict[str, dict[Any, Any]]:
    return {name: dict(table) for name, table in tables.items()}


@contextlib.contextmanager
def _without_stores(module: torch.nn.Module) -> Iterator[None]:
    """Raises an error where attention processors keep values for the pipeline to read."""
    processors = (getattr(part, "processor", None) for part in module.modules())
    found = {id(p): p for p in processors if hasattr(p, "__dict__")}
    before = [(processor, dict(vars(processor))) for processor in found.values()]
    kept = []
    try:
        yield
        for processor, _ in before:
            kept += [
                (type(processor).__name__, n) for n, x in vars(processor).items() if is_traced(x)
            ]
    finally:
        for processor, attributes in before:
            vars(processor).clear()
            vars(processor).update(attributes)
    for kind, name in kept:
        raise KeepsTensor(f"its {kind} keeps {name} for others to read")


@contextlib.contextmanager
def _without_observers(module: torch.nn.Module) -> Iterator[None]:
    """Raises an error for hooks that only observe values, which no program would call.

    The hooks of transformers' models are allowed, whose observations are part of the result.
    """
    observed: list[str] = []

    def noting(hook: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            result = hook(*args, **kwargs)
            if result is None and not _module_of(hook).startswith("transformers."):
                observed.append(name)
            return result

        return call

    found = ((name, forward_hooks(part)) for name, part in module.named_modules())
    hooked = [(name, hooks) for name, hooks in found if hooks]
    before = [dict(hooks) for _, hooks in hooked]
    for name, hooks in hooked:
        hooks.update({k: noting(hook, name) for k, hook in hooks.items()})
    try:
        yield
    finally:
        for (_, hooks), originals in zip(hooked, before):
            hooks.update(originals)
    if observed:
        raise KeepsTensor(f"a hook looks at what its part {observed[0] or 'itself'} computes")


def _module_of(function: Any) -> str:
    return str(getattr(getattr(function, "func", function), "__module__", ""))


@contextlib.contextmanager
def _quiet_about_64_bits() -> Iterator[None]:
    """Silences JAX's warnings that PyTorch's 64-bit integers are shortened."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Explicitly requested dtype", UserWarning)
        yield


def to_jax(
    module: torch.nn.Module, *, method: str = "forward", dtype: Any = None
) -> tuple[State, Callable[..., Any]]:
    """Converts a PyTorch module to parameters and a pure function, to jit, differentiate or shard.

    Args:
        module: any module whose operations torchax has.
        method: the method that the function runs.
        dtype: the dtype of the floating-point parameters, instead of the module's.

    Returns:
        The parameters and buffers by the checkpoint's names, and a function (params, *args,
        **kwargs) of JAX arrays. Results keep their classes, which are registered as pytrees;
        tensors in them are JAX arrays. A keyword `seed` sets the random numbers of modules that
        draw some.

    Raises:
        ImportError: torch or torchax is missing.
    """

    def put(name: str, array: Any) -> jax.Array:
        floating = jnp.issubdtype(array.dtype, jnp.floating)
        return jnp.asarray(array, dtype if floating else None)

    bound = getattr(module, method)

    def function(params: State, *args: Any, seed: Any = 0, **kwargs: Any) -> Any:
        leaves, structure = flatten((args, kwargs))
        arrays = (x if isinstance(x, jax.Array) else jnp.asarray(to_array(x)) for x in leaves)
        given = rebuild(structure, map(wrap, arrays))
        result = run_traced(module, bound, params, seed, given)
        leaves, structure = flatten(result)
        register(result)
        return rebuild(structure, map(unwrap, leaves))

    return read_state(module, put), function


_registered: set[type] = set()


def register(value: Any) -> None:
    """Registers the classes of results in a value as JAX's pytrees.

    These are all dataclasses that are also dictionaries: transformers' ModelOutput and diffusers'
    BaseOutput are the base classes of such results.
    """
    kind: Any = type(value)
    if (
        isinstance(value, dict)
        and hasattr(kind, "__dataclass_fields__")
        and kind not in _registered
    ):
        _registered.add(kind)
        jax.tree_util.register_pytree_with_keys(
            kind,
            _output_items,
            functools.partial(_output_of, kind),
        )
    children = value.values() if isinstance(value, dict) else value
    if isinstance(value, dict | list | tuple):
        for child in children:
            register(child)


def _output_items(output: Any) -> tuple[list[tuple[Any, Any]], tuple[str, ...]]:
    return [(jax.tree_util.DictKey(name), x) for name, x in output.items()], tuple(output)


def _output_of(kind: type, names: tuple[str, ...], values: Iterable[Any]) -> Any:
    return build_output(kind, dict(zip(names, values)))
