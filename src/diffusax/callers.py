"""Tells whether a program works with PyTorch's tensors or with arrays of JAX, by its imports.

Programs written for diffusers go on with tensors where a call has none among its arguments: they
multiply the embeddings of a text in place. Programs in JAX go on with arrays, also where they have
imported PyTorch to compare with.
"""

import functools
import inspect
import sys
import types
from collections.abc import Mapping
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
    wanted = _prefers_tensors(_imports(_caller()))
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
    found = _packages(getattr(function, "__globals__", {}))
    found |= _names(function.__code__) if hasattr(function, "__code__") else set()
    wanted = _prefers_tensors(found)
    return otherwise if wanted is None else wanted


def for_reader(value: Any) -> Any:
    """Returns an attribute's value as PyTorch's where a program reads it that wants tensors.

    To be called by a property. The package itself reads what is given.

    value: an array, which becomes a tensor, float64 a tensor of float32; a dtype; or a device of
    JAX, which becomes PyTorch's of the same GPU, where it has one, and else the CPU.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return value
    reader = _outer(2)
    if reader is None or _is_own(reader) or not _prefers_tensors(_imports(reader)):
        return value
    if isinstance(value, np.ndarray):
        return as_tensor(value.astype(np.float32) if value.dtype == np.float64 else value)
    if isinstance(value, np.dtype):
        return getattr(torch, value.name, value)
    on_gpu = value.platform == "gpu" and torch.cuda.is_available()
    return torch.device("cuda", value.local_hardware_id) if on_gpu else torch.device("cpu")


def _caller() -> types.FrameType | None:
    """Returns the nearest frame outside this package."""
    frame = inspect.currentframe()
    while frame is not None and _is_own(frame):
        frame = frame.f_back
    return frame


def _outer(count: int) -> types.FrameType | None:
    """Returns a frame outside the function that asks: its own caller's for 1, and so on."""
    frame = inspect.currentframe()
    for _ in range(count + 1):
        frame = None if frame is None else frame.f_back
    return frame


def _is_own(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _OWN


def _imports(frame: types.FrameType | None) -> set[str]:
    """Returns the packages that a frame's module has imported, or functions of it that are running.

    Local variables are not looked at: Python would keep them alive for as long as the frame runs.
    """
    if frame is None:
        return set()
    module, found = frame.f_globals, _packages(frame.f_globals)
    while frame is not None:
        if frame.f_globals is module:
            found |= _names(frame.f_code)
        frame = frame.f_back
    return found


def _names(code: types.CodeType) -> set[str]:
    """Returns the names that a function imports or reads from outside, without their submodules."""
    return {name.partition(".")[0] for name in (*code.co_names, *code.co_freevars)}


def _packages(module: Mapping[str, Any]) -> set[str]:
    """Returns the packages of the modules, classes and functions that a module has."""
    return {_package(value) for value in list(module.values())}


def _prefers_tensors(packages: set[str]) -> bool | None:
    """Returns whether PyTorch is among packages and JAX is not; None for neither."""
    if not packages.isdisjoint(_JAX):
        return False
    return True if "torch" in packages else None


def _package(value: Any) -> str:
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
