"""The kernel of TPUs for heads that lie side by side, in Pallas' interpreter."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export
from jax.experimental.pallas import tpu as pltpu

from diffusax.models.layers.transformer import FeedForward
from diffusax.models.ops import attention as attention_module
from diffusax.models.ops.attention import attention
from diffusax.models.ops.attention_kernels import Operands
from diffusax.runtime.devices.mesh import make_mesh

RNG = np.random.default_rng(0)


@pytest.fixture
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


def arrays(t, s, heads, d):
    return [RNG.standard_normal((2, n, heads, d), np.float32) for n in (t, s, s)]


def exact(q, k, v, scale):
    """All scores in float64."""
    q, k, v = map(np.float64, (q, k, v))
    scores = scale * np.einsum("bthd,bshd->bhts", q, k)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhts,bshd->bthd", p / p.sum(-1, keepdims=True), v)


def side_by_side(q, k, v, scale):
    return attention_module.LOWERINGS["side_by_side"](Operands(q, k, v, scale))


@pytest.mark.parametrize(
    ("t", "s", "heads", "d"),
    [
        (256, 384, 2, 64),
        # Five heads fill two and a half vectors.
        (130, 77, 5, 64),
        # More than a block of queries and of keys, the last of each not full.
        (600, 1100, 3, 64),
        (40, 1030, 8, 32),
        (16, 4, 1, 64),
    ],
)
def test_it_equals_attention_in_float64(interpreted, t, s, heads, d):
    q, k, v = arrays(t, s, heads, d)
    actual = side_by_side(*map(jnp.asarray, (4 * q, k, v)), 0.3)
    np.testing.assert_allclose(actual, exact(4 * q, k, v, 0.3), atol=2e-5)


def test_it_runs_on_a_mesh(interpreted):
    q, k, v = arrays(72, 40, 2, 64)
    with jax.set_mesh(make_mesh(devices=jax.devices()[:1])):
        actual = jax.jit(partial(side_by_side, scale=0.125))(q, k, v)
    np.testing.assert_allclose(actual, exact(q, k, v, 0.125), atol=2e-5)


@pytest.mark.parametrize("t", [80, 1040])
def test_its_gradients_are_those_of_plain_attention(interpreted, t):
    given = list(map(jnp.asarray, arrays(t, t, 1, 64)))

    def loss(form, *qkv):
        return jnp.sum(form(*qkv) ** 2)

    def whole(q, k, v):
        return attention_module.LOWERINGS["whole"](Operands(q, k, v, 0.125))

    actual = jax.grad(partial(loss, partial(side_by_side, scale=0.125)), (0, 1, 2))(*given)
    expected = jax.grad(partial(loss, whole), (0, 1, 2))(*given)
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "s", "heads", "key_heads", "d", "plain", "name"),
    [
        ("bfloat16", 4096, 5, 5, 64, True, "side_by_side"),
        ("bfloat16", 77, 20, 20, 64, True, "side_by_side"),
        ("bfloat16", 4096, 8, 8, 40, True, "flash"),
        ("bfloat16", 4096, 24, 24, 128, True, "flash"),
        ("bfloat16", 4096, 5, 5, 64, False, "flash"),
        ("bfloat16", 77, 12, 12, 64, False, "xla"),
        ("bfloat16", 4096, 8, 2, 64, True, "flash"),
        ("bfloat16", 16384, 10, 10, 64, True, "flash"),
        ("float32", 4096, 5, 5, 64, True, "flash"),
    ],
)
def test_it_is_for_narrow_heads_that_see_all_keys(dtype, s, heads, key_heads, d, plain, name):
    given = jnp.dtype(dtype), (2, 4096, heads, d), (2, s, key_heads, d)
    assert attention_module.choose_lowering("tpu", *given, plain=plain) == name
    for platform in ("cpu", "cuda", "rocm"):
        others = attention_module.choose_lowering(platform, *given)
        assert attention_module.choose_lowering(platform, *given, plain=plain) == others
        assert others != "side_by_side"


def lowered(run, *shapes):
    """The program for TPUs, in bfloat16."""
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return jax.jit(run).trace(*given).lower(lowering_platforms=("tpu",)).as_text()


def test_nothing_is_turned_before_or_after_it():
    def run(*qkv):
        q, k, v = (x.reshape(*x.shape[:2], 5, 64) for x in qkv)
        return attention(q, k, v).reshape(qkv[0].shape)

    text = lowered(run, *[(2, 1024, 320)] * 3)
    assert "tpu_custom_call" in text
    assert "stablehlo.transpose" not in text
    causal = lowered(partial(attention, causal=True), *[(2, 1024, 5, 64)] * 3)
    assert "stablehlo.transpose" in causal


def test_an_export_for_any_number_of_images_is_without_it():
    (b,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((b, 77, 2, 64), jnp.bfloat16)
    exported = export.export(jax.jit(attention), platforms=["tpu"])(shape, shape, shape)
    assert "tpu_custom_call" not in exported.mlir_module()


def test_a_tpu_multiplies_the_halves_of_a_gated_layer_apart():
    layer = FeedForward(64, rngs=nnx.Rngs(0))
    graph, state = nnx.split(layer)
    halved = jax.tree.map(lambda x: x.astype(jnp.bfloat16), nnx.to_pure_dict(state))

    def run(x):
        own = nnx.split(nnx.merge(graph, state))[1]
        own.replace_by_pure_dict(halved)
        return nnx.merge(graph, own)(x)

    for platform, widths in [("tpu", {256, 64}), ("cuda", {512, 64}), ("cpu", {512, 64})]:
        x = jax.ShapeDtypeStruct((2, 16, 64), jnp.bfloat16)
        text = jax.jit(run).trace(x).lower(lowering_platforms=(platform,)).as_text()
        products = re.findall(r"dot_general.*-> tensor<(?:\d+x)*(\d+)x[a-z]", text)
        assert set(map(int, products)) == widths
