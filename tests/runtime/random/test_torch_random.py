"""TorchGenerator against the live torch.Generator.

The large-tensor cases hold on x86 with AVX2, the path reproduced; elsewhere torch itself differs.
"""

import math
import time
from fractions import Fraction

import numpy as np
import pytest
import torch

from diffusax.runtime.random.torch_random import TorchGenerator
from diffusax.runtime.random.torch_random import fused_multiply_add as fma

avx2 = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="torch's path for processors without AVX2 differs in the last bits",
)


def assert_same_stream(seed, shapes):
    ours = TorchGenerator(seed)
    theirs = torch.Generator().manual_seed(seed)
    for shape in shapes:
        expected = torch.randn(shape, generator=theirs).numpy()
        actual = ours.randn(shape)
        assert actual.dtype == np.float32
        assert actual.shape == expected.shape
        np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32), str(shape))


@avx2
def test_a_million_numbers_are_bit_equal():
    assert_same_stream(0, [(1 << 20,)])


@avx2
def test_a_uniform_number_of_zero_gives_zero_without_a_sign():
    # Number 27493 of this stream has 24 low bits of zero, one in 2**24: its radius is -0.
    assert_same_stream(3577, [(1 << 15,)])
    values = TorchGenerator(3577).randn(1 << 15)
    assert values[27493 + 8] == 0
    assert not np.signbit(values[27493 + 8])


@avx2
@pytest.mark.parametrize("start", range(0, 300, 100))
def test_many_seeds_are_bit_equal(start):
    for seed in range(start, start + 100):
        assert_same_stream(seed * 7919, [(1, 4, 16, 16)])


@pytest.mark.parametrize("n", [*range(16), 0])
def test_fewer_than_16_numbers_take_the_double_path(n):
    for seed in range(20):
        assert_same_stream(seed, [(n,)])


@avx2
@pytest.mark.parametrize("n", [*range(16, 50), 255, 1000, 4095])
def test_sizes_that_are_no_multiple_of_16_redraw_the_last_16(n):
    assert_same_stream(n, [(n,), (n,)])


@avx2
def test_calls_in_sequence_share_one_stream_and_keep_the_cached_second_number():
    shapes = [(3,), (16,), (1,), (), (2, 0), (17,), (5,), (1, 4, 8, 8), (1,), (33,), (2, 2), (7,)]
    assert_same_stream(1234, shapes * 3)


@avx2
@pytest.mark.parametrize(
    "seed",
    [0, 1, 2**31, 2**32 - 1, 2**32, 2**32 + 5, 2**63, 2**64 - 1, -1, -2, -(2**31), -(2**63)],
)
def test_seeds_of_64_bits_and_negative_ones(seed):
    assert_same_stream(seed, [(20,), (3,)])


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 1.5, "1", None, True])
def test_a_bad_seed_is_named(seed):
    with pytest.raises(ValueError, match=f"seed must be.*{seed}"):
        TorchGenerator(seed)


def test_a_numpy_integer_is_a_seed():
    np.testing.assert_array_equal(
        TorchGenerator(np.int64(5)).randn(3), TorchGenerator(5).randn((3,))
    )


def test_a_negative_size_is_named():
    with pytest.raises(ValueError, match="shape must have no negative sizes"):
        TorchGenerator(0).randn((2, -1))


def test_a_batch_of_large_latents_takes_well_under_a_second():
    start = time.perf_counter()
    TorchGenerator(0).randn((4, 4, 128, 128))
    assert time.perf_counter() - start < 1


def test_fma_rounds_once():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 2000)).astype(np.float32)
    # Addends that nearly cancel the product, and ones of any size.
    near = -(a.astype(np.float64) * b).astype(np.float32)
    for c in (near, b, near * np.float32(2.0**24), near * np.float32(2.0**-30)):
        exact = [
            Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z)) for x, y, z in zip(a, b, c)
        ]
        np.testing.assert_array_equal(fma(a, b, c), [_round_to_float32(v) for v in exact])


def test_fma_where_rounding_twice_is_wrong():
    # A sum 2**-60 above, then one 2**-64 below, the midpoint of two float32 numbers: float64 drops
    # that part, and the tie then goes the wrong way.
    a = np.float32([2.0**-12 * (1 + 2.0**-12), 2.0**-12 * (1 + 2.0**-20)])
    b = np.float32([2.0**-12 * (1 - 2.0**-12 + 2.0**-24), 2.0**-12 * (1 - 2.0**-20)])
    c = np.float32([1, 1 + 2.0**-23])
    np.testing.assert_array_equal(fma(a, b, c), np.float32([1 + 2.0**-23, 1 + 2.0**-23]))
    twice = (a.astype(np.float64) * b + c).astype(np.float32)
    assert (twice != fma(a, b, c)).all()


def _round_to_float32(value: Fraction) -> float:
    """Nearest float32, ties to even, by integer arithmetic."""
    if value == 0:
        return 0.0
    exponent = math.floor(math.log2(abs(value))) - 23
    unit = Fraction(2) ** exponent
    return float(round(value / unit) * unit)
