"""Finds the tensors in a file of PyTorch's `torch.save` without PyTorch, and without running code.

Such a file is a zip archive (PyTorch 1.6 and newer): `data.pkl`, a pickle that says what is saved,
and beside it each storage of numbers, uncompressed. Older files are some pickles in a row with the
storages after them (PyTorch's torch/serialization.py, _save and _legacy_save). A pickle is a
program that may call any function. Here every function and class in it is one inert object, except
for the two that say where a tensor's numbers lie, so that nothing can be called.

What is published in no other form is read so: networks that measure, and Wan's autoencoders and
text encoder. Checkpoints are written as safetensors only.
"""

import collections
import io
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from diffusax.checkpoints.entries import Entry

_DTYPES = {
    "DoubleStorage": np.dtype(np.float64),
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "ShortStorage": np.dtype(np.int16),
    "CharStorage": np.dtype(np.int8),
    "ByteStorage": np.dtype(np.uint8),
    "BoolStorage": np.dtype(np.bool_),
}
_LARGEST_PICKLE = 2**26
"""The bytes that the description of tensors may have; those of the largest networks have 1%."""
_MAGIC, _PROTOCOL = 0x1950A86A20F9469CFC6C, 1001
"""The numbers with which an older file begins."""
_HEADER = struct.Struct("<26xHH")
"""Of a file's header in the archive: the lengths of its name and of what follows the name."""


class _Storage(NamedTuple):
    """The numbers of one or more tensors in a row."""

    offset: int
    nbytes: int
    dtype: np.dtype


class _Inert:
    """Stands for everything in a pickle that is no tensor; it takes all calls and does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __call__(self, *_: Any, **__: Any) -> "_Inert":
        return self

    def __setstate__(self, state: Any) -> None: ...

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def append(self, item: Any) -> None: ...

    def extend(self, items: Any) -> None: ...

    def add(self, item: Any) -> None: ...


class _Known(_Inert):
    """What describes tensors, which a pickle can call but not change."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def __call__(self, *args: Any, **_: Any) -> Any:
        return self._run(*args)


class _Kind(NamedTuple):
    """The kind of a storage's numbers; NumPy's own objects could be changed by a pickle."""

    dtype: np.dtype


def read_torch_file(path: Path) -> dict[str, Entry]:
    """Returns the places of the tensors in a file of `torch.save`, by their names.

    Names in dictionaries inside of each other are joined by dots, as "state_dict.fc1.weight".

    Raises:
        ValueError: the file is not whole, or no file of PyTorch's, or holds a tensor whose numbers
            do not lie in their order; says which.
    """
    try:
        with path.open("rb") as file:
            if file.read(2) != b"PK":
                return _read_older(path, file)
            with zipfile.ZipFile(file) as archive:
                return _read(path, archive, file)
    except (zipfile.BadZipFile, EOFError, struct.error, OSError) as error:
        raise ValueError(
            f"{path} is not a whole file of PyTorch's ({error}); download it again"
        ) from None
    except _MALFORMED as error:
        raise ValueError(f"{path} holds a pickle that cannot be read ({error})") from None


_MALFORMED = (
    *(pickle.UnpicklingError, KeyError, IndexError, TypeError, AttributeError, ImportError),
    *(UnicodeDecodeError, OverflowError, RecursionError, MemoryError),
)
"""What a broken pickle may raise while it is read."""


def _read(path: Path, archive: zipfile.ZipFile, file: Any) -> dict[str, Entry]:
    infos = {info.filename: info for info in archive.infolist()}
    name = next((name for name in infos if name.endswith("/data.pkl")), None)
    if name is None:
        raise zipfile.BadZipFile("it has no data.pkl")
    folder = name.removesuffix("data.pkl")
    if infos[name].file_size > _LARGEST_PICKLE:
        raise zipfile.BadZipFile(f"its data.pkl has {infos[name].file_size} bytes")
    order = f"{folder}byteorder"
    if order in infos and archive.read(order) != b"little":
        raise zipfile.BadZipFile("its numbers are big-endian")

    def storage(key: str, dtype: np.dtype) -> _Storage:
        info = infos[f"{folder}data/{key}"]
        if info.compress_type != zipfile.ZIP_STORED:
            raise zipfile.BadZipFile("its numbers are compressed")
        file.seek(info.header_offset)
        lengths = _HEADER.unpack(file.read(_HEADER.size))
        offset = info.header_offset + _HEADER.size + sum(lengths)
        return _Storage(offset, info.file_size, dtype)

    found = _Unpickler(io.BytesIO(archive.read(name)), path, storage).load()
    return dict(_named(found)) if isinstance(found, Mapping) else {}


