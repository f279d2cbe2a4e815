"""Computes PyTorch's CPU normal distribution in NumPy, bit for bit.

`TorchGenerator(s).randn(shape)` equals `torch.randn(shape, generator=g)` in float32 for
`g = torch.Generator().manual_seed(s)`. It reproduces the path that PyTorch takes on x86 processors
with AVX2 (those with AVX-512 take it too): vectorised Box-Muller with the Cephes polynomials of
`aten/src/ATen/native/cpu/avx_mathfun.h`, whose multiplications and additions the compiler fused.
Elsewhere PyTorch uses the platform's logf, sinf and cosf; about 40 % of its numbers then differ in
their last bits, by 2.3e-6 at most in a million numbers. Checked against PyTorch 2.13.
"""

import math
import operator
from collections.abc import Sequence

import numpy as np

_f32 = np.float32

# Constants of Cephes' logf, and of its sinf and cosf (Moshier 1984), in the order of evaluation.
_LOG = tuple(
    _f32(c)
    for c in (
        7.0376836292e-2,
        -1.1514610310e-1,
        1.1676998740e-1,
        -1.2420140846e-1,
        1.4249322787e-1,
        -1.6668057665e-1,
        2.0000714765e-1,
        -2.4999993993e-1,
        3.3333331174e-1,
    )
)
_LN2_LOW, _LN2_HIGH = _f32(-2.12194440e-4), _f32(0.693359375)
_SQRT_HALF = _f32(math.sqrt(0.5))
_FOUR_OVER_PI = _f32(4 / math.pi)
_MINUS_QUARTER_PI = tuple(
    _f32(c) for c in (-0.78515625, -2.4187564849853515625e-4, -3.77489497744594108e-8)
)
_COS = tuple(_f32(c) for c in (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2))
_SIN = tuple(_f32(c) for c in (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1))


class TorchGenerator:
    """The stream of `torch.Generator().manual_seed(seed)`; each call continues it.

    Raises:
        ValueError: the seed is not an integer in PyTorch's range, -2**63 to 2**64 - 1.
    """

    def __init__(self, seed: int):
        # torch's mt19937 is seeded with the low 32 bits; a negative seed wraps around.
        self._twister = np.random.RandomState(_checked_seed(seed) & 0xFFFFFFFF)
        self._second_normal: float | None = None

    def randn(self, shape: int | Sequence[int]) -> np.ndarray:
        """Returns standard normal float32 numbers, those of `torch.randn(shape, generator=...)`.

        Raises:
            ValueError: a size is negative.
        """
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        if any(size < 0 for size in sizes):
            raise ValueError(f"shape must have no negative sizes (got {sizes})")
        n = math.prod(sizes)
        values = self._singly(n) if n < 16 else self._in_blocks(n)
        return values.reshape(sizes)

    def _in_blocks(self, n: int) -> np.ndarray:
        """Computes normal_fill_AVX2 of aten/src/ATen/native/cpu/DistributionTemplates.h."""
        uniform = self._uniform(n)
        values = np.empty(n, np.float32)
        whole = n - n % 16
        values[:whole] = _box_muller(uniform[:whole])
        if whole < n:
            # torch draws 16 more numbers for the last 16 places, even if some of them are filled.
            values[-16:] = _box_muller(self._uniform(16))
        return values

    def _singly(self, n: int) -> np.ndarray:
        """Computes normal_distribution<double> of aten/src/ATen/core/DistributionsHelper.h."""
        return np.array([self._next_normal() for _ in range(n)], np.float32)

    def _next_normal(self) -> float:
        if self._second_normal is not None:
            value, self._second_normal = self._second_normal, None
            return value
        u1, u2 = self._uniform_double(), self._uniform_double()
        radius, theta = math.sqrt(-2 * math.log1p(-u2)), 2 * math.pi * u1
        self._second_normal = radius * math.sin(theta)
        return radius * math.cos(theta)

    def _uniform(self, n: int) -> np.ndarray:
        return (self._raw(n) & 0xFFFFFF).astype(np.float32) * _f32(2**-24)

    def _uniform_double(self) -> float:
        high, low = map(int, self._raw(2))
        return ((high << 32 | low) & (2**53 - 1)) * 2.0**-53

    def _raw(self, n: int) -> np.ndarray:
        """Returns the next n outputs of the Mersenne Twister (MT19937), 32 bits each."""
        return self._twister.randint(0, 2**32, n, dtype=np.uint32)


