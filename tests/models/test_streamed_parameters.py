"""Parameters in the host's memory: equal results, and copies one block ahead."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from support.tiny_flux import CONFIG, NETWORK, draw_inputs, draw_params

from diffusax.models.network import Network, initialize_params
from diffusax.models.parameter_tree import path_name
from diffusax.models.quantized import quantize_array, quantizes
from diffusax.models.transformers.flux import FluxTransformer2DModel
from diffusax.pipelines.families.placement import put_streamed
from diffusax.runtime.devices.host import in_host_memory


@pytest.fixture(scope="module")
def params() -> Any:
    return draw_params()


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, ...]:
    return draw_inputs()


def streamed(params: Any, stay: str) -> Any:
    return put_streamed(params, SingleDeviceSharding(jax.local_devices()[0]), stay)


def quantized(params: Any) -> Any:
    def one(path: Any, x: Any) -> Any:
        return quantize_array(x, "int8") if quantizes(path_name(path), x.shape) else x

    return jax.tree_util.tree_map_with_path(one, params)


@pytest.mark.parametrize("kind", ["float32", "int8"])
def test_the_same_bits(params, inputs, kind):
    own = quantized(params) if kind == "int8" else params
    run = jax.jit(NETWORK.apply)
    expected = np.asarray(run(own, *inputs))
    for stay in ("blocks", "everything"):
        there = streamed(own, stay)
        assert any(map(in_host_memory, jax.tree.leaves(there)))
        np.testing.assert_array_equal(run(there, *inputs), expected)


def test_gradients_compute_activations_again(inputs):
    network = Network(
        FluxTransformer2DModel, dataclasses.replace(CONFIG, num_layers=1, num_single_layers=1)
    )
    params = initialize_params(network.shapes, seed=1)
    there = streamed(params, "blocks")

    def total(params: Any, x: jax.Array) -> jax.Array:
        given = {"gradient_checkpointing": "blocks"}
        return network.apply(params, x, *inputs[1:], **given).sum()

    found, expected = (jax.jit(jax.grad(total, 1))(own, inputs[0]) for own in (there, params))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_about_one_block_is_on_the_device(params, inputs):
    there = streamed(params, "blocks")
    closed = jax.make_jaxpr(NETWORK.apply)(there, *inputs)
    assert sum(map(in_host_memory, jax.tree.leaves(there))) == 2 * 14 + 5 * 6
    sizes = [
        sum(x.nbytes for x in jax.tree.leaves(block) if x.ndim > 1)
        for name in ("transformer_blocks", "single_transformer_blocks")
        for block in params[name].values()
    ]
    most, copied, total = held(closed.jaxpr)
    assert total == copied == sum(sizes)
    # Copies for a block begin with its first layers' turn in the block before.
    assert 0.5 * max(sizes) < most < 1.6 * max(sizes) < 0.4 * total


def held(jaxpr: Any) -> tuple[int, int, int]:
    """The most bytes of copies that are alive at once, those that come after what a layer has
    computed, and those of all copies, if each operation runs at its place.
    """
    last = {}
    for i, eqn in enumerate(jaxpr.eqns):
        for x in eqn.invars:
            if not isinstance(x, jax.extend.core.Literal):
                last[x] = i
    ordered = {
        x
        for eqn in jaxpr.eqns
        if eqn.primitive.name == "optimization_barrier" and all(y in last for y in eqn.outvars)
        for x in eqn.outvars
    }
    alive: dict[Any, int] = {}
    most = bound = total = 0
    for i, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive.name == "device_put":
            for x, y in zip(eqn.invars, eqn.outvars, strict=True):
                size = y.aval.size * y.aval.dtype.itemsize
                alive[y], total, bound = size, total + size, bound + size * (x in ordered)
        most = max(most, sum(alive.values()))
        alive = {x: size for x, size in alive.items() if last[x] > i}
    return most, bound, total
