"""Kernels in the order of a mesh's devices: what the order is, and which kernels have one."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from diffusax.models import MODELS, Network
from diffusax.models.arranged import Arranged, KernelOrder, arranged, arranged_tree, unwrapped
from diffusax.models.layers.layers import ArrangedLinear
from diffusax.models.parameter_tree import ordered_leaves, path_name
from diffusax.models.quantized import Quantized, quantize
from diffusax.runtime.devices.mesh import Rule
from diffusax.runtime.devices.splitting import split_widths

TWO = AbstractMesh((1, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
NETWORKS = {
    "UNet2DConditionModel": {},
    "FluxTransformer2DModel": {"num_layers": 1, "num_single_layers": 2},
    "Flux2Transformer2DModel": {"num_layers": 1, "num_single_layers": 2},
}


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("array", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("axis", "widths"), [(-1, (4, 8)), (-2, (6, 2, 8)), (-1, (12,))])
def test_each_device_has_a_part_of_each_layer(array, axis, widths):
    shape = [16, 12]
    shape[axis] = sum(widths)
    kernel = drawn(*shape)
    found = arranged(array(kernel), axis, widths, 2)
    pieces = np.split(kernel, np.cumsum(widths)[:-1], axis)
    for device, own in enumerate(np.split(np.asarray(found.values), 2, axis)):
        expected = [np.split(piece, 2, axis)[device] for piece in pieces]
        np.testing.assert_array_equal(own, np.concatenate(expected, axis))
    np.testing.assert_array_equal(np.asarray(found), kernel)
    np.testing.assert_array_equal(found[2], kernel[2])
    assert isinstance(found.values, np.ndarray | jax.Array)
    assert (found.shape, found.dtype, found.nbytes) == (kernel.shape, kernel.dtype, kernel.nbytes)
    assert found.astype(jnp.bfloat16).dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(found.refilled(kernel + 1)), jnp.asarray(kernel) + 1)


def test_results_are_split_into_those_of_the_layers():
    x, kernel, widths = drawn(3, 8), drawn(8, 24), (4, 8, 12)
    found = arranged(kernel, -1, widths, 4)
    ys = split_widths(jnp.asarray(x @ found.values), widths, 4)
    expected = np.split(x @ kernel, (4, 12), axis=-1)
    for y, wanted in zip(ys, expected, strict=True):
        np.testing.assert_allclose(y, wanted, rtol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int8_convrot", "fp8"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_kernels_of_eight_bits(kind, axis):
    kernel, widths = drawn(96, 64), {-1: (16, 48), -2: (32, 64)}[axis]
    plain = quantize(kernel, kind, np.float32)
    found = arranged(plain, axis, widths, 2)
    assert isinstance(found.values, Quantized)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))
    given = np.random.default_rng(1).standard_normal((5, 96)).astype(np.float32)
    order = arranged(np.arange(kernel.shape[axis])[None] * np.ones((1, 1)), -1, widths, 2).values[0]
    order = order.astype(int)
    product = given[:, order] @ found.values[...] if axis == -2 else given @ found.values[...]
    expected = given @ np.asarray(plain)
    np.testing.assert_allclose(product, expected if axis == -2 else expected[:, order], atol=1e-4)
    later = arranged(jnp.asarray(kernel), axis, widths, 2).quantized(kind)
    np.testing.assert_allclose(np.asarray(later), np.asarray(plain), atol=1e-5)
    assert later.quantized(kind) is later
    again = found.refilled(kernel * 2)
    np.testing.assert_allclose(np.asarray(again), np.asarray(plain) * 2, atol=1e-5)


def test_scales_of_blocks_go_with_their_rows():
    values = np.arange(16 * 4).reshape(16, 4).astype(np.int8)
    scale = np.arange(1, 17).reshape(4, 4).astype(np.float32)
    least = (np.arange(8 * 4).reshape(8, 4).astype(ml_dtypes.bfloat16),)
    plain = Quantized(values, scale, np.dtype(np.float32), least=least)
    for axis, widths in ((-2, (8, 8)), (-1, (2, 2))):
        found = arranged(plain, axis, widths, 2)
        assert isinstance(found, Arranged)
        np.testing.assert_array_equal(np.asarray(found), np.asarray(plain))
        expected = arranged(np.asarray(plain), axis, widths, 2).values
        np.testing.assert_array_equal(found.values[...], expected)
    # Four rows have one scale, and each device would get two of them.
    assert arranged(plain, -2, (4, 12), 2) is plain


def test_what_devices_do_not_divide_stays():
    kernel = drawn(8, 12)
    assert arranged(kernel, -1, (3, 9), 2) is kernel
    assert arranged(kernel, -1, (4, 4), 2) is kernel
    assert arranged(kernel, -1, (4, 8), 1) is kernel
    three = arranged(arranged(kernel, -1, (6, 6), 2), -1, (6, 6), 3)
    np.testing.assert_array_equal(three.values, arranged(kernel, -1, (6, 6), 3).values)
    turned = quantize(drawn(96, 4), "int8_convrot", np.float32)
    assert turned.rotation == 16
    assert arranged(turned, -2, (16, 80), 2) is turned


@pytest.mark.parametrize("name", NETWORKS)
def test_rules_are_for_all_layers_that_stand_side_by_side(name):
    module = MODELS[name]
    network = Network(module, module.config_class(**NETWORKS[name]))
    wanted = {
        ".".join(map(str, (*path, "kernel"))): (layer.axis, layer.widths)
        for path, layer in nnx.iter_modules(network.skeleton)
        if isinstance(layer, ArrangedLinear)
    }
    tree = arranged_tree(TWO, network.shapes, network.tensor_rules)
    found = {
        path_name(path): (x.axis, x.widths)
        for path, x in ordered_leaves(tree)
        if isinstance(x, Arranged)
    }
    assert found == wanted
    assert wanted
    assert unwrapped(tree) == network.shapes
    assert arranged_tree(TWO, tree, network.tensor_rules) is tree
    assert arranged_tree(None, tree, network.tensor_rules) == network.shapes


def test_states_of_training_have_one_order():
    rules = (Rule(r"proj\.kernel", -1, widths=(4, 8)), Rule(r"out\.kernel", -2, widths=(2, 6)))
    params = {"proj": {"kernel": drawn(6, 12), "bias": drawn(12)}, "out": {"kernel": drawn(8, 6)}}
    rows = {"out": {"kernel": drawn(8)}, "proj": {"kernel": drawn(6)}}
    state = {"params": params, "mu": {"a": (params,)}, "rows": rows}
    order = KernelOrder(rules, 2)
    found = order.of_devices(state)
    expected = arranged(params["proj"]["kernel"], -1, (4, 8), 2).values
    np.testing.assert_array_equal(found["params"]["proj"]["kernel"], expected)
    np.testing.assert_array_equal(found["mu"]["a"][0]["proj"]["kernel"], expected)
    out = arranged(params["out"]["kernel"] + rows["out"]["kernel"][:, None], -2, (2, 6), 2).values
    both = found["params"]["out"]["kernel"] + found["rows"]["out"]["kernel"][:, None]
    np.testing.assert_array_equal(both, out)
    for old, new in zip(*map(jax.tree.leaves, (state, order.of_layers(found))), strict=True):
        np.testing.assert_array_equal(old, new)
    read = order.wrapped(found)["params"]
    for name in ("proj", "out"):
        assert isinstance(read[name]["kernel"], Arranged)
        np.testing.assert_array_equal(read[name]["kernel"], params[name]["kernel"])
    assert KernelOrder(rules, 1).of_devices(state) is state
