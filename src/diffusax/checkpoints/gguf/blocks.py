"""Numbers in blocks of 32 or 256 with common scales, as ggml stores them.

Source: github.com/ggml-org/ggml, src/ggml-common.h (the structs of blocks) and src/ggml-quants.c
(dequantize_row_*). Scales are multiplied in the same order, so that numbers are equal to the bit.
"""

import dataclasses
from collections.abc import Callable

import numpy as np

from diffusax.checkpoints.entries import Entry, Kept, Shape, View


def _half(blocks: np.ndarray, place: int) -> np.ndarray:
    """Returns the float16 at a place of each block, as float32. n, 1."""
    return blocks[:, place : place + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(codes: np.ndarray) -> np.ndarray:
    """Returns the lower halves of bytes, then the upper. ..., n -> ..., 2, n."""
    return np.stack([codes & 15, codes >> 4], axis=-2)


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _half(blocks, 0)


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    own = _nibbles(blocks[:, 2:]).reshape(-1, 32).astype(np.float32)
    return (own - 8) * _half(blocks, 0)


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    own = _nibbles(blocks[:, 4:]).reshape(-1, 32).astype(np.float32)
    return own * _half(blocks, 0) + _half(blocks, 2)


def _fifth_bits(bits: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Returns numbers of five bits, of which the last is apart. n, 4 and n, 16 -> n, 32."""
    fifth = np.unpackbits(bits, axis=-1, bitorder="little") << 4
    return (_nibbles(codes).reshape(-1, 32) | fifth).astype(np.float32)


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    return (_fifth_bits(blocks[:, 2:6], blocks[:, 6:]) - 16) * _half(blocks, 0)


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    return _fifth_bits(blocks[:, 4:8], blocks[:, 8:]) * _half(blocks, 0) + _half(blocks, 2)


def _scales_of_eight(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns scales and minima of the eight parts of Q4_K and Q5_K. n, 8, 1 each.

    They have six bits: the first four of each are whole in a byte, whose two further bits belong to
    the last four.
    """
    scales, minima, rest = (blocks[:, i : i + 4] for i in (4, 8, 12))
    parts = [
        np.concatenate([first & 63, last | (first >> 6) << 4], axis=-1).astype(np.float32)
        for first, last in ((scales, rest & 15), (minima, rest >> 4))
    ]
    scale, least = (_half(blocks, 2 * i) * part for i, part in enumerate(parts))
    return scale[..., None], least[..., None]


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = _scales_of_eight(blocks)
    own = _nibbles(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32).astype(np.float32)
    return scale * own - least


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scale, least = _scales_of_eight(blocks)
    parts = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, None, 16:48] >> parts & 1) << 4
    own = _nibbles(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32) | fifth
    return scale * own.astype(np.float32) - least


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    scale = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    own = low | high.reshape(-1, 8, 32) << 4
    return scale[..., None] * (own.reshape(-1, 16, 16).astype(np.float32) - 32)


BLOCKS: dict[str, tuple[int, int, Callable[[np.ndarray], np.ndarray]]] = {
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
        own = BLOCKS[self.name][2](blocks).reshape(-1)
        return own[first - begin * self.length : last - begin * self.length]

    def keep(self, stored: np.ndarray, view: View, first: int, shape: Shape) -> Kept | None:
        """Returns matrices of Q8_0 as they are, see `Encoding.keep`."""
        if self.name != "Q8_0" or len(shape) != 2 or shape[1] % self.length:
            return None
        begin, end = first // self.length, (first + shape[0] * shape[1]) // self.length
        blocks = stored[begin * self.size : end * self.size].reshape(-1, self.size)
        values = blocks[:, 2:].view(np.int8).reshape(shape)
        return Kept(values, _half(blocks, 0).reshape(shape[0], -1))
