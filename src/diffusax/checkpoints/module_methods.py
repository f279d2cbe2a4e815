"""A model's parameters under PyTorch's names and in its layout, as modules of PyTorch have them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.files import write_json
from diffusax.boundary.tensors import as_numpy, for_reader
from diffusax.checkpoints.networks import check_saveable, config_of
from diffusax.checkpoints.tree import (
    MAX_LISTED,
    checkpoint_name,
    match_names,
    params_to_tensors,
    to_flax,
    to_torch,
    torch_shape,
)
from diffusax.models.encoders.token_table import has_table, replace_table
from diffusax.models.network import Model


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

    def __init__(self, model: Model, path: tuple[Any, ...]):
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
        placed = _like(self.value, np.asarray(array))

        def replaced(tree: Any, path: tuple[Any, ...]) -> Any:
            if not path:
                return placed
            return {**tree, path[0].key: replaced(tree[path[0].key], path[1:])}

        self.model.params = replaced(self.model.params, self.path)

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


class NamedParameters:
    """The methods of a model that give and take its parameters by PyTorch's names."""

    def state_dict(self: Any) -> dict[str, np.ndarray]:
        """Returns the parameters by their names in the checkpoint, in PyTorch's layout.

        The arrays are NumPy's: {k: torch.tensor(v) for k, v in state.items()} is what a module of
        PyTorch loads.

        Raises:
            ValueError: the model is a module of PyTorch, or was freed.
        """
        check_saveable(self)
        return params_to_tensors(self.params)

    def load_state_dict(
        self: Any, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """Takes parameters by name, arrays or tensors in PyTorch's layout, in their present dtype.

        Args:
            state_dict: the parameters.
            strict: whether a missing or unknown name is an error.
            assign: accepted, as PyTorch's argument.

        Raises:
            ValueError: names are missing or unknown, or a shape differs; lists them.
        """
        leaves, treedef = jax.tree_util.tree_flatten_with_path(self.params)
        names = [checkpoint_name(path) for path, _ in leaves]
        held = {name: as_numpy(value) for name, value in state_dict.items()}
        found, _ = match_names(self.network.module_class, names, [cast(Any, held)])
        missing = [name for name in names if name not in found]
        unknown = [name for name in found if name not in names]
        misshapen = [
            f"{name} (has {found[name].shape}, not {torch_shape(leaf.shape, path)})"
            for name, (path, leaf) in zip(names, leaves)
            if name in found and found[name].shape != torch_shape(leaf.shape, path)
        ]
        faults = {"misshapen": misshapen} | (
            {"missing": missing, "unexpected": unknown} if strict else {}
        )
        if told := [f"{kind}: {', '.join(n[:MAX_LISTED])}" for kind, n in faults.items() if n]:
            raise ValueError(f"state_dict does not fit {self.class_name}; {'; '.join(told)}")
        self.params = jax.tree.unflatten(
            treedef,
            [
                _like(leaf, to_flax(cast(Any, found[name]), path)) if name in found else leaf
                for name, (path, leaf) in zip(names, leaves)
            ],
        )
        return IncompatibleKeys(missing, unknown)

    def parameters(self: Any, recurse: bool = True) -> Iterator[Parameter]:
        """Yields the parameters, see `Parameter`; `model.params` is the tree that JAX uses."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(
        self: Any, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """Yields the names and the parameters."""
        start = f"{prefix}." if prefix else ""
        leaves, _ = jax.tree_util.tree_flatten_with_path(self.params)
        for path, _ in leaves:
            parameter = Parameter(self, path)
            yield f"{start}{parameter.name}", parameter

    def buffers(self: Any, recurse: bool = True) -> Iterator[Parameter]:
        """Yields nothing: what PyTorch holds as buffers is computed, or a parameter."""
        return iter(())

    def named_buffers(self: Any, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Parameter]]:
        """Yields nothing, see `buffers`."""
        return iter(())

    def get_parameter(self: Any, target: str) -> Parameter:
        """Returns the parameter of a name.

        Raises:
            AttributeError: there is none.
        """
        found = dict(self.named_parameters())
        if target not in found:
            raise AttributeError(f"{self.class_name} has no parameter {target!r}")
        return found[target]

    def get_input_embeddings(self: Any) -> Embedding:
        """Returns the table of a text encoder's token embeddings.

        `weight` is a parameter, into which rows can be written.

        Raises:
            ValueError: the model reads no tokens.
        """
        for name, parameter in self.named_parameters():
            if name.endswith(("token_embedding.weight", "embed_tokens.weight", "shared.weight")):
                return Embedding(parameter)
        raise ValueError(f"{self.class_name} has no table of token embeddings")

    def resize_token_embeddings(
        self: Any,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> Embedding:
        """Gives a CLIP text encoder's table as many rows, and returns the table.

        New rows are the mean of the others, which programs overwrite.

        Args:
            new_num_tokens: the number of rows, such as len(tokenizer); None for the present one.
            pad_to_multiple_of: the number that the rows are filled up to a multiple of.
            mean_resizing: accepted, as transformers' argument.

        Raises:
            ValueError: the model is no CLIP text encoder of diffusax's own.
        """
        if not has_table(self):
            raise ValueError(f"{self.class_name} is no CLIP text encoder, whose table can grow")
        table = self.get_input_embeddings().weight
        count = len(table) if new_num_tokens is None else int(new_num_tokens)
        if pad_to_multiple_of:
            count = -(-count // pad_to_multiple_of) * pad_to_multiple_of
        before = table.numpy()
        if count != len(before):
            mean = before.astype(np.float32).mean(0, keepdims=True)
            more = np.repeat(mean, max(count - len(before), 0), axis=0)
            rows = np.concatenate([before[:count], more.astype(before.dtype)])
            replace_table(self, _like(table.value, rows))
        return self.get_input_embeddings()

    def to_json_string(self: Any) -> str:
        """Returns the contents of config.json."""
        return json.dumps(config_of(self.network), indent=2, sort_keys=True) + "\n"

    def save_config(self: Any, save_directory: str | Path, **_: Any) -> None:
        """Writes config.json into a folder."""
        Path(save_directory).mkdir(parents=True, exist_ok=True)
        write_json(Path(save_directory) / "config.json", config_of(self.network))


def _like(leaf: Any, array: np.ndarray) -> Any:
    """Returns an array in the dtype and on the devices of another."""
    new = np.ascontiguousarray(array).astype(leaf.dtype)
    return new if isinstance(leaf, np.ndarray) else jax.device_put(new, leaf.sharding)
