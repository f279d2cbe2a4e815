"""Blocks of one form, which JAX traces once for all of them, and lowers to one function.

A network of many blocks is traced and lowered in a fraction of the time so. On CPUs and GPUs XLA
makes the same of it, as it puts the function in the place of its calls before all else. On TPUs it
first rearranges what is in the function, so that there the function is no call from the beginning.
"""

import functools
import inspect
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from diffusax.runtime.compat import is_tracing
from diffusax.runtime.devices.lowering import known_platform

_CALLING = ("cpu", "cuda", "rocm")
"""The platforms that blocks are called as functions for."""
_STATIC = (type(None), bool, int, float, str, type, np.dtype)
"""What of a block is equal in blocks of one form, if it is no array."""


class _DiffersError(Exception):
    """A block has what no other has, such as a hook."""


class _Form:
    """What is equal in blocks of one form."""

    def __init__(self, key: Hashable, module: Any, method: Callable[..., Any], given: Any):
        self.key = key
        self.module, self.method, self.given = module, method, given
        """Those of one block, until its call returns: the arrays of a trace must not outlive it."""

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, _Form) and self.key == other.key


def shared(block: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a module of a network, or a method of one, as a function that is traced once.

    Calls of modules that differ in arrays alone, with arguments that differ in arrays alone, share
    a trace. Other functions, and modules with hooks or with what a cache of steps keeps track of,
    are called as they are.

    block: it may have some of its arguments already, as a `functools.partial`.
    """
    given = block if isinstance(block, functools.partial) else functools.partial(block)
    if isinstance(given.func, nnx.Module):
        module, method = given.func, type(given.func).__call__
    elif inspect.ismethod(given.func) and isinstance(given.func.__self__, nnx.Module):
        module, method = given.func.__self__, given.func.__func__
    else:
        return block

    def call(*args: Any) -> Any:
        if not is_tracing():
            return block(*args)
        arrays: list[Any] = []
        all_given = (*given.args, *args), given.keywords
        try:
            key = method, _taken(all_given, arrays), _taken(module, arrays)
        except _DiffersError:
            return block(*args)
        form = _Form(key, module, method, all_given)
        try:
            run = _called if known_platform() in _CALLING else _inlined
            return run(form, arrays)
        finally:
            form.module = form.given = None

    return call


def _block(form: _Form, arrays: list[Any]) -> Any:
    rest = iter(arrays)
    args, keywords = _filled(form.given, rest)
    return form.method(_filled(form.module, rest), *args, **keywords)


_called: Any = jax.jit(_block, static_argnums=0)
_inlined: Any = jax.jit(_block, static_argnums=0, inline=True)


def _taken(value: Any, arrays: list[Any]) -> Hashable:
    """Returns what is equal in values of one form, and adds the arrays in one to a list.

    Raises:
        _DiffersError: it holds something that no other has.
    """
    match value:
        case jax.Array():
            arrays.append(value)
            return jax.Array
        case nnx.Variable():
            metadata = value.get_metadata()
            if "on_get_value" in metadata:
                raise _DiffersError
            return type(value), _taken(value.get_raw_value(), arrays)
        case nnx.Module():
            own = [(name, _taken(x, arrays)) for name, x in _attributes(value)]
            return type(value), tuple(own)
        case _ if _is_static(value):
            # Equal numbers of different types are different here.
            return type(value), value
    leaves, tree = jax.tree.flatten(value)
    if len(leaves) == 1 and leaves[0] is value:
        raise _DiffersError
    return tree, tuple(_taken(x, arrays) for x in leaves)


def _filled(value: Any, arrays: Iterator[Any]) -> Any:
    """Returns a value of the same form with the arrays that come next."""
    match value:
        case jax.Array():
            return next(arrays)
        case nnx.Variable():
            return value.copy(value=_filled(value.get_raw_value(), arrays))
        case nnx.Module():
            new = object.__new__(type(value))
            vars(new).update(vars(value))
            vars(new).update({name: _filled(x, arrays) for name, x in _attributes(value)})
            return new
        case _ if _is_static(value):
            return value
    leaves, tree = jax.tree.flatten(value)
    return jax.tree.unflatten(tree, [_filled(x, arrays) for x in leaves])


def _is_static(value: Any) -> bool:
    return isinstance(value, _STATIC) or inspect.isfunction(value)


def _attributes(module: nnx.Module) -> list[tuple[str, Any]]:
    """Returns the attributes of a module that are not Flax's own."""
    return [(name, x) for name, x in vars(module).items() if not name.startswith("_pytree__")]
