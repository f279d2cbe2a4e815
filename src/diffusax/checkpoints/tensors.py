"""Reads safetensors files tensor by tensor, and writes them."""

import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diffusax.boundary.files import written_whole

_DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Entry(NamedTuple):
    """The place of a tensor in a file: byte offset and length, dtype and shape.

    `shape` is that of `TensorFile.view`; of a transposed entry the file has the axes in reverse, of
    a swapped one the halves of the first axis in the other order.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: np.dtype
    shape: tuple[int, ...]
    transposed: bool = False
    swapped: bool = False
    scale: "Entry | None" = None
    """The place of the number that the tensor is to be multiplied by."""

    def transpose(self) -> "Entry":
        """Returns the entry with its axes in reverse."""
        return self._replace(shape=self.shape[::-1], transposed=not self.transposed)

    def swap(self) -> "Entry":
        """Returns the entry with the halves of its first axis, which is even, in reverse."""
        return self._replace(swapped=not self.swapped)

    def split(self, count: int) -> list["Entry"]:
        """Returns the parts of equal length along the first axis, which must have such parts."""
        return self.cut([self.shape[0] // count] * count)

    def cut(self, lengths: Sequence[int]) -> list["Entry"]:
        """Returns parts of these lengths along the first axis, which must be as long as all."""
        row, start, parts = self.nbytes // self.shape[0], self.offset, []
        for length in lengths:
            shape = (length, *self.shape[1:])
            parts.append(self._replace(offset=start, nbytes=length * row, shape=shape))
            start += length * row
        return parts


class TensorFile:
    """A memory-mapped safetensors file, whose pages are released as soon as they have been read.

    A mapped page counts as memory of the process while it stays. Without the release, loading a
    file would end with the weights twice in memory: in the mapping and on the device.
    """

    def __init__(self, path: Path):
        self.path = path
        self.entries = read_entries(path)
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def view(self, entry: Entry) -> np.ndarray:
        """Returns the tensor, valid until `release`; a copy only if swapped or multiplied.

        One that is multiplied is float32.
        """
        array = np.frombuffer(self._map, entry.dtype, math.prod(entry.shape), entry.offset)
        array = array.reshape(entry.shape[::-1] if entry.transposed else entry.shape)
        if entry.transposed:
            array = array.T
        if entry.swapped:
            array = np.roll(array, len(array) // 2, axis=0)
        if entry.scale is not None:
            array = array.astype(np.float32) * self.view(entry.scale).astype(np.float32).reshape(())
        return array

    def release(self, entry: Entry) -> None:
        """Returns the tensor's pages to the system."""
        if hasattr(mmap, "MADV_DONTNEED") and entry.nbytes:
            start = entry.offset - entry.offset % mmap.PAGESIZE
            self._map.madvise(mmap.MADV_DONTNEED, start, entry.offset + entry.nbytes - start)


def read_entries(path: Path) -> dict[str, Entry]:
    """Reads the header of a safetensors file, and returns the places of its tensors by name.

    The library checks the file. Its header is then parsed here, because the library does not tell
    where in the file a tensor is, which is needed to release its pages.

    Raises:
        ValueError: the file is truncated or not safetensors, or has a dtype that JAX lacks.
    """
    header, begin_of_data = _read_header(path)
    header.pop("__metadata__", None)
    entries = {}
    for name, info in header.items():
        if info["dtype"] not in _DTYPES:
            raise ValueError(f"{path}: {name} has dtype {info['dtype']}, which JAX does not have")
        begin, end = info["data_offsets"]
        dtype, shape = _DTYPES[info["dtype"]], tuple(info["shape"])
        entries[name] = Entry(path, begin_of_data + begin, end - begin, dtype, shape)
    return entries


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Reads all tensors of a safetensors file, by name.

    Raises:
        ValueError: the file is truncated or not safetensors, or has a dtype that JAX lacks.
    """
    file = TensorFile(path)
    return {name: file.view(entry).copy() for name, entry in file.entries.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the texts in the header of a safetensors file, by name.

    Raises:
        ValueError: the file is truncated or not safetensors.
    """
    header, _ = _read_header(path)
    return header.get("__metadata__") or {}


