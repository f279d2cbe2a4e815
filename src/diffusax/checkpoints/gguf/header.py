"""Reads the header of a GGUF file: texts, and the places of tensors.

Source: github.com/ggml-org/ggml, docs/gguf.md, and for shapes of more than four axes
github.com/city96/ComfyUI-GGUF, loader.py.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from diffusax.checkpoints.entries import INSTEAD, Entry
from diffusax.checkpoints.gguf.blocks import BLOCKS, Blocks

_MAGIC = b"GGUF"
_SCALARS = dict(enumerate("BbHhIif?", 0)) | {10: "Q", 11: "q", 12: "d"}
"""The formats of numbers, for `struct`."""
_TEXT, _ARRAY = 8, 9
_PLAIN = {
    **{0: np.dtype(np.float32), 1: np.dtype(np.float16), 28: np.dtype(np.float64)},
    **{24: np.dtype(np.int8), 25: np.dtype(np.int16), 26: np.dtype(np.int32)},
    **{27: np.dtype(np.int64), 30: np.dtype(ml_dtypes.bfloat16)},
}
"""The types of tensors that are numbers."""
_NAMES = {
    **{2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS"},
    **{18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS"},
    **{29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4", 41: "Q1_0"},
}
"""The types of tensors in blocks; others are not in ggml."""
_SHAPE = "comfy.gguf.orig_shape."
_MOST = 2**17
"""More texts and tensors, and longer texts, than files have."""
_MOST_WORDS = 2**22
"""More words than a vocabulary has."""


def is_gguf(path: Path) -> bool:
    """Returns whether a file begins as a GGUF file does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def read_gguf(path: Path) -> tuple[dict[str, Entry], dict[str, str]]:
    """Reads the places of the tensors by name, and the texts by name.

    Raises:
        ValueError: the file is broken, or has tensors in blocks of a type that is not read.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(path, _Cursor(data))
    except (_Broken, struct.error, UnicodeDecodeError, OSError, OverflowError) as error:
        raise ValueError(f"{path} is not a whole GGUF file ({error}); download it again") from None


class _Broken(Exception):
    """Says what is wrong in a file."""


class _Cursor:
    """Reads one thing after the other."""

    def __init__(self, data: mmap.mmap):
        self.data, self.place = data, len(_MAGIC)

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        """Reads numbers of these formats."""
        found = struct.unpack_from(f"<{kinds}", self.data, self.place)
        self.place += struct.calcsize(f"<{kinds}")
        return found

    def text(self) -> str:
        """Reads a text."""
        (length,) = self.numbers("Q")
        return self.skip(length).decode()

    def skip(self, length: int) -> bytes:
        """Reads bytes, of which all must be there."""
        end = self.place + length
        if end > len(self.data):
            raise _Broken(f"{length} bytes at {self.place} end behind the file's last")
        found = self.data[self.place : end] if length <= _MOST else b""
        self.place = end
        return found

    def value(self) -> Any:
        """Reads a number, a text or short numbers in a row; longer rows are skipped."""
        (kind,) = self.numbers("I")
        if kind in _SCALARS:
            return self.numbers(_SCALARS[kind])[0]
        if kind == _TEXT:
            return self.text()
        if kind != _ARRAY:
            raise _Broken(f"a value of kind {kind}")
        inner, count = self.numbers("IQ")
        if inner == _TEXT and count <= _MOST_WORDS:
            for _ in range(count):
                self.skip(*self.numbers("Q"))
            return None
        if inner not in _SCALARS:
            raise _Broken(f"{count} values of kind {inner}")
        own = self.skip(count * struct.calcsize(_SCALARS[inner]))
        return struct.unpack(f"<{count}{_SCALARS[inner]}", own) if count <= 8 else None


def _read(path: Path, cursor: _Cursor) -> tuple[dict[str, Entry], dict[str, str]]:
    version, tensors, texts = cursor.numbers("IQQ")
    if version not in (2, 3) or tensors > _MOST or texts > _MOST:
        raise _Broken(f"version {version}, {tensors} tensors, {texts} texts")
    told = {}
    for _ in range(texts):
        name = cursor.text()
        told[name] = cursor.value()
    places = [_place(cursor) for _ in range(tensors)]
    step = told.get("general.alignment", 32)
    if not isinstance(step, int) or not 0 < step <= _MOST:
        raise _Broken(f"general.alignment {step!r:.20}")
    begin, end = -(-cursor.place // step) * step, len(cursor.data)
    entries = {}
    for name, shape, kind, offset in places:
        entry = _entry(path, name, told.get(_SHAPE + name, shape), shape, kind)
        entry = entry._replace(offset=begin + offset)
        if entry.offset + entry.nbytes > end:
            raise _Broken(f"{name} ends behind the file's last byte")
        if name in entries:
            raise _Broken(f"{name} is there twice")
        entries[name] = entry
    return entries, {name: value for name, value in told.items() if isinstance(value, str)}


def _place(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Reads name, shape, type and offset of a tensor. The file has the axes in reverse."""
    name = cursor.text()
    (axes,) = cursor.numbers("I")
    if axes > 8:
        raise _Broken(f"{name} has {axes} axes")
    shape = cursor.numbers(f"{axes}Q")[::-1]
    kind, offset = cursor.numbers("IQ")
    return name, shape, kind, offset


def _entry(path: Path, name: str, shape: Any, stored: tuple[int, ...], kind: int) -> Entry:
    """Returns the place of a tensor, of which the offset is not known yet.

    Args:
        path: the file.
        name: the tensor's.
        shape: the shape that it is to have.
        stored: the shape that it has in the file, whose rows are in blocks.
        kind: the number of its type.
    """
    count = math.prod(stored)
    if not isinstance(shape, tuple) or math.prod(shape) != count or min(shape, default=0) < 0:
        raise _Broken(f"{name} has the shape {stored}, and is to have {shape!r:.40}")
    if kind in _PLAIN:
        dtype = _PLAIN[kind]
        return Entry(path, 0, count * dtype.itemsize, dtype, shape)
    known = _NAMES.get(kind, f"type {kind}")
    if known not in BLOCKS:
        raise ValueError(
            f"{path}: {name} is in blocks of {known}, which diffusax does not read; {INSTEAD}"
        )
    encoding = Blocks(known)
    if not stored or stored[-1] % encoding.length:
        raise _Broken(f"{name} of shape {stored} is not in whole blocks of {known}")
    size = count // encoding.length * encoding.size
    return Entry(path, 0, size, np.dtype(np.uint8), shape, encoding=encoding)