def _checked_seed(seed: int) -> int:
    try:
        number = operator.index(seed)
    except TypeError:
        number = None
    if number is None or isinstance(seed, bool):
        raise ValueError(f"seed must be an integer (got {seed!r})")
    if not -(2**63) <= number < 2**64:
        raise ValueError(f"seed must be from -2**63 to 2**64 - 1 (got {seed})")
    return number


def _box_muller(uniform: np.ndarray) -> np.ndarray:
    """Turns uniform numbers in [0, 1) into normal ones, in blocks of 8 + 8. (16 n,) -> (16 n,)."""
    u1, u2 = np.moveaxis(uniform.reshape(-1, 2, 8), 1, 0)
    radius = np.sqrt(_f32(-2) * _log(_f32(1) - u1))
    sine, cosine = _sincos(_f32(2 * math.pi) * u2)
    # torch adds the mean, zero: that makes -0 into 0.
    return np.stack([radius * cosine, radius * sine], 1).reshape(-1) + _f32(0)


def _log(x: np.ndarray) -> np.ndarray:
    """Computes log256_ps of avx_mathfun.h, for normal positive numbers."""
    bits = np.ascontiguousarray(x).view(np.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).view(np.float32)
    small = mantissa < _SQRT_HALF
    e = ((bits >> 23) - 126 - small).astype(np.float32)
    x = (mantissa - _f32(1)) + np.where(small, mantissa, _f32(0))
    z = x * x
    y = _polynomial(_LOG, x) * x
    y = fused_multiply_add(y, z, e * _LN2_LOW)
    y = y - z * _f32(0.5)  # Fused or not is the same here: halving is exact.
    return fused_multiply_add(e, _LN2_HIGH, x + y)


def _sincos(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Computes sincos256_ps of avx_mathfun.h, for numbers >= 0."""
    octant = ((x * _FOUR_OVER_PI).astype(np.int32) + 1) & ~1
    multiple = octant.astype(np.float32)
    for part in _MINUS_QUARTER_PI:
        x = fused_multiply_add(multiple, part, x)
    z = x * x
    cosine = fused_multiply_add(_polynomial(_COS, z) * z, z, z * _f32(-0.5)) + _f32(1)
    sine = fused_multiply_add(_polynomial(_SIN, z) * z, x, x)
    swap = (octant & 2) != 0
    sine, cosine = np.where(swap, cosine, sine), np.where(swap, sine, cosine)
    return (
        np.where(octant & 4, -sine, sine),
        np.where((octant - 2) & 4, cosine, -cosine),
    )


def _polynomial(coefficients: Sequence[np.float32], x: np.ndarray) -> np.ndarray:
    y = np.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        y = fused_multiply_add(y, x, c)
    return y


def fused_multiply_add(
    a: np.ndarray, b: np.ndarray | np.float32, c: np.ndarray | np.float32
) -> np.ndarray:
    """Computes a * b + c in float32, rounded once (IEEE 754 fusedMultiplyAdd), exactly.

    The product of two float32 numbers is exact in float64, the sum with `c` is not. There it is
    rounded to odd (Boldo and Melquiond 2008), so that the rounding to float32 is as if of the exact
    sum; rounding to nearest twice goes wrong near ties.
    """
    product = np.multiply(a, b, dtype=np.float64)
    addend = np.asarray(c, np.float64)
    total = product + addend
    rest = total - product
    error = (product - (total - rest)) + (addend - rest)  # Knuth's TwoSum
    bits = total.view(np.int64)
    inexact_even = (error != 0) & (bits & 1 == 0)
    toward_error = np.where((error > 0) == (total > 0), 1, -1)
    bits += inexact_even * toward_error
    return total.astype(np.float32)
