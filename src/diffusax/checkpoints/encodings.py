"""The encodings of tensors in safetensors files: eight bits with scales, and four bits in blocks.

Sources: ComfyUI's comfy/quant_ops.py and ops.py with comfy_kitchen 0.2 (float8, int8, ConvRot,
mxfp8, nvfp4), diffusers' quantizers/bfl/utils.py (fp8r, nvfp4 of Black Forest Labs, which is
ModelOpt's), bitsandbytes' functional.py and backends/default/ops.py (nf4, fp4, int8).
"""

import dataclasses

import numpy as np

from diffusax.checkpoints.entries import Entry, Kept, Shape, View

_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FLOAT4 = np.concatenate([_E2M1, -_E2M1])
"""The numbers of one sign, two exponent bits and one bit behind the point, by their four bits."""


@dataclasses.dataclass(frozen=True)
class Scaled:
    """Numbers of eight bits, or others, times one scale for all or one for each row."""

    name: str
    width: int
    """The length of a row: all axes but the first."""
    scale: Entry
    factor: float = 1.0
    """What is multiplied by in the end: 1/127 for bitsandbytes."""
    rotation: int = 0
    """The length of ConvRot's groups in a row; 0 for none."""

    @property
    def beside(self) -> tuple[Entry, ...]:
        """The place of the scale."""
        return (self.scale,)

    def decode(self, stored: np.ndarray, view: View, first: int, last: int) -> np.ndarray:
        """Decodes rows, see `Encoding.decode`."""
        begin, end = first // self.width, -(-last // self.width)
        own = stored[begin * self.width : end * self.width].astype(np.float32)
        own = own.reshape(-1, self.width)
        own *= self._scale(view, begin, end).reshape(-1, 1)
        if self.factor != 1:
            own *= np.float32(self.factor)
        if self.rotation:
            own = rotated(own, self.rotation)
        return own.reshape(-1)[first - begin * self.width : last - begin * self.width]

    def keep(self, stored: np.ndarray, view: View, first: int, shape: Shape) -> Kept | None:
        """Returns the rows as they are, see `Encoding.keep`."""
        if stored.dtype.itemsize > 1:
            return None
        begin = first // self.width
        count = int(np.prod(shape, dtype=np.int64))
        scale = self._scale(view, begin, begin + count // self.width) * np.float32(self.factor)
        return Kept(stored[first : first + count].reshape(shape), scale, self.rotation)

    def _scale(self, view: View, begin: int, end: int) -> np.ndarray:
        scale = _finite(view(self.scale).astype(np.float32).reshape(-1), self.scale)
        return scale.reshape(()) if scale.size == 1 else scale[begin:end]


@dataclasses.dataclass(frozen=True)
class Blocked:
    """Matrices of float8 (mxfp8) or of two numbers in a byte (nvfp4), with a scale for each block.

    A block is a part of a row.
    """

    name: str
    width: int
    """The length of a row."""
    block: int
    """The length of a block: 32 for mxfp8, 16 for nvfp4."""
    scale: Entry
    """The scales: powers of two for mxfp8, float8 for nvfp4."""
    whole: Entry | None = None
    """The scale of the whole matrix, of nvfp4."""
    smooth: Entry | None = None
    """What each column is multiplied by besides."""
    swizzled: bool = False
    """Whether the scales are in cuBLAS's order, tiles of 128 rows and four blocks."""
    high_first: bool = False
    """Whether the first number of a byte is in its upper half, as in ComfyUI's nvfp4."""

    @property
    def beside(self) -> tuple[Entry, ...]:
        """The places of the scales."""
        return tuple(x for x in (self.scale, self.whole, self.smooth) if x is not None)

    @property
    def _is_nvfp4(self) -> bool:
        return self.whole is not None

    def decode(self, stored: np.ndarray, view: View, first: int, last: int) -> np.ndarray:
        """Decodes rows, see `Encoding.decode`."""
        begin, end = first // self.width, -(-last // self.width)
        scales = self._scales(view, begin, end)
        if self._is_nvfp4:
            codes = stored[begin * self.width // 2 : end * self.width // 2]
            own = _FLOAT4[_halves(codes, high_first=self.high_first)]
        else:
            own = stored[begin * self.width : end * self.width].astype(np.float32)
        own = (own.reshape(*scales.shape, self.block) * scales[..., None]).reshape(-1, self.width)
        if self.smooth is not None:
            own *= view(self.smooth).astype(np.float32).reshape(-1)
        return own.reshape(-1)[first - begin * self.width : last - begin * self.width]

    def keep(self, stored: np.ndarray, view: View, first: int, shape: Shape) -> Kept | None:
        """Returns rows as they are, those of four bits in eight, see `Encoding.keep`."""
        if self.smooth is not None:
            return None
        begin, end = first // self.width, first // self.width + shape[0]
        if self.whole is None:
            values = stored[begin * self.width : end * self.width].reshape(shape)
            return Kept(values, self._scales(view, begin, end))
        codes = stored[begin * self.width // 2 : end * self.width // 2]
        doubled = (2 * _FLOAT4).astype(np.int8)[_halves(codes, high_first=self.high_first)]
        whole = _finite(view(self.whole).astype(np.float32).reshape(()), self.whole)
        scale = whole * np.float32(0.5)
        return Kept(doubled.reshape(shape), scale, 0, self._of_blocks(view, begin, end))

    def _scales(self, view: View, begin: int, end: int) -> np.ndarray:
        """Returns the scales of rows, float32. n, blocks of a row."""
        stored = self._of_blocks(view, begin, end)
        if self.whole is None:
            # An exponent of nothing is zero in comfy_kitchen, not 2**-127.
            return (stored.view(np.uint8).astype(np.uint32) << 23).view(np.float32)
        whole = view(self.whole).astype(np.float32).reshape(())
        return _finite(whole * stored.astype(np.float32), self.scale)

    def _of_blocks(self, view: View, begin: int, end: int) -> np.ndarray:
        """Returns the scales of rows as they are stored. n, blocks of a row."""
        stored, columns = view(self.scale).reshape(-1), self.width // self.block
        if self.swizzled:
            return _unswizzled(stored, columns, begin, end)
        return stored.reshape(-1, columns)[begin:end]


@dataclasses.dataclass(frozen=True)
class Codebook:
    """Numbers that are places in a table, two in a byte, times the largest of each block: nf4.

    Blocks go through all of the tensor, row by row. The largest numbers may be encoded so, too, in
    whole bytes, with their mean beside them (Dettmers et al. 2023, double quantisation).
    """

    name: str
    block: int
    largest: Entry
    table: Entry
    nested: "tuple[Entry, Entry] | None" = None
    """The largest of each block of the largest numbers, and their table."""
    nested_block: int = 0
    mean: float = 0.0

    @property
    def beside(self) -> tuple[Entry, ...]:
        """The places of the largest numbers and tables."""
        return (self.largest, self.table, *(self.nested or ()))

    def decode(self, stored: np.ndarray, view: View, first: int, last: int) -> np.ndarray:
        """Decodes numbers, see `Encoding.decode`."""
        codes = _halves(stored[first // 2 : -(-last // 2)], high_first=True)
        codes = codes[first % 2 : first % 2 + last - first]
        begin, end = first // self.block, -(-last // self.block)
        scale = np.repeat(self._largest(view, begin, end), self.block)
        own = view(self.table).astype(np.float32).reshape(-1)[codes]
        return own * scale[first - begin * self.block : last - begin * self.block]

    def keep(self, stored: np.ndarray, view: View, first: int, shape: Shape) -> Kept | None:
        """Returns None: these are four bits."""
        return None

    def _largest(self, view: View, begin: int, end: int) -> np.ndarray:
        own = view(self.largest).reshape(-1)[begin:end]
        if self.nested is None:
            return own.astype(np.float32)
        largest, table = (view(entry).astype(np.float32).reshape(-1) for entry in self.nested)
        own = table[own] * largest[np.arange(begin, end) // self.nested_block]
        return own + np.float32(self.mean)


def rotated(matrix: np.ndarray, group: int) -> np.ndarray:
    """Rotates each group of a row, as ConvRot does (its own inverse). n c -> n c, float32.

    It is the product with `hadamard`, a Kronecker power of the matrix of four rows: for one power
    after the other, each of four numbers becomes half of their sum less the one opposite to it.
    """
    own, step = np.ascontiguousarray(matrix.reshape(-1, group).T), 1
    while step < group:
        fours = own.reshape(-1, 4, step, own.shape[1])
        half = fours[:, 0] + fours[:, 1] + fours[:, 2] + fours[:, 3]
        half *= np.float32(0.5)
        own, step = (half[:, None] - fours[:, ::-1]).reshape(own.shape), 4 * step
    return own.T.reshape(matrix.shape)


def swizzled_size(rows: int, columns: int) -> int:
    """Returns the number of scales in cuBLAS's order, which has whole tiles only."""
    return -(-rows // 128) * 128 * -(-columns // 4) * 4


def _finite(scales: np.ndarray, entry: Entry) -> np.ndarray:
    if not np.isfinite(scales).all():
        raise ValueError(f"{entry.path} is broken: a scale is not finite; download it again")
    return scales


def _halves(codes: np.ndarray, *, high_first: bool) -> np.ndarray:
    """Returns the two halves of each byte, one after the other."""
    halves = (codes >> 4, codes & 15) if high_first else (codes & 15, codes >> 4)
    return np.stack(halves, axis=-1).reshape(-1)


def _unswizzled(stored: np.ndarray, columns: int, begin: int, end: int) -> np.ndarray:
    """Returns rows of a matrix that is stored in cuBLAS's order for scales of blocks.

    A tile of 128 rows and four columns is 32 by 4 by 4: of the rows 32 i + j, j comes first,
    then i, then the column (docs.nvidia.com/cuda/cublas, 1D block scaling factors layout).
    """
    tiles = stored.reshape(-1, -(-columns // 4), 32, 4, 4)[begin // 128 : -(-end // 128)]
    rows = tiles.transpose(0, 3, 2, 1, 4).reshape(len(tiles) * 128, -1)
    start = begin - begin // 128 * 128
    return rows[start : start + end - begin, :columns]
