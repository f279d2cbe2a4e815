"""The places of tensors in files, and how their numbers are stored there."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np

Shape = tuple[int, ...]
INSTEAD = "take the file in float8, int8 (ConvRot), GGUF Q8_0 to Q4_0 or bfloat16"
"""What to take in the place of a file in an encoding that is not read."""


class Kept(NamedTuple):
    """A tensor as its file has it, in eight bits: the numbers are values * scale * fine - least.

    After that, those with a rotation are to be rotated, see `encodings.rotated`. Numbers of blocks
    have the shape (d, k), for k blocks of equal length along the inputs of a matrix.
    """

    values: np.ndarray
    """int8, float8, or integers of four bits, in the tensor's own shape (d, ...), outputs first."""
    scale: np.ndarray
    """() for all, (d,) one for each output, or one for each block."""
    rotation: int = 0
    """The length of the groups along the inputs that were rotated; 0 for none."""
    fine: np.ndarray | None = None
    """Further scales of smaller blocks; None without."""
    least: tuple[np.ndarray, ...] = ()
    """What is subtracted, as the product of numbers of blocks; nothing where it is empty."""


class Encoding(Protocol):
    """How the numbers of a tensor are stored, with the places of what belongs to them."""

    @property
    def name(self) -> str:
        """What errors call it, such as "int8 with a scale"."""
        ...

    @property
    def beside(self) -> "tuple[Entry, ...]":
        """The places of the scales and tables."""
        ...

    def decode(self, stored: np.ndarray, view: "View", first: int, last: int) -> np.ndarray:
        """Returns numbers as float32, in one row.

        Args:
            stored: all that is stored of the whole tensor, in one row.
            view: reads a scale or table.
            first: the place of the first number in the whole tensor, row by row.
            last: the place after the last one.
        """
        ...

    def keep(self, stored: np.ndarray, view: "View", first: int, shape: Shape) -> Kept | None:
        """Returns a part of this shape without decoding it; None where it is not of eight bits."""
        ...


class Entry(NamedTuple):
    """The place of a tensor in a file: byte offset and length, dtype and shape.

    `shape` is that of `TensorFile.view`; of a transposed entry the file has the axes in reverse, of
    a swapped one the halves of the first axis in the other order. The bytes of an encoded entry are
    those of the whole tensor of which it may be a part.
    """

    path: Path
    offset: int
    nbytes: int
    dtype: np.dtype
    shape: Shape
    transposed: bool = False
    swapped: bool = False
    encoding: Encoding | None = None
    """How the numbers are stored, where that is not as numbers of `dtype`."""
    start: int = 0
    """Of an encoded entry, the place of its first number in the whole tensor."""

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
        row, start, parts = self.nbytes // max(self.shape[0], 1), 0, []
        for length in lengths:
            part = self._replace(shape=(length, *self.shape[1:]))
            if self.encoding is None:
                part = part._replace(offset=self.offset + start * row, nbytes=length * row)
            else:
                part = part._replace(start=self.start + start * math.prod(self.shape[1:]))
            parts.append(part)
            start += length
        return parts


View = Callable[[Entry], np.ndarray]
