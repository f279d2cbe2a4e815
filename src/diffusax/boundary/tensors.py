"""Takes PyTorch's tensors where arrays are asked for, and gives tensors back, without importing it.

Whoever has an array of JAX or a tensor has imported its library: importing this module imports
neither.
"""

import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from diffusax.boundary.messages import require_extra


def as_numpy(value: Any) -> np.ndarray:
    """Converts an array or PyTorch tensor to NumPy; dtypes that NumPy lacks become float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if value.is_floating_point() else value
    return np.asarray(value)


def as_array(value: Any) -> Any:
    """Returns arrays of JAX as they are, and converts everything else like `as_numpy`."""
    jax = sys.modules.get("jax")
    return value if jax is not None and isinstance(value, jax.Array) else as_numpy(value)


def is_tensor(value: Any) -> bool:
    """Returns whether the value is a tensor of PyTorch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def alike(tree: Any, *given: Any) -> Any:
    """Converts a tree's arrays to tensors where one of `given` is, and else to arrays of JAX.

    Tensors have the arrays' dtypes and the device of the first tensor that is given.
    """
    import jax

    first = next(filter(is_tensor, given), None)
    if first is None:
        return jax.tree.map(jax.numpy.asarray, tree)
    return jax.tree.map(lambda x: as_tensor(x).to(first.device), tree)


def as_tensors(tree: Any) -> Any:
    """Converts a tree's arrays to tensors, see `as_tensor`; tensors stay as they are."""
    import jax

    return jax.tree.map(lambda x: x if is_tensor(x) else as_tensor(x), tree)


def as_tensor(x: Any) -> Any:
    """Copies an array to a tensor of PyTorch of the same dtype, which may be changed in place.

    It is on the device of JAX's array, where PyTorch has it too, and else in the host's memory.

    Raises:
        ImportError: PyTorch is not installed.
    """
    torch = require_extra("torch", "torch")
    if _readable_by(torch, x):
        return torch.from_dlpack(x.block_until_ready()).clone()
    # NumPy has no bfloat16 that PyTorch reads.
    exact = np.array(x, np.float32 if x.dtype.name == "bfloat16" else None)
    return torch.from_numpy(exact).to(getattr(torch, x.dtype.name))


def _readable_by(torch: Any, x: Any) -> bool:
    """Returns whether an array is JAX's, in one piece, on a device that PyTorch has too."""
    jax = sys.modules.get("jax")
    if jax is None or not isinstance(x, jax.Array) or len(x.devices()) > 1:
        return False
    platform = next(iter(x.devices())).platform
    found: bool = platform == "cpu" or (platform == "gpu" and torch.cuda.is_available())
    return found


def as_kind(array: np.ndarray, kind: Any) -> Any:
    """Converts an array to what a call's `return_tensors` asks for.

    kind: "np", "pt" for a tensor of PyTorch, or "jax".

    Raises:
        ValueError: the kind is unknown.
        ImportError: it is "pt", and PyTorch is not installed.
    """
    kind = getattr(kind, "value", kind)
    if kind == "pt":
        return require_extra("torch", "torch").from_numpy(array)
    if kind == "jax":
        return alike(array, None)
    if kind != "np":
        raise ValueError(f"return_tensors must be 'np', 'pt', 'jax' or None (got {kind!r})")
    return array


class BatchEncoding(dict[str, Any]):
    """The arrays that a tokenizer or a processor of images returns, by key and by attribute."""

    def __getattr__(self, name: str) -> Any:
        """Returns an entry by its name."""
        if name in self:
            return self[name]
        raise AttributeError(f"there is no {name!r}; there are {', '.join(self)}")

    def to(self, *args: Any, **options: Any) -> "BatchEncoding":
        """Moves PyTorch's tensors to a device or dtype; arrays stay where they are."""
        moved = {k: v.to(*args, **options) if hasattr(v, "detach") else v for k, v in self.items()}
        return BatchEncoding(moved)


class Output:
    """A dataclass whose fields, except those that are None, are also read by position or by key."""

    def __getitem__(self, index: Any) -> Any:
        """Returns fields by position or key, as in diffusers: `output[0]`, `output["sample"]`."""
        return getattr(self, index) if isinstance(index, str) else self.to_tuple()[index]

    def __iter__(self) -> Any:
        """Yields the names of the fields that are not None, as a dict does."""
        return iter(self.keys())

    def keys(self) -> tuple[str, ...]:
        """Returns the names of the fields that are not None."""
        names = (field.name for field in dataclasses.fields(self))  # type: ignore[arg-type]
        return tuple(name for name in names if getattr(self, name) is not None)

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the values of the fields that are not None."""
        return tuple(getattr(self, name) for name in self.keys())


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
    if hasattr(function, "__code__"):
        found |= _names(function.__code__)
    wanted = _prefers_tensors(found)
    return otherwise if wanted is None else wanted


class HostArray(np.ndarray):
    """An array of the host's memory whose entries a traced index chooses, too.

    Inside `jax.jit`, `grad`, `vmap` and `scan`, `array[i]` with a traced i is an array of JAX, with
    JAX's rules for indices. With any other index it is NumPy's.
    """

    def __getitem__(self, index: Any) -> Any:
        """Returns the entries at an index, or at a tuple of them."""
        jax = sys.modules.get("jax")
        parts = index if isinstance(index, tuple) else (index,)
        if jax is not None and any(isinstance(part, jax.core.Tracer) for part in parts):
            return jax.numpy.asarray(self)[index]
        return super().__getitem__(index)


def for_reader(value: Any) -> Any:
    """Returns an attribute's value as PyTorch's where a program reads it that wants tensors.

    To be called by a property. The package itself reads what is given.

    value: an array, which becomes a tensor, or for programs of JAX a `HostArray`; a dtype; or a
    device of JAX, which becomes PyTorch's of the same GPU, where it has one, and else the CPU.
    """
    torch: Any = sys.modules.get("torch")
    reader = _outer(2)
    if reader is None or _is_own(reader):
        return value
    if torch is None or not _prefers_tensors(_imports(reader)):
        return value.view(HostArray) if isinstance(value, np.ndarray) else value
    if isinstance(value, np.ndarray):
        return as_tensor(value)
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


def _is_own(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] == _OWN


def _outer(count: int) -> types.FrameType | None:
    """Returns a frame outside the function that asks: its own caller's for 1, and so on."""
    frame = inspect.currentframe()
    for _ in range(count + 1):
        frame = None if frame is None else frame.f_back
    return frame


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


_NAMED = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType)


def _packages(module: Mapping[str, Any]) -> set[str]:
    """Returns the packages of the modules, classes and functions that a module has.

    Arrays and tensors do not count: a program may have been given them.
    """
    found = set()
    for value in list(module.values()):
        if isinstance(value, _NAMED):
            is_module = isinstance(value, types.ModuleType)
            name = value.__name__ if is_module else value.__module__
            found.add(str(name).partition(".")[0])
    return found


def _prefers_tensors(packages: set[str]) -> bool | None:
    """Returns whether PyTorch is among packages and JAX is not; None for neither."""
    if not packages.isdisjoint(_JAX):
        return False
    return True if "torch" in packages else None
