"""The rules between a checkpoint's tensors and a parameter tree.

A name is the path through the tree joined by dots, with Flax's `kernel`, `scale` and `embedding`
called `weight`. Kernels are transposed: PyTorch has the output channels first, Flax last. A
`frame_kernel` is what a causal convolution over videos multiplies the newest frame by: the last
slice of a kernel that is as long in time as it is high. Its other slices are zeros when it is
written, as they see only the padding before an image.
"""

import contextlib
import math
import mmap
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from diffusax.checkpoints.entries import Kept
from diffusax.checkpoints.tensors import Entry, TensorFile
from diffusax.models.arranged import arranged_tree
from diffusax.models.network import Params
from diffusax.models.parameter_tree import fill, ordered_leaves, path_name, replaces
from diffusax.models.quantized import (
    Quantized,
    Stored,
    channels_at_once,
    quantize_parts,
    quantizes,
    stored_dtype,
)
from diffusax.runtime.devices.mesh import Rules, tree_sharding

MAX_LISTED = 15
"""The number of tensors that an error names."""

# A process may have some 65,000 maps; smaller arrays are not worth one.
_MIN_MAPPED = 2**16
KERNELS = ("kernel", "frame_kernel")
"""The names of parameters that are transposed."""
_WEIGHTS = (*KERNELS, "scale", "centred_scale", "embedding")
_AT_ONCE = 2**20
"""The numbers of a tensor that are copied at once."""


class StoredTensor(Protocol):
    """A tensor in a file or a module; `path` names which one in errors."""

    @property
    def path(self) -> Any: ...
    @property
    def dtype(self) -> np.dtype: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


S = TypeVar("S", bound=StoredTensor)
Read = Callable[[S, int, Any], Iterable[np.ndarray]]
"""Returns the parts of a stored tensor with so many rows, or other ones, one after the other.

A part is valid until the next one is asked for. Numbers that are encoded come in the dtype given.
"""


def checkpoint_name(path: tuple[Any, ...]) -> str:
    """Returns the name in the checkpoint of the leaf at a tree path."""
    *parents, leaf = (str(key.key) for key in path)
    return ".".join([*parents, "weight" if leaf in _WEIGHTS else leaf])


def to_flax(tensor: np.ndarray, path: tuple[Any, ...]) -> np.ndarray:
    """Transposes a PyTorch tensor to Flax's order: OIHW -> HWIO, (out, in) -> (in, out)."""
    if path[-1].key == "frame_kernel":
        return tensor[:, :, -1].transpose(2, 3, 1, 0)
    if path[-1].key != "kernel":
        return tensor
    return tensor.transpose(*range(2, tensor.ndim), 1, 0)


def to_torch(array: np.ndarray, path: tuple[Any, ...]) -> np.ndarray:
    """Transposes an array back to PyTorch's order."""
    if path[-1].key == "frame_kernel":
        whole = np.zeros(torch_shape(array.shape, path), array.dtype)
        whole[:, :, -1] = array.transpose(3, 2, 0, 1)
        return whole
    if path[-1].key != "kernel":
        return array
    return array.transpose(-1, -2, *range(array.ndim - 2))


