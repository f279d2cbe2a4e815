"""Tells whether a program works with PyTorch's tensors or with arrays of JAX, by its imports.

Programs written for diffusers go on with tensors where a call has none among its arguments: they
multiply the embeddings of a text in place. Programs in JAX go on with arrays, also where they have
imported PyTorch to compare with.
"""

import functools
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from diffusax.tensors import as_tensor, is_tensor

_JAX = ("jax", "flax")
_OWN = __name__.partition(".")[0]


def wants_tensors(setting: str | None, *given: Any) -> bool:
    """Returns whether the program that calls wants tensors of PyTorch rather than arrays of JAX.

    It does where the module that calls, the nearest one outside diffusax, has imported PyTorch and
    not JAX, also where a function has imported it that is running.

    Args:
        setting: "pt" or "jax", which decides; or None.
        *given: values, of which a tensor decides where the module has imported neither.
    """
    if setting is not None:
        return setting == "pt"
    if "torch" not in sys.modules:
        return False
    wanted = _prefers_tensors(_names(_caller()))
    return any(map(is_tensor, given)) if wanted is None else wanted


def function_wants_tensors(function: Any, otherwise: bool) -> bool:
    """Returns whether a function that is called back wants tensors, by the imports of its module.

    otherwise: what holds where the module has imported neither PyTorch nor JAX.
    """
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    function = getattr(function, "__func__", function)
    if not hasattr(function, "__globals__"):
        function = type(function).__call__
    wanted = _prefers_tensors(getattr(function, "__globals__", {}).values())
    return otherwise if wanted is None else wanted


def for_reader(array: np.ndarray) -> Any:
    """Returns an attribute's array as a tensor where a program reads it that wants tensors.

    To be called by a property. The package itself reads arrays; tensors have no float64.
    """
    if "torch" not in sys.modules:
        return array
    reader = sys._getframe(2)
    if _is_own(reader) or not _prefers_tensors(_names(reader)):
        return array
    return as_tensor(array.astype(np.float32) if array.dtype == np.float64 else array)


def _caller() -> types.FrameType | None:
    """Returns the nearest frame outside this package."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    return frame


def _is_own(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _OWN


def _names(frame: types.FrameType | None) -> Iterator[Any]:
    """Yields what a frame's module has, and the functions of it that are running."""
    if frame is None:
        return
    module: Mapping[str, Any] = frame.f_globals
    yield from module.values()
    while frame is not None:
        if frame.f_globals is module and frame.f_locals is not module:
            yield from frame.f_locals.values()
        frame = frame.f_back


def _prefers_tensors(values: Any) -> bool | None:
    """Returns whether PyTorch is among values and JAX is not; None for neither."""
    libraries = {_library(value) for value in list(values)}
    if not libraries.isdisjoint(_JAX):
        return False
    return True if "torch" in libraries else None


def _library(value: Any) -> str:
    """Returns the package of a module, class or function, and nothing for any other value.

    Arrays and tensors do not count: a program may have been given them.
    """
    if isinstance(value, types.ModuleType):
        name = value.__name__
    elif isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        name = value.__module__
    else:
        return ""
    return str(name).partition(".")[0]
