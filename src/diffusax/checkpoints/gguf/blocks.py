"""Numbers in blocks of 32 or 256 with common scales, as ggml stores them.

Source: github.com/ggml-org/ggml, src/ggml-common.h (the structs of blocks) and src/ggml-quants.c
(dequantize_row_*). Scales are multiplied in the same order, so that numbers are equal to the bit.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np

from diffusax.checkpoints.entries import Entry, Kept, Shape, View


class Parts(NamedTuple):
    """What n blocks hold: the numbers are codes * scale * fine - least."""

    codes: np.ndarray
    """Integers of eight bits, n, length."""
    scale: np.ndarray
    """float16, n, 1."""
    fine: np.ndarray | None = None
    """Integers of eight bits, n, k for k parts of a block; None without."""
    least: tuple[np.ndarray, ...] = ()
    """The factors of what is subtracted, n, 1 and n, k."""

    def numbers(self) -> np.ndarray:
        """Returns the numbers, float32. n, length."""
        scale, least = self.scale.astype(np.float32), np.zeros((1, 1), np.float32)
        if self.fine is not None:
            scale = scale * self.fine.astype(np.float32)
        if self.least:
            least = functools.reduce(np.multiply, (x.astype(np.float32) for x in self.least))
        codes = self.codes.astype(np.float32).reshape(len(scale), scale.shape[1], -1)
        return (codes * scale[..., None] - least[..., None]).reshape(len(scale), -1)


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """Returns the float16 at a place of each block. n, 1."""
    return blocks[:, place : place + 2].copy().view(np.float16)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Returns the lower halves of bytes, then the upper. ..., n -> ..., 2, n."""
    return np.stack([codes & 15, codes >> 4], axis=-2)


def _signed(codes: np.ndarray, zero: int = 0) -> np.ndarray:
    """Returns codes as integers of eight bits, with zero where a code is `zero`. n, length."""
    return (codes.reshape(len(codes), -1) - np.uint8(zero)).view(np.int8)


def _q8_0(blocks: np.ndarray) -> Parts:
    return Parts(blocks[:, 2:].view(np.int8), _half(blocks, 0))


def _q4_0(blocks: np.ndarray) -> Parts:
    return Parts(_signed(_nibbles(blocks[:, 2:]), 8), _half(blocks, 0))


def _q4_1(blocks: np.ndarray) -> Parts:
    return Parts(_signed(_nibbles(blocks[:, 4:])), _half(blocks, 0), None, (-_half(blocks, 2),))


def _fifth_bits(bits: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns numbers of five bits, of which the last is apart. n, 4 and n, 16 -> n, 32."""
    fifth = np.unpackbits(bits, axis=-1, bitorder="little") << 4
    return _nibbles(codes).reshape(-1, 32) | fifth


def _q5_0(blocks: np.ndarray) -> Parts:
    return Parts(_signed(_fifth_bits(blocks[:, 2:6], blocks[:, 6:]), 16), _half(blocks, 0))


def _q5_1(blocks: np.ndarray) -> Parts:
    codes = _signed(_fifth_bits(blocks[:, 4:8], blocks[:, 8:]))
    return Parts(codes, _half(blocks, 0), None, (-_half(blocks, 2),))


def _of_eight_parts(blocks: np.ndarray, codes: np.ndarray) -> Parts:
    """Returns what Q4_K and Q5_K hold, whose blocks have eight parts.

    Their scales and minima have six bits: the first four of each are whole in a byte, whose two
    further bits belong to the last four.
    """
    scales, minima, rest = (blocks[:, i : i + 4] for i in (4, 8, 12))
    fine, least = (
        _signed(np.concatenate([first & 63, last | (first >> 6) << 4], axis=-1))
        for first, last in ((scales, rest & 15), (minima, rest >> 4))
    )
    return Parts(_signed(codes), _half(blocks, 0), fine, (_half(blocks, 2), least))


def _q4_k(blocks: np.ndarray) -> Parts:
    return _of_eight_parts(blocks, _nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: np.ndarray) -> Parts:
    parts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> parts & 1) << 4
    low = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return _of_eight_parts(blocks, low | fifth)


def _q6_k(blocks: np.ndarray) -> Parts:
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = _signed(low | high.reshape(-1, 8, 32) << 4, 32)
    return Parts(codes, _half(blocks, 208), blocks[:, 192:208].view(np.int8))


BLOCKS: dict[str, tuple[int, int, Callable[[np.ndarray], Parts]]] = {
    "Q8_0": (32, 34, _q8_0),
    "Q6_K": (256, 210, _q6_k),
    "Q5_K": (256, 176, _q5_k),
    "Q5_1": (32, 24, _q5_1),
    "Q5_0": (32, 22, _q5_0),
    "Q4_K": (256, 144, _q4_k),
    "Q4_1": (32, 20, _q4_1),
    "Q4_0": (32, 18, _q4_0),
}
"""For each type the numbers and the bytes of a block, and what reads blocks."""
_FOUR_BITS = {"Q4_0": ml_dtypes.int4, "Q4_1": ml_dtypes.uint4, "Q4_K": ml_dtypes.uint4}
"""The dtypes of codes of four bits."""


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Numbers in blocks of one of ggml's types, through all of the tensor."""

    name: str

    @property
    def beside(self) -> tuple[Entry, ...]:
        """Nothing: the scales are in the blocks."""
        return ()

    @property
    def length(self) -> int:
        """The numbers of a block."""
        return BLOCKS[self.name][0]

    @property
    def size(self) -> int:
        """The bytes of a block."""
        return BLOCKS[self.name][1]

    def decode(self, stored: np.ndarray, view: View, first: int, last: int) -> np.ndarray:
        """Decodes numbers, see `Encoding.decode`."""
        begin, end = first // self.length, -(-last // self.length)
        blocks = stored[begin * self.size : end * self.size].reshape(-1, self.size)
        own = BLOCKS[self.name][2](blocks).numbers().reshape(-1)
        return own[first - begin * self.length : last - begin * self.length]

    def keep(self, stored: np.ndarray, view: View, first: int, shape: Shape) -> Kept | None:
        """Returns matrices with their codes in eight bits or in four, see `Encoding.keep`."""
        if len(shape) != 2 or shape[1] % self.length:
            return None
        begin, end = first // self.length, (first + shape[0] * shape[1]) // self.length
        blocks = stored[begin * self.size : end * self.size].reshape(-1, self.size)
        codes, scale, fine, least = BLOCKS[self.name][2](blocks)

        # What has four bits in the file has four on devices that have such numbers.
        codes = codes.astype(_FOUR_BITS.get(self.name, codes.dtype))

        def rows(x: np.ndarray) -> np.ndarray:
            return x.reshape(shape[0], -1)

        small = None if fine is None else rows(fine)
        return Kept(rows(codes), rows(scale), 0, small, tuple(map(rows, least)))
