"""Layers that compute with integers, against NumPy's."""

import contextlib
import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas import tpu as pltpu

from diffusax.models.layers.layers import Linear, SplitLinear
from diffusax.models.ops.int8 import FASTER, linear, multiply, rounds_inputs
from diffusax.models.ops.layer_input import Int8Tokens, LayerInput, as_input, to_int8
from diffusax.models.ops.modulation import modulate, scaled_layer_norm, scaled_rms_norm
from diffusax.models.ops.product_kernel import multiply_scaled, takes
from diffusax.models.ops.rounding_kernel import round_tokens
from diffusax.models.quantized import Quantized, quantize
from diffusax.models.transformers.blocks import JoinedLinear
from diffusax.runtime.devices.lowering import int8_activations, lowering_for
from diffusax.runtime.programs.program import Program
from diffusax.runtime.programs.topology import topology_mesh

RNG = np.random.default_rng(0)
FOUR = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])


def normal(*shape):
    return RNG.standard_normal(shape, np.float32)


def kernel_of(c, d, *, rotation=0, dtype=np.float32):
    values = RNG.integers(-127, 128, (c, d), np.int8)
    scale = np.abs(normal(d)) / 127 / np.sqrt(np.float32(c))
    return Quantized(values, scale, np.dtype(dtype), rotation)


def rotation_of(group):
    """The Kronecker power of the matrix of four rows, in float64."""
    matrix = np.ones((1, 1))
    while len(matrix) < group:
        matrix = np.kron(matrix, FOUR / 2)
    return matrix


def exactly(x, kernel, bias=None):
    """x rounded by the token, and the exact product of integers, scaled in float64."""
    x = np.asarray(x, np.float64)
    if kernel.rotation:
        parts = x.reshape(*x.shape[:-1], -1, kernel.rotation)
        x = (parts @ rotation_of(kernel.rotation)).reshape(x.shape)
    scale = np.abs(x).max(-1, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1)
    sums = np.rint(x / scale).astype(np.int64) @ kernel.values.astype(np.int64)
    y = sums * scale * kernel.scale.astype(np.float64)
    return y if bias is None else y + bias


def multiplied_out(x, kernel, bias=None):
    """x times the kernel as it is, in float64."""
    whole = kernel.values * kernel.scale.astype(np.float64)
    if kernel.rotation:
        parts = whole.reshape(-1, kernel.rotation, whole.shape[-1])
        whole = (rotation_of(kernel.rotation) @ parts).reshape(whole.shape)
    y = np.asarray(x, np.float64) @ whole
    return y if bias is None else y + bias


def error(actual, expected):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize("rotation", [0, 16, 64])
def test_tokens_are_rounded_to_the_nearest_of_their_scale(rotation):
    x = normal(2, 5, 128)
    x[0, 1] = 0
    values, scale = to_int8(jnp.asarray(x), rotation)
    wide = x.reshape(2, 5, -1, rotation) @ rotation_of(rotation) if rotation else x
    wide = wide.reshape(x.shape)
    assert values.dtype == jnp.int8
    np.testing.assert_allclose(
        scale[0, 0, 0] * 127, np.abs(wide[0, 0]).max(), rtol=1e-6, err_msg="the largest is 127"
    )
    np.testing.assert_allclose(values * np.asarray(scale), wide, atol=scale.max() * 0.501)
    assert not np.any(values[0, 1])
    assert scale[0, 1, 0] == 1


