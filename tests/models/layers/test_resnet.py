"""Residual blocks whose maps are so large that a GPU normalises one half after the other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from diffusax.models.layers import resnet
from diffusax.models.layers.resnet import ResnetBlock2D
from diffusax.runtime.devices.lowering import lowering_for


def block(c: int, d: int, **options) -> ResnetBlock2D:
    made = ResnetBlock2D(c, d, None, groups=4, rngs=nnx.Rngs(0), **options)
    rng = np.random.default_rng(0)
    state = jax.tree.map(
        lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), nnx.state(made)
    )
    nnx.update(made, state)
    return made


def barriers(layer, x) -> int:
    """The number of barriers of a block's trace; a map in two bands has one."""
    return str(jax.make_jaxpr(lambda x: layer(x))(x)).count("optimization_barrier")


@pytest.mark.parametrize("rows", [2, 7, 12])
def test_bands_of_rows_are_the_whole_map(monkeypatch, rows):
    layer = block(16, 8)
    x = jnp.asarray(np.random.default_rng(1).standard_normal((2, rows, 6, 16)), jnp.float32)

    def loss(x):
        return jnp.sum(jnp.sin(layer(x)))

    with lowering_for(["cuda"]):
        expected, slopes = layer(x), jax.grad(loss)(x)
        whole = barriers(layer, x)
        monkeypatch.setattr(resnet, "_LARGE", x.nbytes)
        found, other = layer(x), jax.grad(loss)(x)
        assert barriers(layer, x) == whole + 1
    np.testing.assert_allclose(found, expected, atol=1e-5)
    np.testing.assert_allclose(other, slopes, atol=1e-5)
    assert np.abs(found).max() > 1


def test_only_what_gpus_would_hold_beside_a_wider_map_is_in_bands(monkeypatch):
    x = jnp.ones((1, 8, 8, 16))
    monkeypatch.setattr(resnet, "_LARGE", x.nbytes + 1)
    with lowering_for(["cuda"]):
        count = barriers(block(16, 8), x)
    monkeypatch.setattr(resnet, "_LARGE", 1)
    for platform, layer in (("cuda", block(16, 16)), ("cuda", block(16, 8, resample="up"))):
        with lowering_for([platform]):
            assert barriers(layer, x) == count
    for platform in ("tpu", "cpu"):
        with lowering_for([platform]):
            bands = barriers(block(16, 8), x)
            monkeypatch.setattr(resnet, "_LARGE", 2**28)
            assert bands == barriers(block(16, 8), x)
            monkeypatch.setattr(resnet, "_LARGE", 1)
