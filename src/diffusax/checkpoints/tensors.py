"""Reads safetensors and GGUF files tensor by tensor, and writes safetensors."""

import functools
import json
import math
import mmap
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diffusax.boundary.files import written_whole
from diffusax.checkpoints.entries import Entry as Entry
from diffusax.checkpoints.entries import Kept
from diffusax.checkpoints.gguf import is_gguf, read_gguf

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
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_FLOAT8 = (_DTYPES["F8_E4M3"], _DTYPES["F8_E5M2"])
_AT_ONCE = 2**20
"""The numbers of an encoded tensor that are decoded at once."""
_AROUND = 2**21
"""The bytes beside those that are read that Linux may map with them, a large page."""


class TensorFile:
    """A memory-mapped file of tensors, whose pages are released as soon as they have been read.

    A mapped page counts as memory of the process while it stays. Without the release, loading a
    file would end with the weights twice in memory: in the mapping and on the device.
    """

    def __init__(self, path: Path):
        self.path = path
        self._others: dict[Path, TensorFile] = {}
        if not path.stat().st_size:
            raise _not_whole(path, "it is empty")
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    @functools.cached_property
    def entries(self) -> dict[str, Entry]:
        """The places of the tensors by name, see `read_entries`."""
        return read_entries(self.path)

    def view(self, entry: Entry, dtype: Any = None) -> np.ndarray:
        """Returns the tensor, valid until `release`; a copy only if swapped or encoded.

        dtype: what an encoded tensor is rounded to, once; float32 by default. Others keep theirs.
        """
        if entry.encoding is not None:
            array = self._decoded(entry, dtype or np.float32)
        else:
            array = np.frombuffer(self._map, entry.dtype, math.prod(entry.shape), entry.offset)
        array = array.reshape(entry.shape[::-1] if entry.transposed else entry.shape)
        if entry.transposed:
            array = array.T
        return np.roll(array, len(array) // 2, axis=0) if entry.swapped else array

    def rows(self, entry: Entry, count: int, dtype: Any = None) -> Iterator[np.ndarray]:
        """Yields a tensor in parts of so many rows, whose pages are released after each.

        A part is valid until the next one. A tensor whose rows do not lie in their order comes
        whole. dtype: see `view`.
        """
        parts = [entry]
        if entry.shape and not (entry.transposed or entry.swapped):
            starts = range(0, entry.shape[0], count)
            parts = entry.cut([min(count, entry.shape[0] - start) for start in starts])
        for part in parts:
            yield self.view(part, dtype)
            self.release(part)

    def kept(self, entry: Entry) -> Kept | None:
        """Returns a tensor of eight bits as it is stored, valid until `release`; None for others.

        Of tensors in float8 without a scale, the scale is one. A transposed matrix has what its
        rows share along the other axis, and is None where that is more than one number.
        """
        shape = entry.shape[::-1] if entry.transposed else entry.shape
        if entry.encoding is not None:
            own = self._stored(entry), self._beside, entry.start, shape
            found = entry.encoding.keep(*own)
            if found is not None and not np.may_share_memory(found.values, own[0]):
                self.release(entry)
        elif entry.dtype in _FLOAT8:
            stored = np.frombuffer(self._map, entry.dtype, math.prod(shape), entry.offset)
            found = Kept(stored.reshape(shape), np.ones((), np.float32))
        else:
            return None
        if found is None:
            return None
        values, scale, rotation, fine, least = found
        if entry.transposed:
            by_rows = scale.ndim or rotation or fine is not None or least
            return None if by_rows else found._replace(values=values.T)
        if not entry.swapped:
            return found

        def swap(x: np.ndarray) -> np.ndarray:
            return np.roll(x, len(x) // 2, axis=0) if x.ndim else x

        small = None if fine is None else swap(fine)
        return Kept(swap(values), swap(scale), rotation, small, tuple(map(swap, least)))

    def release(self, entry: Entry) -> None:
        """Returns the tensor's pages to the system."""
        if hasattr(mmap, "MADV_DONTNEED") and entry.nbytes:
            start = max(entry.offset - entry.offset % mmap.PAGESIZE - _AROUND, 0)
            end = min(entry.offset + entry.nbytes + _AROUND, len(self._map))
            self._map.madvise(mmap.MADV_DONTNEED, start, end - start)
        for own in () if entry.encoding is None else entry.encoding.beside:
            self._file(own).release(own)

    def _stored(self, entry: Entry) -> np.ndarray:
        """Returns all that is stored of the tensor of which an encoded entry is a part."""
        return np.frombuffer(
            self._map, entry.dtype, entry.nbytes // entry.dtype.itemsize, entry.offset
        )

    def _decoded(self, entry: Entry, dtype: Any) -> np.ndarray:
        """Returns the numbers of an encoded entry in one row; few of them are float32 at once."""
        assert entry.encoding is not None
        stored, count = self._stored(entry), math.prod(entry.shape)
        made = np.empty(count, dtype)
        row = count // max(entry.shape[-1 if entry.transposed else 0], 1) if entry.shape else 1
        step = max(1, _AT_ONCE // max(row, 1)) * max(row, 1)
        for first in range(0, count, step):
            last = min(first + step, count)
            own = entry.start + first, entry.start + last
            # Broken scales make infinities, which are no warning's matter.
            with np.errstate(all="ignore"):
                made[first:last] = entry.encoding.decode(stored, self._beside, *own)
        # What is decoded would otherwise be in memory twice until its user is done.
        self.release(entry)
        return made

    def _beside(self, entry: Entry) -> np.ndarray:
        return self._file(entry).view(entry)

    def _file(self, entry: Entry) -> "TensorFile":
        """Returns the file that a scale or table is in, which may be another shard."""
        if entry.path == self.path:
            return self
        if entry.path not in self._others:
            self._others[entry.path] = TensorFile(entry.path)
        return self._others[entry.path]


def read_entries(path: Path) -> dict[str, Entry]:
    """Reads the header of a safetensors or GGUF file: the places of its tensors by name.

    The library checks safetensors. Their header is then parsed here, because the library does not
    tell where in the file a tensor is, which is needed to release its pages.

    Raises:
        ValueError: the file is truncated or neither of both, or has a dtype that JAX lacks.
    """
    if is_gguf(path):
        return read_gguf(path)[0]
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
    """Reads all tensors of a file, by name.

    Raises:
        ValueError: the file is truncated or not safetensors, or has a dtype that JAX lacks.
    """
    file = TensorFile(path)
    return {name: file.view(entry).copy() for name, entry in file.entries.items()}


def read_metadata(path: Path) -> dict[str, str]:
    """Reads the texts in the header of a file, by name.

    Raises:
        ValueError: the file is truncated, or neither safetensors nor GGUF.
    """
    if is_gguf(path):
        return read_gguf(path)[1]
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
        ValueError: dtype is None, and a tensor is encoded, such as in eight bits with a scale.
    """
    check_copyable(tensors, dtype)
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
            array = files[part.path].view(part, dtype)
            array = np.ascontiguousarray(array, dtype or array.dtype)
            out.write(array.reshape(-1).view(np.uint8).data)
            del array
            files[part.path].release(part)


def check_copyable(tensors: Mapping[str, Sequence[Entry | np.ndarray]], dtype: Any) -> None:
    """Raises ValueError where encoded tensors would be copied bit for bit."""
    for name, parts in tensors.items():
        for part in parts:
            if dtype is None and isinstance(part, Entry) and part.encoding is not None:
                raise ValueError(
                    f"{part.path}: {name} is {part.encoding.name}, which cannot be copied as it "
                    "is; give a dtype, such as bfloat16"
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
        raise _not_whole(path, error) from None


def _not_whole(path: Path, reason: Any) -> ValueError:
    return ValueError(f"{path} is not a whole safetensors file ({reason}); download it again")