def test_products_of_integers_are_exact():
    rows = Int8Tokens(
        jnp.asarray(RNG.integers(-127, 128, (3, 4, 8192), np.int8)),
        jnp.asarray(np.abs(normal(3, 4, 1))),
    )
    kernel, bias = kernel_of(8192, 24), normal(24)
    kernel.values[:, 0] = np.where(rows.values[0, 0] < 0, -127, 127)
    sums = np.asarray(rows.values, np.int64) @ kernel.values.astype(np.int64)
    # Float32 would lose digits of such sums.
    assert sums.max() > 2**24
    expected = sums.astype(np.float32) * np.asarray(rows.scale) * kernel.scale + bias
    np.testing.assert_allclose(multiply(rows, kernel, bias), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rotation", [0, 64])
@pytest.mark.parametrize("with_bias", [True, False])
def test_a_layer_multiplies_what_is_rounded(rotation, with_bias):
    x, kernel = normal(2, 7, 256), kernel_of(256, 48, rotation=rotation)
    bias = normal(48) if with_bias else None
    with int8_activations("on"):
        actual = linear(jnp.asarray(x), kernel, bias)
    np.testing.assert_allclose(actual, exactly(x, kernel, bias), rtol=1e-4, atol=2e-4)
    assert 1e-4 < error(actual, multiplied_out(x, kernel, bias)) < 0.012
    with int8_activations("off"):
        np.testing.assert_allclose(
            linear(jnp.asarray(x), kernel, bias), multiplied_out(x, kernel, bias), atol=2e-5
        )


def test_rotation_keeps_large_channels_from_rounding_the_others():
    x = normal(4, 256)
    x[:, 3] *= 100
    errors = {}
    for rotation in (0, 256):
        kernel = quantize(normal(256, 64), "int8", "float32")
        kernel = Quantized(kernel.values, kernel.scale, kernel.dtype, rotation)
        own = kernel.unrotated().T.reshape(64, -1, 256) @ rotation_of(256) if rotation else None
        whole = kernel.unrotated() if own is None else own.reshape(64, 256).T
        with int8_activations("on"):
            errors[rotation] = error(
                linear(jnp.asarray(x), kernel), np.asarray(x, np.float64) @ whole
            )
    assert errors[256] < errors[0] / 2


def test_gradients_are_those_of_the_kernel_multiplied_out():
    x, kernel, bias = jnp.asarray(normal(3, 64)), kernel_of(64, 16, rotation=16), normal(16)
    toward = normal(3, 16)

    def loss(x, bias):
        return jnp.sum(linear(x, kernel, bias) * toward)

    with int8_activations("on"):
        given = jax.jit(jax.grad(loss, (0, 1)))(x, bias)
    whole = kernel.unrotated().T.reshape(16, -1, 16) @ rotation_of(16)
    np.testing.assert_allclose(given[0], toward @ whole.reshape(16, 64), atol=1e-5)
    np.testing.assert_allclose(given[1], toward.sum(0), atol=1e-5)


def test_gradients_go_through_what_makes_the_tokens():
    x, kernel = jnp.asarray(normal(2, 3, 64)), kernel_of(64, 16)
    shift, scale = normal(2, 1, 64), normal(2, 1, 64)

    def loss(choice, x, shift, scale):
        with int8_activations(choice):
            return jnp.sum(linear(modulate(x, shift, scale), kernel) * 0.1)

    actual, expected = (
        jax.grad(partial(loss, choice), (0, 1, 2))(x, shift, scale) for choice in ("on", "off")
    )
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_layers_of_one_input_round_it_once():
    rows = LayerInput(lambda x: 2 * x, jnp.asarray(normal(2, 64)))
    first = rows.rounded(0)
    assert rows.rounded(0) is first
    assert rows.rounded(16) is not first
    assert as_input(rows) is rows


@pytest.mark.parametrize("choice", ["on", "off"])
def test_layers_beside_each_other_read_their_parts(choice):
    x, y = jnp.asarray(normal(2, 3, 48)), jnp.asarray(normal(2, 3, 80))
    split = nnx.eval_shape(lambda: SplitLinear(48, (8, 24), rngs=nnx.Rngs(0)))
    joined = nnx.eval_shape(lambda: JoinedLinear(48, 80, 16, rngs=nnx.Rngs(0)))
    kernels = kernel_of(48, 32), kernel_of(128, 16)
    for layer, kernel in zip((split, joined), kernels, strict=True):
        layer.kernel.set_value(kernel)
        layer.bias.set_value(jnp.asarray(normal(kernel.shape[1])))
    made = exactly if choice == "on" else multiplied_out
    with int8_activations(choice):
        parts, whole = split(x), joined(x, y)
    expected = made(x, kernels[0], split.bias[...])
    np.testing.assert_allclose(np.concatenate(parts, -1), expected, rtol=1e-4, atol=2e-4)
    beside = np.concatenate([x, y], -1)
    expected = made(beside, kernels[1], joined.bias[...])
    np.testing.assert_allclose(whole, expected, rtol=1e-4, atol=2e-4)


def test_what_is_not_int8_by_channel_is_multiplied_out():
    kernel = kernel_of(64, 16)
    blocks = Quantized(kernel.values, np.ones((2, 16), np.float32), kernel.dtype)
    floats = Quantized(jnp.asarray(kernel.values, jnp.float8_e4m3fn), kernel.scale, kernel.dtype)
    with int8_activations("on"):
        assert rounds_inputs((4, 64), kernel)
        assert not rounds_inputs((4, 64), blocks)
        assert not rounds_inputs((4, 64), floats)


def test_smaller_scales_and_offsets_of_blocks_are_not_left_out():
    own = {"fine": jnp.full((2, 32), 3.0)}, {"least": (jnp.full((2, 32), 0.5),)}
    for more in own:
        kernel = dataclasses.replace(kernel_of(64, 32), scale=jnp.float32(0.1), **more)
        x = jnp.asarray(normal(4, 64))
        with int8_activations("on"):
            assert not rounds_inputs(x.shape, kernel)
            y = linear(x, kernel)
        np.testing.assert_allclose(y, x @ np.asarray(kernel), rtol=1e-4, atol=1e-3)


def forms(c):
    """What makes tokens of arrays, and their arguments."""
    x, vectors = jnp.asarray(normal(2, 70, c), jnp.bfloat16), normal(3, 2, 1, c)
    shift, scale, _ = map(partial(jnp.asarray, dtype=jnp.bfloat16), vectors)
    norm = type("Norm", (), {"epsilon": 1e-5, "scale": shift[0, 0]})
    other = jnp.asarray(normal(2, 70, 2 * c), jnp.bfloat16)
    return {
        "as they are": as_input(x),
        "modulated": modulate(x, shift, scale),
        "modulated by the token": modulate(x, jnp.broadcast_to(shift, x.shape), scale),
        "layer norm": scaled_layer_norm(x, scale, eps=1e-6),
        "rms norm": scaled_rms_norm(norm, x, scale),
        "rms norm alone": scaled_rms_norm(norm, x, 1),
        "beside each other": LayerInput(
            lambda x, y: jnp.concatenate([x, y], -1), x, other, width=3 * c
        ),
    }


@pytest.mark.parametrize("rotation", [0, 64, 256])
@pytest.mark.parametrize("name", forms(256))
def test_the_kernel_of_tpus_makes_and_rounds_tokens(name, rotation):
    rows = forms(256)[name]
    with pltpu.force_tpu_interpret_mode():
        values, scale = round_tokens(
            rows.form, rows.arguments, width=rows.shape[-1], rotation=rotation
        )
    expected = to_int8(rows.form(*rows.arguments), rotation)
    np.testing.assert_allclose(scale, expected.scale, rtol=2e-2)
    # Roundings to bfloat16 elsewhere in the form may lead to the neighbour.
    difference = np.abs(np.int32(values) - np.int32(expected.values))
    assert difference.max() <= 2
    assert np.mean(difference > 0) < 0.1
    assert values.shape == rows.shape


@pytest.mark.parametrize("topology", ["v5e:1", "v6e:1"])
def test_tpus_compile_the_kernel_and_the_product_of_integers(topology):
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = topology_mesh(topology)
    whole = NamedSharding(mesh, PartitionSpec())

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=whole)

    def layer(x, shift, scale, values, weights):
        kernel = Quantized(values, weights, np.dtype(jnp.bfloat16), 256)
        return linear(modulate(x, shift, scale), kernel)

    given = (
        shape(1, 512, 1024),
        *[shape(1, 1, 1024)] * 2,
        shape(1024, 1024, dtype=jnp.int8),
        shape(1024, dtype=jnp.float32),
    )
    with jax.set_mesh(mesh), lowering_for(["tpu"]):
        lowered = jax.jit(layer).trace(*given).lower(lowering_platforms=("tpu",))
    text = lowered.compile().as_text()
    assert "tpu_custom_call" in text
    assert "s32[512,1024]" in text
    with jax.set_mesh(mesh), lowering_for(["tpu"]), int8_activations("off"):
        lowered = jax.jit(layer).trace(*given).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in lowered.as_text()


