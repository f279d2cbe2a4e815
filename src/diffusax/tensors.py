"""Takes PyTorch's tensors where arrays are asked for, and gives tensors back, without importing it.

Whoever has an array of JAX or a tensor has imported its library: importing this module imports
neither.
"""

import dataclasses
import sys
from typing import Any

import numpy as np

from diffusax.extras import require_extra


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
