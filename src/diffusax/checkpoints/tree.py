"""The two rules between a checkpoint's tensors and a parameter tree.

A name is the path through the tree joined by dots, with Flax's `kernel`, `scale` and `embedding`
called `weight`. Kernels are transposed: PyTorch has the output channels first, Flax last.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.checkpoints.tensors import Entry, TensorFile
from diffusax.models.network import Params

MAX_LISTED = 20
"""How many tensors an error names."""

# A process may have some 65,000 maps; what is smaller is not worth one.
_MIN_MAPPED = 2**16
_WEIGHTS = ("kernel", "scale", "embedding")


class Stored(Protocol):
    """A tensor in a file or a module; `path` says in which, for errors."""

    @property
    def path(self) -> Any: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=Stored)


def checkpoint_name(path: tuple[Any, ...]) -> str:
    """The name in the checkpoint of the leaf at a tree path."""
    *parents, leaf = (str(key.key) for key in path)
    return ".".join([*parents, "weight" if leaf in _WEIGHTS else leaf])


def to_flax(tensor: np.ndarray, path: tuple[Any, ...]) -> np.ndarray:
    """A PyTorch tensor in Flax's order of axes: OIHW -> HWIO, (out, in) -> (in, out)."""
    if path[-1].key != "kernel":
        return tensor
    return tensor.transpose(2, 3, 1, 0) if tensor.ndim == 4 else tensor.T


def to_torch(array: np.ndarray, path: tuple[Any, ...]) -> np.ndarray:
    """The inverse of `to_flax`."""
    if path[-1].key != "kernel":
        return array
    return array.transpose(3, 2, 0, 1) if array.ndim == 4 else array.T


def torch_shape(shape: tuple[int, ...], path: tuple[Any, ...]) -> tuple[int, ...]:
    """The shape in the checkpoint of a leaf of this shape."""
    return to_torch(np.broadcast_to(np.int8(0), shape), path).shape


def params_to_tensors(params: Params) -> dict[str, np.ndarray]:
    """The checkpoint's tensors, by name. Arrays come to the host one by one as they are used."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {checkpoint_name(path): to_torch(np.asarray(leaf), path) for path, leaf in leaves}


def load_params(
    module_class: type[nnx.Module],
    abstract_params: Params,
    files: Iterable[Path],
    *,
    dtype: Any = None,
    device: Any = None,
) -> Params:
    """The parameter tree, each tensor read, transposed, cast and put on the device by itself.

    Args:
        module_class: may have `legacy_names` (fragments that old files have instead), `key_prefix`
            (which some files leave out) and `ignored_keys` (suffixes of tensors to skip).
        abstract_params: shapes, as from `diffusax.models.network.abstract`.
        files: safetensors files.
        dtype: of the parameters; None keeps each tensor's own. Tensors of 8 bits are read only with
            a dtype: networks do not compute in them.
        device: a device or sharding for `jax.device_put`, or a function of a leaf's path and shape
            that gives one.

    Raises:
        ValueError: lists the tensors that are missing, unexpected, misshapen, there twice, or no
            floating-point numbers.
    """
    tensor_files = {path: TensorFile(path) for path in files}

    @contextlib.contextmanager
    def opened(entry: Entry) -> Iterator[np.ndarray]:
        file = tensor_files[entry.path]
        yield file.view(entry)
        file.release(entry)

    return fit_params(
        module_class,
        abstract_params,
        [file.entries for file in tensor_files.values()],
        opened,
        where=", ".join(map(str, tensor_files)),
        dtype=dtype,
        device=device,
    )


def fit_params(
    module_class: type[nnx.Module],
    abstract_params: Params,
    stored: Collection[Mapping[str, S]],
    opened: Callable[[S], AbstractContextManager[np.ndarray]],
    *,
    where: str,
    dtype: Any = None,
    device: Any = None,
) -> Params:
    """As `load_params`, from tensors that are stored anywhere.

    Args:
        module_class: see `load_params`.
        abstract_params: see `load_params`.
        stored: the tensors by name, in one or several parts.
        opened: a context in which one of them is an array.
        where: what holds them, for errors.
        dtype: see `load_params`.
        device: see `load_params`.

    Raises:
        ValueError: as `load_params`.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(abstract_params)
    wanted = {checkpoint_name(path): (path, leaf.shape) for path, leaf in leaves}
    found, twice = match_names(module_class, wanted, stored)
    _check(wanted, found, twice, where)
    _check_dtypes(wanted, found, dtype)

    def load(name: str) -> jax.Array:
        path, shape = wanted[name]
        with opened(found[name]) as view:
            tensor = to_flax(view.reshape(torch_shape(shape, path)), path)
            array = copied(tensor, dtype)
        return put_array(array, device(path, shape) if callable(device) else device)

    with ThreadPoolExecutor(2) as pool:
        arrays = list(pool.map(load, wanted))
    return jax.tree.unflatten(treedef, arrays)