def test_devices_where_it_is_not_faster_multiply_the_kernel_out():
    kernel = kernel_of(1024, 1024, rotation=256)
    assert not rounds_inputs((4096, 1024), kernel)
    with lowering_for(["tpu"]):
        # This machine has no TPU.
        assert not rounds_inputs((4096, 1024), kernel)
        with jax.set_mesh(topology_mesh("v5e:1")):
            assert rounds_inputs((4, 1024, 1024), kernel)
            assert not rounds_inputs((4, 1024), kernel)
            assert not rounds_inputs((4, 1024, 1024), kernel_of(1024, 1024))
        with jax.set_mesh(topology_mesh("v4:1")):
            assert not rounds_inputs((4, 1024, 1024), kernel)
    assert "TPU v6 lite" in FASTER


def test_the_choice_is_one_of_three(monkeypatch):
    with pytest.raises(ValueError, match=r"choice must be 'auto', 'on' or 'off' \(got 'yes'\)"):
        int8_activations("yes")
    monkeypatch.setenv("DIFFUSAX_INT8_ACTIVATIONS", "on")
    assert rounds_inputs((4, 64), kernel_of(64, 16))
    with int8_activations("off"):
        assert not rounds_inputs((4, 64), kernel_of(64, 16))
    monkeypatch.setenv("DIFFUSAX_INT8_ACTIVATIONS", "1")
    with pytest.raises(ValueError, match="DIFFUSAX_INT8_ACTIVATIONS must be"):
        rounds_inputs((4, 64), kernel_of(64, 16))