def read_places(places: Mapping[str, Entry]) -> dict[str, np.ndarray]:
    """Reads tensors in files by their names."""
    files = {path: TensorFile(path) for path in {entry.path for entry in places.values()}}
    return {name: files[entry.path].view(entry).copy() for name, entry in places.items()}


def write_tensors(
    path: Path, tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a safetensors file; `path` appears only when it is whole.

    metadata: texts for the file's header, by default {"format": "pt"}. The library writes several
        texts in any order.

    Raises:
        OSError: the file cannot be written; names it and says why.
    """
    # np.ascontiguousarray would give a scalar an axis.
    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    with written_whole(path) as partial:
        partial.touch()
        mode = partial.stat().st_mode
        try:
            save_file(contiguous, partial, metadata=dict(metadata or {"format": "pt"}))
        except SafetensorError as error:
            raise OSError(str(error)) from None
        # The library makes files that only their owner can read.
        partial.chmod(mode)


def copy_tensors(
    path: Path,
    tensors: Mapping[str, Sequence[Entry | np.ndarray]],
    *,
    dtype: Any = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Writes a safetensors file of tensors in other files; one after the other is in memory.

    Args:
        path: the file to write, which appears only when it is whole.
        tensors: for each name its parts, of one dtype, which are joined along the first axis.
        dtype: the dtype of the tensors; None copies them bit for bit.
        metadata: texts for the header, by default {"format": "pt"}.

    Raises:
        OSError: the file cannot be written; names it and says why.
        ValueError: dtype is None, and a tensor is to be multiplied by a number beside it.
    """
    check_unscaled(tensors, dtype)
    header: dict[str, Any] = {"__metadata__": dict(metadata or {"format": "pt"})}
    end = 0
    for name, parts in tensors.items():
        kind, shape = np.dtype(dtype or parts[0].dtype), list(parts[0].shape)
        if len(parts) > 1:
            shape[0] = sum(part.shape[0] for part in parts)
        begin, end = end, end + math.prod(shape) * kind.itemsize
        header[name] = {"dtype": _NAMES[kind], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    files: dict[Path, TensorFile] = {}
    with written_whole(path) as partial, partial.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for part in (part for parts in tensors.values() for part in parts):
            if isinstance(part, np.ndarray):
                out.write(part.astype(dtype or part.dtype).tobytes())
                continue
            if part.path not in files:
                files[part.path] = TensorFile(part.path)
            array = files[part.path].view(part)
            array = np.ascontiguousarray(array, dtype or array.dtype)
            out.write(array.reshape(-1).view(np.uint8).data)
            del array
            files[part.path].release(part)


def check_unscaled(tensors: Mapping[str, Sequence[Entry | np.ndarray]], dtype: Any) -> None:
    """Raises ValueError where tensors with a scale would be copied bit for bit."""
    for name, parts in tensors.items():
        for part in parts:
            if dtype is None and isinstance(part, Entry) and part.scale is not None:
                raise ValueError(
                    f"{part.path}: {name} is {part.dtype} with a scale, which cannot be copied as "
                    "it is; give a dtype, such as bfloat16"
                )


def split_into_shards(sizes: Mapping[str, int], limit: int) -> Iterator[list[str]]:
    """Groups names, in order, so that no group of several exceeds `limit` bytes."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if group and total + size > limit:
            yield group
            group, total = [], 0
        group.append(name)
        total += size
    yield group


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Returns the header of a safetensors file, and the byte at which the data begin."""
    try:
        with safe_open(path, framework="numpy"):
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            return json.loads(file.read(length)), 8 + length
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} is not a whole safetensors file ({error}); download it again"
        ) from None
