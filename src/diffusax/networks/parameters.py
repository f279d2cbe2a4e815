"""A model's parameter in PyTorch's layout, as modules of PyTorch have it."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_numpy, for_reader
from diffusax.checkpoints.tree import (
    checkpoint_name,
    put,
    to_flax,
    to_torch,
    torch_shape,
)
from diffusax.models.arranged import Arranged
from diffusax.models.parameter_tree import replaced
from diffusax.models.quantized import Quantized


class IncompatibleKeys(NamedTuple):
    """The names that `load_state_dict` has not found, and those that it has not used."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Parameter:
    """A parameter of a model, in PyTorch's layout; what is written into it is the model's.

    `p[3] = vector` and `p.copy_(array)` write; reading gives arrays of NumPy. `value` is the array
    in the model's tree, in Flax's layout.
    """

    grad = None

    def __init__(self, model: Any, path: tuple[Any, ...]):
        self.model, self.path = model, path
        self.name = checkpoint_name(path)

    @property
    def value(self) -> Any:
        """The array in `model.params`."""
        found = self.model.params
        for key in self.path:
            found = found[key.key]
        return found

    @value.setter
    def value(self, array: Any) -> None:
        placed = like(self.value, np.asarray(array))
        keys = tuple(key.key for key in self.path)
        self.model.params = replaced(self.model.params, keys, placed)

    @property
    def data(self) -> "Parameter":
        """The parameter itself."""
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape in PyTorch's layout."""
        return torch_shape(self.value.shape, self.path)

    @property
    def dtype(self) -> Any:
        """The dtype; PyTorch's for programs that work with it."""
        return for_reader(self.value.dtype)

    @property
    def device(self) -> Any:
        """The device, the first one of several; the host's memory has none."""
        devices: set[Any] = getattr(self.value, "devices", set)()
        first = min(devices, key=lambda device: device.id, default=None)
        return None if first is None else for_reader(first)

    @property
    def requires_grad(self) -> bool:
        """Whether the model is to be trained, see `Model.requires_grad_`."""
        return self.model.switches.trainable

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.model.requires_grad_(value)

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """The number of bytes."""
        return int(self.value.nbytes)

    def numel(self) -> int:
        """Returns the number of numbers."""
        return int(self.value.size)

    def element_size(self) -> int:
        """Returns the number of bytes of a number."""
        return int(self.dtype.itemsize)

    def size(self, dim: int | None = None) -> Any:
        """Returns the shape, or the length of an axis."""
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        """Returns whether it holds floating-point numbers."""
        return bool(jnp.issubdtype(self.dtype, jnp.floating))

    def detach(self) -> "Parameter":
        """Returns the parameter itself."""
        return self

    def cpu(self) -> "Parameter":
        """Returns the parameter itself."""
        return self

    def numpy(self) -> np.ndarray:
        """Returns an array of NumPy in PyTorch's layout."""
        return to_torch(np.asarray(self.value), self.path)

    def clone(self) -> np.ndarray:
        """Returns a copy as an array of NumPy in PyTorch's layout."""
        return self.numpy().copy()

    def copy_(self, value: Any) -> "Parameter":
        """Writes an array or a tensor in PyTorch's layout; returns the parameter itself.

        Raises:
            ValueError: it has another shape.
        """
        array = as_numpy(value)
        if array.shape != self.shape:
            raise ValueError(f"{self.name} must keep the shape {self.shape} (got {array.shape})")
        self.value = to_flax(array, self.path)
        return self

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        found = self.numpy()
        return found.astype(dtype) if dtype is not None else found

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, key: Any) -> np.ndarray:
        return cast(np.ndarray, self.numpy()[key].copy())

    def __setitem__(self, key: Any, value: Any) -> None:
        changed = self.clone()
        changed[key] = as_numpy(value)
        self.value = to_flax(changed, self.path)

    def __repr__(self) -> str:
        return f"Parameter({self.name}, {self.shape}, {self.dtype})"


class Embedding:
    """A text encoder's table of embeddings, called as PyTorch's module."""

    def __init__(self, weight: Parameter):
        self.weight = weight
        self.num_embeddings, self.embedding_dim = weight.shape

    def __call__(self, ids: Any) -> jax.Array:
        """Returns the embeddings of ids, ... d."""
        return jnp.take(jnp.asarray(self.weight.value), jnp.asarray(as_numpy(ids)), axis=0)

    def __repr__(self) -> str:
        return f"Embedding({self.num_embeddings}, {self.embedding_dim})"


def like(leaf: Any, array: np.ndarray) -> Any:
    """Returns an array in the dtype and on the devices of another, or in its eight bits."""
    if isinstance(leaf, Quantized | Arranged):
        return put(leaf.refilled(array), leaf.sharding)
    new = np.ascontiguousarray(array).astype(leaf.dtype)
    return new if isinstance(leaf, np.ndarray) else jax.device_put(new, leaf.sharding)