def torch_shape(shape: tuple[int, ...], path: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the shape in the checkpoint of a leaf of this shape."""
    if path[-1].key == "frame_kernel":
        return shape[3], shape[2], shape[0], *shape[:2]
    return to_torch(np.broadcast_to(np.int8(0), shape), path).shape


def params_to_tensors(params: Params) -> dict[str, np.ndarray]:
    """Returns the checkpoint's tensors by name. Arrays come to the host one by one when used."""
    leaves = ordered_leaves(params)
    return {checkpoint_name(path): to_torch(np.asarray(leaf), path) for path, leaf in leaves}


def load_entries(
    module_class: type[nnx.Module],
    abstract_params: Params,
    stored: Collection[Mapping[str, Entry]],
    *,
    where: str,
    dtype: Any = None,
    device: Any = None,
    weights: Stored | None = None,
    drawn: Mapping[str, np.ndarray] | None = None,
) -> Params:
    """Loads a parameter tree like `fit_params`, from places in files, see `read_entries`."""
    paths = {entry.path for part in stored for entry in part.values()}
    tensor_files = {path: TensorFile(path) for path in paths}

    def read(entry: Entry, count: int, dtype: Any) -> Iterator[np.ndarray]:
        return tensor_files[entry.path].rows(entry, count, dtype)

    @contextlib.contextmanager
    def kept(entry: Entry) -> Iterator[Kept | None]:
        file = tensor_files[entry.path]
        yield file.kept(entry)
        file.release(entry)

    options: dict[str, Any] = {"where": where, "dtype": dtype, "device": device}
    options |= {"weights": weights, "kept": kept, "drawn": drawn}
    return fit_params(module_class, abstract_params, stored, read, **options)


def fit_params(
    module_class: type[nnx.Module],
    abstract_params: Params,
    stored: Collection[Mapping[str, S]],
    read: Read[S],
    *,
    where: str,
    dtype: Any = None,
    device: Any = None,
    weights: Stored | None = None,
    kept: Callable[[S], AbstractContextManager[Kept | None]] | None = None,
    drawn: Mapping[str, np.ndarray] | None = None,
) -> Params:
    """Loads a parameter tree: reads, transposes, casts and places one tensor after the other.

    Args:
        module_class: the network's class, which may have `legacy_names` (fragments of names in old
            files), `key_prefix` (which some files leave out), `ignored_keys` (suffixes of
            tensors to skip, unless the network has them) and `ignored_parts` (beginnings of such).
        abstract_params: the tree as shapes, as `Network.shapes` returns it.
        stored: the tensors by name, in one or several parts.
        read: reads a stored tensor in parts.
        where: the name of what holds them, for errors.
        dtype: the dtype of the parameters; None keeps each tensor's own. Tensors of 8 bits are read
            only with a dtype, because networks do not compute in 8 bits.
        device: a device or sharding for `jax.device_put`, or a function of a leaf's path and shape
            that returns one.
        weights: what the kernels inside of blocks are stored as, see `quantizes`; None for dtype.
            "file" leaves kernels as they are in their file, those of fewer bits in eight, where
            their numbers stay the same.
        kept: returns a context in which a stored tensor is of eight bits, or None.
        drawn: arrays in Flax's order by name, which stand for tensors that are not stored.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, duplicated, or not
            floating-point numbers; lists them.
    """
    wanted, drawn = wanted_leaves(abstract_params), drawn or {}
    found = fitted(module_class, abstract_params, stored, where=where, drawn=drawn)
    _check_dtypes(found, found, dtype)

    def alike(name: str, kind: Stored) -> bool:
        # Numbers of another dtype would be unpacked in vain.
        return kind == "file" or stored_dtype(kind) == found[name].dtype

    def load(name: str) -> Any:
        path, shape = wanted[name]
        place = device(path, shape) if callable(device) else device
        kind = weights if weights == "file" or quantizes(path_name(path), shape) else None
        if name in drawn:
            own = np.dtype(np.float32) if dtype is None else dtype
            if kind is None or kind == "file":
                return put(copied(drawn[name], own), place)
            parts: Iterable[np.ndarray] = [drawn[name]]
            return put(quantize_parts(parts, shape, kind, own, empty=aligned_empty), place)
        if kind is not None and kept is not None and path[-1].key == "kernel" and alike(name, kind):
            with kept(found[name]) as stored:
                kernel = stored and _as_stored(stored, path, shape, dtype, kind)
            if kernel is not None:
                return put(kernel, place)
        own = found[name].dtype if dtype is None else dtype
        row = math.prod(torch_shape(shape, path)[1:])
        if kind is None or kind == "file":
            parts = read(found[name], max(1, _AT_ONCE // max(row, 1)), own)
            return put(_joined(parts, path, shape, own), place)
        parts = read(found[name], channels_at_once(row), np.float32)
        turned = _turned(parts, path, shape)
        return put(quantize_parts(turned, shape, kind, own, empty=aligned_empty), place)

    with ThreadPoolExecutor(2) as pool:
        arrays = list(pool.map(load, wanted))
    return fill(abstract_params, arrays)


def _turned(
    parts: Iterable[np.ndarray], path: tuple[Any, ...], shape: tuple[int, ...]
) -> Iterator[np.ndarray]:
    """Yields the parts of a tensor in Flax's order, see `to_flax`."""
    inner = torch_shape(shape, path)[1:]
    for part in parts:
        yield to_flax(part.reshape(-1, *inner), path)


def _joined(
    parts: Iterable[np.ndarray], path: tuple[Any, ...], shape: tuple[int, ...], dtype: Any
) -> np.ndarray:
    """Returns the whole of a tensor's parts, copied and cast for JAX, see `copied`."""
    made, start = aligned_empty(shape or (1,), dtype), 0
    for part in _turned(parts, path, shape):
        last = path[-1].key in KERNELS
        own = slice(start, start + part.shape[-1 if last else 0])
        np.copyto(made[..., own] if last else made[own], part, casting="unsafe")
        start = own.stop
    return made.reshape(shape)


def _as_stored(
    kept: Kept, path: tuple[Any, ...], shape: tuple[int, ...], dtype: Any, weights: Stored
) -> Quantized | None:
    """Returns a kernel with the numbers of its file; None where others are asked for."""
    by_blocks = kept.scale.ndim == 2 or kept.fine is not None or bool(kept.least)
    if weights != "file" and (by_blocks or (weights == "int8_convrot" and not kept.rotation)):
        return None
    if by_blocks and len(shape) != 2:
        return None
    values = to_flax(kept.values.reshape(torch_shape(shape, path)), path)
    # NumPy copies numbers of other libraries one by one, and bytes at once.
    numbers = copied(values.view(np.uint8)).view(values.dtype)
    scale, fine, least = jax.tree.map(_of_blocks, (kept.scale, kept.fine, kept.least))
    return Quantized(numbers, scale, np.dtype(dtype), kept.rotation, fine, least)


def _of_blocks(stored: np.ndarray) -> np.ndarray:
    """Returns scales with outputs last, those of blocks in 16 bits where they are the same so."""
    scales = np.array(stored.T, order="C")
    if scales.ndim < 2 or scales.dtype.itemsize < 4:
        return scales.astype(np.float32) if scales.ndim < 2 else scales
    short = (scales.astype(dtype) for dtype in (np.float16, ml_dtypes.bfloat16))
    with np.errstate(over="ignore"):
        same = (x for x in short if np.array_equal(x.astype(np.float32), scales))
        return next(same, scales)


def fitted(
    module_class: type[nnx.Module],
    abstract_params: Params,
    stored: Iterable[Mapping[str, S]],
    *,
    where: str,
    drawn: Container[str] = (),
) -> dict[str, S]:
    """Returns the stored tensors by the names that the network gives them.

    The arguments are those of `fit_params`.

    Raises:
        ValueError: tensors are missing, unexpected, of another shape, or duplicated; lists them.
    """
    wanted = wanted_leaves(abstract_params)
    found, twice = match_names(module_class, wanted, stored)
    found = {name: entry for name, entry in found.items() if name not in drawn}
    _check({n: leaf for n, leaf in wanted.items() if n not in drawn}, found, twice, where)
    return found


def torch_shapes(abstract_params: Params) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of a network's tensors in a checkpoint, by name."""
    return {
        n: torch_shape(shape, path) for n, (path, shape) in wanted_leaves(abstract_params).items()
    }


def copied(array: np.ndarray, dtype: Any = None) -> np.ndarray:
    """Copies and casts an array for JAX, even if nothing changes: JAX may keep the host's array."""
    made = aligned_empty(array.shape, dtype or array.dtype)
    np.copyto(made, array, casting="unsafe")
    return made


def put_array(array: np.ndarray, device: Any) -> jax.Array:
    """Puts an array on its device, or on this process's devices; other processes do the same."""
    if isinstance(device, jax.sharding.NamedSharding) and device.mesh.size > 1:
        return jax.make_array_from_callback(array.shape, device, lambda index: array[index])
    return jax.device_put(array, device)


class MeshPlace(NamedTuple):
    """The place of a parameter on a mesh, in the order in which its devices read it."""

    mesh: Mesh
    name: str
    """The path through the tree, joined by dots."""
    rules: Rules
    """The network's rules."""

    def put(self, leaf: Any) -> Any:
        """Puts a parameter on the host on the devices."""
        tree = arranged_tree(self.mesh, {self.name: leaf}, self.rules)
        return jax.tree.map(put_array, tree, tree_sharding(self.mesh, tree, self.rules))[self.name]


def put(leaf: Any, place: Any) -> Any:
    """Puts an array, or a kernel that stands for one, on the host on its devices.

    place: see `put_array`, or a `MeshPlace`.
    """
    if isinstance(place, MeshPlace):
        return place.put(leaf)
    if not replaces(leaf):
        return put_array(leaf, place)
    if place is None:
        return jax.device_put(leaf)
    return jax.tree.map(put_array, leaf, leaf.places(place))


def aligned_empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Makes an array that starts on a page of memory, so that JAX on CPU keeps it without a copy.

    JAX would copy an array from `np.empty`, and the copies would leave unused memory behind.
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
    """Returns the tensors by the network's names, and the names that several tensors have."""
    legacy = getattr(module_class, "legacy_names", ())
    prefix = getattr(module_class, "key_prefix", "")
    ignored = getattr(module_class, "ignored_keys", ())
    others = getattr(module_class, "ignored_parts", ())
    found: dict[str, S] = {}
    twice = []
    for stored_name, entry in (item for part in stored for item in part.items()):
        name = stored_name
        for old, new in legacy:
            name = name.replace(old, new)
        if name not in wanted and prefix + name in wanted:
            name = prefix + name
        skipped = stored_name.endswith(ignored) or stored_name.startswith(others)
        if skipped and name not in wanted:
            continue
        if name in found:
            twice.append(name)
        found[name] = entry
    return found, twice


def wanted_leaves(abstract_params: Params) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """Returns the path and the shape of each leaf, by its name in the checkpoint."""
    leaves = ordered_leaves(abstract_params)
    return {checkpoint_name(path): (path, leaf.shape) for path, leaf in leaves}


def _check(
    wanted: Mapping[str, tuple[Any, tuple[int, ...]]],
    found: Mapping[str, StoredTensor],
    twice: list[str],
    where: str,
) -> None:
    missing = [name for name in wanted if name not in found]
    unexpected = [name for name in found if name not in wanted]
    misshapen = [
        f"{name} (has {entry.shape}, the config asks for {torch_shape(shape, path)})"
        for name, entry in found.items()
        if name in wanted
        for path, shape in [wanted[name]]
        if is_misshapen(entry, path, shape)
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


def is_misshapen(entry: StoredTensor, path: tuple[Any, ...], shape: tuple[int, ...]) -> bool:
    """Returns whether a stored tensor is not of the shape of the leaf at a path."""
    return _squeezed(entry.shape) != _squeezed(torch_shape(shape, path))


def _check_dtypes(wanted: Iterable[str], found: Mapping[str, StoredTensor], dtype: Any) -> None:
    for name in wanted:
        entry = found[name]
        encoding = getattr(entry, "encoding", None)
        if encoding is not None and dtype is None:
            raise ValueError(
                f"{entry.path}: {name} is {encoding.name}, in which networks do not compute; give "
                "a dtype to load it in, such as 'bfloat16'"
            )
        if encoding is None and not jnp.issubdtype(entry.dtype, jnp.floating):
            raise ValueError(
                f"{entry.path}: {name} holds {entry.dtype}, not floating-point numbers; quantised "
                "weights are not supported, so load the original checkpoint"
            )
        if encoding is None and entry.dtype.itemsize == 1 and dtype is None:
            raise ValueError(
                f"{entry.path}: {name} holds {entry.dtype}, in which networks do not compute; give "
                "a dtype to load it in, such as 'bfloat16'"
            )


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:MAX_LISTED])
    return f"{shown} and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else shown


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Returns a shape without axes of one: old files mix 1x1 convolutions and linear layers, and
    GGUF files may lack first axes of one.
    """
    return tuple(length for length in shape if length != 1)