def test_programs_are_those_of_the_choice():
    kernel, x = jax.tree.map(jnp.asarray, kernel_of(64, 16)), jnp.asarray(normal(3, 64))
    program = Program(lambda params, x: linear(x, params))
    found = {}
    for choice in ("off", "on", "off"):
        with int8_activations(choice):
            found.setdefault(choice, []).append(np.asarray(program(kernel, x)))
    np.testing.assert_array_equal(*found["off"])
    assert error(found["on"][0], found["off"][0]) > 1e-4


def layer_of(kernel):
    layer = nnx.eval_shape(lambda: Linear(64, 16, rngs=nnx.Rngs(0)))
    layer.kernel.set_value(kernel)
    layer.bias.set_value(jnp.zeros(16))
    return layer


@pytest.mark.parametrize("choice", ["on", "off"])
def test_adapters_read_the_tokens_as_they_are(choice):
    class Double:
        def linear(self, x, base):
            assert x.dtype == jnp.float32
            return jnp.broadcast_to(x.sum(-1, keepdims=True), base.y.shape)

    kernel, x = kernel_of(64, 16), normal(1, 3, 64)
    layer = layer_of(kernel)
    made = exactly if choice == "on" else multiplied_out
    with int8_activations(choice), _attribute(layer, "adapters", Double()):
        actual = layer(jnp.asarray(x))
    expected = made(x, kernel) + x.sum(-1, keepdims=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=2e-4)


@contextlib.contextmanager
def _attribute(layer, name, value):
    object.__setattr__(layer, name, value)
    yield


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_kernel_of_gpus_multiplies_and_scales(with_bias):
    kernel = kernel_of(192, 256)
    bias = jnp.asarray(normal(256)) if with_bias else None
    # The last block of tokens is not full.
    tokens = Int8Tokens(
        jnp.asarray(RNG.integers(-127, 128, (130, 192), np.int8)),
        jnp.asarray(np.abs(normal(130, 1))),
    )
    actual = multiply_scaled(tokens, jax.tree.map(jnp.asarray, kernel), bias, interpret=True)
    sums = np.asarray(tokens.values, np.int64) @ kernel.values.astype(np.int64)
    expected = sums * np.float64(tokens.scale) * kernel.scale + (0 if bias is None else bias)
    assert actual.shape == (130, 256)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert takes(kernel)
    assert not takes(kernel_of(192, 130))
    assert not takes(kernel_of(200, 256))
