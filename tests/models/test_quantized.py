"""Kernels of eight bits: how they are rounded, and that layers read them as the multiplied out."""

import gc
import weakref
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from diffusax.checkpoints.tree import aligned_empty
from diffusax.models.layers.layers import Conv2d, Linear, SplitLinear
from diffusax.models.parameter_tree import first_parameter, ordered_leaves
from diffusax.models.quantized import (
    Quantized,
    hadamard,
    parse_weights,
    quantize,
    quantize_array,
    quantize_in_place,
    quantized_shapes,
    quantizes,
    rotate,
)
from diffusax.models.transformers.blocks import JoinedLinear
from diffusax.runtime.devices.memory import array_bytes


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("shape", [(40, 24), (3, 3, 8, 24)])
def test_integers_are_the_nearest_of_a_channels_scale(shape):
    kernel = normal(*shape)
    kernel[..., 5] = 0
    found = quantize(kernel, "int8", "bfloat16")
    for channel in range(24):
        own = kernel[..., channel].astype(np.float64)
        scale = np.abs(own).max() / 127 or 1.0
        np.testing.assert_allclose(found.scale[channel], scale, rtol=1e-6)
        error = found.values[..., channel].astype(np.float64) * scale - own
        assert np.abs(error).max() <= scale * 0.5001
    assert found.values.dtype == np.int8
    assert (found.shape, found.dtype) == (shape, np.dtype("bfloat16"))
    assert found.nbytes == kernel.size + 4 * 24


def test_fp8_is_rounded_as_its_dtype_rounds():
    kernel = normal(40, 24)
    found = quantize(kernel.T.copy().T, "fp8", "float32")
    scale = np.abs(kernel).max(0) * np.float32(1 / 448)
    np.testing.assert_array_equal(
        found.values.astype(np.float32), (kernel / scale).astype(ml_dtypes.float8_e4m3fn)
    )


def test_fp8_between_two_numbers_is_rounded_to_the_even_one():
    numbers = np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    beside = [np.nextafter(middles, np.float32(end)) for end in (0, 448)]
    kernel = np.concatenate([numbers, middles, *beside])
    kernel = np.concatenate([kernel, -kernel])[:, None]
    # The largest is 448, so that the scale is one.
    found = quantize(kernel, "fp8", "float32").values
    expected = kernel.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("inputs", "group"), [(512, 256), (192, 64), (48, 16), (24, 0)])
def test_rotated_integers_are_those_of_the_rotated_kernel(inputs, group):
    kernel = normal(inputs, 24)
    kernel[5] *= 50
    found = quantize(kernel, "int8_convrot", "float32")
    assert found.rotation == group
    turned = kernel.astype(np.float64)
    if group:
        parts = turned.reshape(-1, group, 24)
        turned = np.einsum("jk,gkd->gjd", hadamard(group), parts).reshape(inputs, 24)
    plain = quantize(turned.astype(np.float32), "int8", "float32")
    assert (found.values != plain.values).mean() < 1e-3
    np.testing.assert_allclose(found.scale, plain.scale, rtol=1e-5)
    error = np.abs(np.asarray(found) - kernel)[np.arange(inputs) != 5]
    assert error.max() < (1.0 if group else 0.9)