def copied(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """A copy for JAX, cast; even where nothing changes, as JAX may keep an array of the host."""
    made = aligned_empty(array.shape, dtype or array.dtype)
    np.copyto(made, array, casting="unsafe")
    return made


def put_array(array: np.ndarray, device: Any) -> jax.Array:
    """The array on its device, or on those of this process: other processes see to theirs."""
    if isinstance(device, jax.sharding.NamedSharding) and device.mesh.size > 1:
        return jax.make_array_from_callback(array.shape, device, lambda index: array[index])
    return jax.device_put(array, device)


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array that starts on a page of memory, so that JAX keeps it as it is on CPU.

    One from `np.empty` would be copied, and what the copies leave behind is memory, too.
    """
    dtype = np.dtype(dtype)
    count = math.prod(shape)
    if count * dtype.itemsize < _MIN_MAPPED:
        return np.empty(shape, dtype)
    buffer = mmap.mmap(-1, max(1, count * dtype.itemsize))
    return np.frombuffer(buffer, dtype, count).reshape(shape)


def match_names(
    module_class: type[nnx.Module], wanted: Container[str], stored: Iterable[Mapping[str, S]]
) -> tuple[dict[str, S], list[str]]:
    """The tensors by the network's names for them, and the names that several tensors have."""
    legacy = getattr(module_class, "legacy_names", ())
    prefix = getattr(module_class, "key_prefix", "")
    ignored = getattr(module_class, "ignored_keys", ())
    found: dict[str, S] = {}
    twice = []
    for name, entry in (item for part in stored for item in part.items()):
        if ignored and name.endswith(ignored):
            continue
        for old, new in legacy:
            name = name.replace(old, new)
        if name not in wanted and prefix + name in wanted:
            name = prefix + name
        if name in found:
            twice.append(name)
        found[name] = entry
    return found, twice


def _check(
    wanted: Mapping[str, tuple[Any, tuple[int, ...]]],
    found: Mapping[str, Stored],
    twice: list[str],
    where: str,
) -> None:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} (has {entry.shape}, the config asks for {expected})"
        for name, entry in found.items()
        if name in wanted
        and _squeezed(entry.shape)
        != _squeezed(expected := torch_shape(wanted[name][1], wanted[name][0]))
    ]
    kinds = {
        "missing": missing,
        "unexpected": unexpected,
        "misshapen": misshapen,
        "there twice": twice,
    }
    if parts := [
        f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names
    ]:
        raise ValueError(f"{where} does not fit its config.json: {'; '.join(parts)}")


def _check_dtypes(wanted: Iterable[str], found: Mapping[str, Stored], dtype: Any) -> None:
    for name in wanted:
        entry = found[name]
        if not jnp.issubdtype(entry.dtype, jnp.floating):
            raise ValueError(
                f"{entry.path}: {name} holds {entry.dtype}, not floating-point numbers; quantised "
                "weights are not supported, so load the original checkpoint"
            )
        if entry.dtype.itemsize == 1 and dtype is None:
            raise ValueError(
                f"{entry.path}: {name} holds {entry.dtype}, in which networks do not compute; give "
                "a dtype to load it in, such as 'bfloat16'"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    return f"{shown} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A 1x1 convolution's shape as a linear layer's; old files have one for the other."""
    return shape[:2] if len(shape) == 4 and shape[2:] == (1, 1) else shape