def _read_older(path: Path, file: Any) -> dict[str, Entry]:
    """Reads a file of PyTorch before 1.6, whose storages come after all that says what they are."""
    dtypes: dict[str, np.dtype] = {}
    places: dict[str, _Storage] = {}

    def load(storage: Callable[[str, np.dtype], _Storage]) -> Any:
        return _Unpickler(file, path, storage).load()

    def anywhere(key: str, dtype: np.dtype) -> _Storage:
        dtypes[key] = dtype
        return _Storage(0, 2**62, dtype)

    file.seek(0)
    if [load(anywhere), load(anywhere)] != [_MAGIC, _PROTOCOL]:
        raise zipfile.BadZipFile("it begins otherwise")
    load(anywhere)
    start = file.tell()
    load(anywhere)
    keys = load(anywhere)
    if not isinstance(keys, list) or not {*keys} <= {*dtypes}:
        raise zipfile.BadZipFile("it does not list its numbers")
    offset, end = file.tell(), path.stat().st_size
    for key in keys:
        file.seek(offset)
        (count,) = struct.unpack("<q", file.read(8))
        places[key] = _Storage(offset + 8, count * dtypes[key].itemsize, dtypes[key])
        offset += 8 + places[key].nbytes
        if count < 0 or offset > end:
            raise zipfile.BadZipFile("its numbers are not all there")
    file.seek(start)
    found = load(lambda key, dtype: places[key]._replace(dtype=dtype))
    return dict(_named(found)) if isinstance(found, Mapping) else {}


class _Unpickler(pickle.Unpickler):
    """Reads a pickle in which nothing can be called but what describes tensors."""

    def __init__(self, file: Any, path: Path, storage: Callable[[str, np.dtype], _Storage]) -> None:
        super().__init__(file, encoding="utf-8")
        self._path, self._storage = path, storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Known(self._tensor)
        if (module, name) == ("torch._utils", "_rebuild_parameter"):
            return _Known(_parameter)
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if module in ("torch", "torch.storage") and name in _DTYPES:
            return _Kind(_DTYPES[name])
        return _Inert

    def persistent_load(self, pid: Any) -> Any:
        what, kind, key, *_ = pid
        known = what == "storage" and isinstance(kind, _Kind) and isinstance(key, str)
        return self._storage(key, kind.dtype) if known else _Inert()

    def _tensor(self, storage: Any, start: Any, shape: Any, strides: Any, *_: Any) -> Any:
        """Returns the place of a tensor of some numbers of a storage."""
        if not isinstance(storage, _Storage):
            return _Inert()
        shape, strides = tuple(shape), tuple(strides)
        numbers = (start, *shape, *strides)
        if not all(type(n) is int and n >= 0 for n in numbers):
            raise pickle.UnpicklingError(f"a tensor has the shape {shape!r:.80}")
        count, size = int(np.prod(shape, dtype=object)), storage.dtype.itemsize
        if (start + count) * size > storage.nbytes:
            raise pickle.UnpicklingError(f"a tensor of shape {shape} is longer than its numbers")
        entry = Entry(self._path, storage.offset + start * size, count * size, storage.dtype, shape)
        if _in_order(shape, strides):
            return entry
        if _in_order(shape[::-1], strides[::-1]):
            return entry._replace(transposed=True)
        raise pickle.UnpicklingError(f"a tensor of shape {shape} has the strides {strides}")


def _parameter(data: Any, *_: Any) -> Any:
    return data


def _in_order(shape: Any, strides: Any) -> bool:
    """Returns whether numbers with these strides lie row by row without gaps."""
    step = 1
    for length, stride in zip(shape[::-1], strides[::-1], strict=True):
        if length > 1 and stride != step:
            return False
        step *= length
    return True


def _named(found: Mapping[Any, Any], prefix: str = "", depth: int = 0) -> Any:
    """Yields the tensors in dictionaries with their names."""
    for key, value in found.items():
        if isinstance(value, Entry):
            yield f"{prefix}{key}", value
        elif isinstance(value, Mapping) and depth < 4:
            yield from _named(value, f"{prefix}{key}.", depth + 1)