@pytest.mark.parametrize("kind", ["int8", "int8_convrot", "fp8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_and_the_device_round_alike(kind, dtype):
    kernel = normal(320, 24).astype(dtype)
    host, device = quantize(kernel, kind, dtype), quantize_array(jnp.asarray(kernel), kind)
    # What lies between two numbers may go to either of them.
    differs = np.asarray(device.values).astype(np.float32) != host.values.astype(np.float32)
    assert differs.mean() < 1e-3
    np.testing.assert_allclose(np.asarray(device.scale), host.scale, rtol=1e-6)
    assert device.dtype == host.dtype == np.dtype(dtype)
    assert device.rotation == host.rotation == (64 if kind == "int8_convrot" else 0)


def test_the_rotation_is_its_own_inverse_and_that_of_convrot():
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
    for group in (4, 16, 64, 256):
        matrix = four
        while len(matrix) < group:
            matrix = np.kron(matrix, four)
        np.testing.assert_array_equal(hadamard(group), (matrix / group**0.5).astype(np.float32))
        np.testing.assert_allclose(hadamard(group) @ hadamard(group), np.eye(group), atol=1e-6)
    with pytest.raises(ValueError, match="power of four"):
        hadamard(32)


def forms(c, d):
    """Kernels of eight bits with each kind of scale."""
    whole = quantize(normal(c, d), "int8", "float32")
    rng = np.random.default_rng(1)
    numbers = rng.integers(-127, 128, (c, d)).astype(np.int8)
    return {
        "channels": whole,
        "one": Quantized(numbers, np.float32(0.01), np.dtype("float32")),
        "blocks": Quantized(numbers, normal(c // 8, d), np.dtype("float32")),
        "rotated": Quantized(numbers, normal(d), np.dtype("float32"), 16),
        "fp8": quantize(normal(c, d), "fp8", "float32"),
        # As in GGUF's Q4_K, and as nvfp4.
        "parts": Quantized(
            numbers,
            normal(2, d),
            np.dtype("float32"),
            fine=rng.integers(0, 64, (8, d)).astype(np.int8),
            least=(normal(2, d, seed=2), rng.integers(0, 64, (8, d)).astype(np.int8)),
        ),
        "four bits": Quantized(
            rng.integers(0, 16, (c, d)).astype(ml_dtypes.uint4), normal(4, d), np.dtype("float32")
        ),
        "fine": Quantized(numbers, np.float32(0.1), np.dtype("float32"), fine=normal(4, d)),
    }


def multiplied_out(kernel):
    """The kernel in float64, by the definition."""
    c, d = kernel.shape

    def each(x):
        x = np.asarray(x, np.float64)
        return np.repeat(x, c // len(x), axis=0) if x.ndim == 2 else x

    scale = each(kernel.scale) if kernel.fine is None else each(kernel.scale) * each(kernel.fine)
    values = np.asarray(kernel.values).astype(np.float64) * scale
    if kernel.least:
        values = values - np.prod([each(x) for x in kernel.least], axis=0)
    if kernel.rotation:
        rows = values.reshape(-1, kernel.rotation, d)
        values = np.einsum("gkd,jk->gjd", rows, hadamard(kernel.rotation)).reshape(c, d)
    return values


@pytest.mark.parametrize("form", forms(32, 24))
def test_layers_compute_as_with_the_kernel_multiplied_out(form):
    kernel = forms(32, 24)[form]
    expected = multiplied_out(kernel)
    close = 1e-6 * np.abs(expected).max()
    np.testing.assert_allclose(np.asarray(kernel), expected, atol=close)
    x, rngs = normal(3, 5, 32), nnx.Rngs(0)
    wanted = x.astype(np.float64) @ expected
    layers = {
        "linear": Linear(32, 24, rngs=rngs, bias=False),
        "split": SplitLinear(32, (8, 16), rngs=rngs, bias=False, read_together=(1, 1)),
        "joined": JoinedLinear(20, 12, 24, rngs=rngs, bias=False),
    }
    for name, layer in layers.items():
        layer.kernel.set_value(jax.tree.map(jnp.asarray, kernel))
        inputs = (x[..., :20], x[..., 20:]) if name == "joined" else (x,)
        y = jax.jit(lambda *xs, layer=layer: layer(*xs))(*map(jnp.asarray, inputs))
        y = np.concatenate(y, -1) if name == "split" else np.asarray(y)
        np.testing.assert_allclose(y, wanted, atol=1e-5 * np.abs(wanted).max())


def test_a_convolution_computes_as_with_the_kernel_multiplied_out():
    kernel, x = quantize(normal(3, 3, 8, 24), "int8", "float32"), normal(2, 6, 5, 8)
    layer = Conv2d(8, 24, 3, rngs=nnx.Rngs(0))
    layer.kernel.set_value(jnp.asarray(np.asarray(kernel)))
    expected = layer(jnp.asarray(x))
    layer.kernel.set_value(kernel)
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-6)


def test_the_input_has_a_gradient_through_the_kernel():
    kernel = jax.tree.map(jnp.asarray, forms(32, 24)["rotated"])
    layer = Linear(32, 24, rngs=nnx.Rngs(0), bias=False)
    layer.kernel.set_value(kernel)
    found = jax.grad(lambda x: layer(x).sum())(jnp.asarray(normal(2, 32)))
    np.testing.assert_allclose(found[0], multiplied_out(kernel).sum(1), rtol=1e-4, atol=1e-4)


def test_the_dtype_of_computation_is_that_of_the_result():
    kernel = forms(32, 24)["rotated"].astype("bfloat16")
    assert kernel[...].dtype == jnp.bfloat16
    assert rotate(jnp.ones((2, 32), jnp.bfloat16), 16).dtype == jnp.bfloat16


@pytest.mark.parametrize("form", ["channels", "one", "rotated", "parts", "four bits", "fp8"])
def test_another_kernel_takes_the_same_form(form):
    kernel, other = forms(32, 24)[form], normal(32, 24)
    new = kernel.refilled(other)
    eight = np.int8 if form == "four bits" else kernel.values.dtype
    assert (new.values.dtype, new.rotation) == (eight, kernel.rotation)
    assert np.abs(np.asarray(new) - other).max() < (0.2 if form == "fp8" else 0.03)


NAMES = {
    "transformer_blocks.0.attn.to_q.kernel": (32, 8),
    "down_blocks.0.resnets.0.conv1.kernel": (3, 3, 8, 8),
}
OTHERS = {
    "proj_out.kernel": (32, 8),
    "transformer_blocks.0.norm.scale": (32,),
    "transformer_blocks.0.attn.to_q.bias": (32,),
    "transformer_blocks.0.few.kernel": (8, 32),
    "layers.0.token.embedding": (100, 32),
    "decoder.0.conv.frame_kernel": (3, 3, 8, 8),
}


def test_kernels_inside_of_blocks_are_quantised_and_nothing_else():
    assert all(quantizes(name, shape) for name, shape in NAMES.items())
    assert not any(quantizes(name, shape) for name, shape in OTHERS.items())


def tree_of(leaf):
    tree = {}
    for name, shape in {**NAMES, **OTHERS}.items():
        *parents, last = name.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        node[last] = leaf(shape)
    return tree


def test_a_tree_is_quantised_kernel_by_kernel_and_each_old_one_is_freed():
    tree = tree_of(lambda shape: jnp.asarray(normal(*shape)))
    old = [weakref.ref(leaf) for leaf in jax.tree.leaves(tree)]
    quantize_in_place(tree, "int8")
    gc.collect()
    assert [ref() is None for ref in old].count(True) == len(NAMES)
    named = {".".join(str(k.key) for k in path): leaf for path, leaf in ordered_leaves(tree)}
    assert {n for n, leaf in named.items() if isinstance(leaf, Quantized)} == set(NAMES)
    again = dict(named)
    quantize_in_place(tree, "fp8")
    assert all(leaf is again[".".join(str(k.key) for k in p)] for p, leaf in ordered_leaves(tree))


def test_memory_that_jax_shares_with_numpy_is_given_back_meanwhile():
    array = aligned_empty((256, 256), "float32")
    array[...] = normal(256, 256)
    freed, tree = weakref.ref(array), {"0": {"kernel": jax.device_put(array)}}
    del array
    gc.disable()
    try:
        quantize_in_place(tree, "int8")
        assert freed() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["fp8", "int8_convrot"])
def test_shapes_are_those_of_what_is_quantised(kind):
    tree = tree_of(lambda shape: jnp.asarray(normal(*shape)))
    wanted = quantized_shapes(jax.eval_shape(lambda: tree), kind)
    quantize_in_place(tree, kind)
    assert jax.tree.structure(wanted) == jax.tree.structure(tree)
    for shape, leaf in zip(jax.tree.leaves(wanted), jax.tree.leaves(tree), strict=True):
        assert (shape.shape, shape.dtype) == (leaf.shape, leaf.dtype)


def test_scales_lie_with_the_channels_that_they_are_for():
    mesh = AbstractMesh((2, 2), ("fsdp", "tensor"))
    kernel = forms(32, 24)
    rows = NamedSharding(mesh, PartitionSpec("tensor", "fsdp"))
    assert kernel["channels"].places(rows).scale.spec == PartitionSpec("fsdp")
    assert kernel["one"].places(rows).scale.spec == PartitionSpec()
    assert kernel["blocks"].places(rows).scale.spec == PartitionSpec("tensor", "fsdp")
    parts = kernel["parts"].places(rows)
    assert parts.values.spec == PartitionSpec("tensor", "fsdp")
    for place in (parts.scale, parts.fine, *parts.least):
        assert place.spec == PartitionSpec("tensor", "fsdp")
    narrow = quantize(normal(32, 23), "int8", "float32")
    assert narrow.places(NamedSharding(mesh, PartitionSpec("tensor"))).scale.spec == PartitionSpec()


def test_the_first_parameter_is_one_with_the_dtype_of_computation():
    kernel = forms(32, 24)["fp8"].astype("bfloat16")
    assert first_parameter({"b": {}, "c": {"kernel": kernel}}) is kernel
    assert first_parameter([{}, {"a": 3}]) == 3
    assert first_parameter({}) is None


def test_other_kinds_are_refused():
    assert parse_weights(None) is None
    with pytest.raises(ValueError, match=r"weights must be one of 'int8', .*'fp8', or.*'int4'"):
        parse_weights("int4")
    assert parse_weights("file", loading=True) == "file"
    with pytest.raises(ValueError, match="got 'file'"):
        parse_weights("file")


def test_four_bits_are_counted_as_half_a_byte_where_they_are_packed():
    device = SimpleNamespace(platform="tpu")
    place = SimpleNamespace(
        device_set=[device], shard_shape=lambda shape: (shape[0] // 2, shape[1])
    )
    four = jax.ShapeDtypeStruct((32, 24), jnp.uint4)
    assert array_bytes(four, place) == 16 * 24 / 2
    assert array_bytes(jax.ShapeDtypeStruct((32, 24), jnp.int8), place) == 16 * 24
    # CPUs and NumPy give each number a byte.
    assert array_bytes(jnp.zeros((32, 24), jnp.uint4)) == 32 * 24
    assert array_bytes(np.zeros((32, 24), ml_dtypes.uint4)) == 32 * 24
