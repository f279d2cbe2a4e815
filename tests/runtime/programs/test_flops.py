"""Operations against those that the definitions ask for."""

import jax
import jax.numpy as jnp
import pytest

from diffusax.models.ops.attention import attention
from diffusax.models.ops.conv import conv2d
from diffusax.models.ops.matmul import matmul
from diffusax.runtime.programs.flops import count_flops, count_training_flops, count_work

PADDING = ((1, 1), (1, 1))


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@pytest.mark.parametrize("channels", [8, 128])
@pytest.mark.parametrize("side", [4, 64])
@pytest.mark.parametrize("stride", [1, 2])
def test_a_convolution_counts_as_its_definition_asks(channels, side, stride):
    conv = lambda x, kernel: conv2d(x, kernel, stride=stride, padding=PADDING)  # noqa: E731
    count = count_flops(conv, shape(2, side, side, channels), shape(3, 3, channels, 256))
    assert count == 2 * 2 * (side // stride) ** 2 * 9 * channels * 256
    # The lowering that is really used is another one in half of these cases.
    assert jax.eval_shape(conv, shape(2, side, side, channels), shape(3, 3, channels, 256)).shape


@pytest.mark.parametrize("tokens", [16, 5000])
def test_attention_counts_two_products(tokens):
    q, k = shape(1, tokens, 2, 8), shape(1, 1000, 2, 8)
    assert count_flops(attention, q, k, k) == 2 * 2 * (2 * tokens * 1000 * 8)


def network(trained, frozen, x):
    """A frozen layer, a trained one, and a frozen one behind it."""
    x = jnp.tanh(x @ frozen["before"])
    x = jax.checkpoint(lambda x: jnp.tanh(x @ trained))(x)
    return (jax.lax.stop_gradient(x) @ frozen["after"] + x @ frozen["after"]).sum()


def test_frozen_networks_count_once_and_trained_ones_three_times():
    frozen = {"before": shape(32, 16), "after": shape(16, 4)}
    args = shape(16, 16), frozen, shape(8, 32)
    before, trained, after = (2 * 8 * n for n in (32 * 16, 16 * 16, 16 * 4))
    assert count_flops(network, *args) == before + trained + 2 * after
    # The trained layer's input does not vary, only its kernel; behind it only the input does.
    assert count_training_flops(network, *args) == before + 2 * trained + 3 * after
    twice = lambda w, x: jnp.tanh(x @ w) @ w  # noqa: E731
    once = 2 * 8 * 16 * 16
    assert count_training_flops(twice, shape(16, 16), shape(8, 16)) == (2 + 3) * once


def test_loops_count_each_round_and_choices_the_dearest():
    def rounds(w, x):
        def body(x, _):
            y = jax.lax.cond(x.sum() > 0, lambda x: x @ w @ w, lambda x: x @ w, x)
            return y, None

        return jax.lax.scan(body, x, length=5)[0]

    once = 2 * 8 * 16 * 16
    assert count_flops(rounds, shape(16, 16), shape(8, 16)) == 5 * 2 * once
    # In a loop the input varies, from the second round on.
    assert count_training_flops(rounds, shape(16, 16), shape(8, 16)) == 5 * 2 * 3 * once


def test_bytes_are_those_of_kernels_and_maps():
    x, kernel = jax.ShapeDtypeStruct((2, 5, 8), jnp.bfloat16), shape(8, 16)
    kernel = jax.ShapeDtypeStruct(kernel.shape, jnp.bfloat16)
    work = count_work(matmul, x, kernel)
    assert work == (2 * 10 * 8 * 16, 2 * 8 * 16, 2 * 10 * (8 + 16))
    # The gradient of either factor reads the result's and the other one, and writes its own.
    trained = count_work(lambda k, x: matmul(x, k).sum(), kernel, x, trained=True)
    assert trained == tuple(2 * own for own in work)
    conv = count_work(
        lambda x, k: conv2d(x, k, stride=2, padding=PADDING), shape(1, 8, 8, 4), shape(3, 3, 4, 6)
    )
    assert conv[1:] == (4 * 9 * 4 * 6, 4 * (64 * 4 + 16 * 6))
    # Of attention queries, keys, values and results count, and not the scores.
    q, k = shape(1, 500, 2, 8), shape(1, 1000, 2, 8)
    assert count_work(attention, q, k, k)[1:] == (0, 4 * 2 * 8 * (500 + 1000 + 1000 + 500))
