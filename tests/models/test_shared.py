"""Blocks of one form: traced once, lowered to one function, and equal to blocks by themselves."""

import collections
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from support.tiny_flux import CONFIG, NETWORK, draw_inputs, draw_params

from diffusax.models import shared as module_under_test
from diffusax.models.adapters.low_rank import Adapters, LowRank
from diffusax.models.layers.layers import Linear
from diffusax.models.shared import shared
from diffusax.models.transformers.flux import (
    FluxSingleTransformerBlock,
    FluxTransformerBlock,
)
from diffusax.runtime.devices.lowering import lowering_for

LAYER = "single_transformer_blocks.2.attn.to_q"


@pytest.fixture(scope="module")
def params() -> Any:
    return draw_params()


@pytest.fixture(scope="module")
def inputs() -> tuple[Any, ...]:
    return draw_inputs()


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """How often the blocks of each class are traced in the test."""
    jax.clear_caches()
    counts: collections.Counter[str] = collections.Counter()
    for kind in (FluxTransformerBlock, FluxSingleTransformerBlock):

        def counting(self: Any, *args: Any, call: Any = kind.__call__) -> Any:
            counts[type(self).__name__] += 1
            return call(self, *args)

        monkeypatch.setattr(kind, "__call__", counting)
    return counts


def adapters(rank: int) -> Adapters:
    rng = np.random.default_rng(2)
    down, up = (jnp.asarray(rng.standard_normal((n, m)), jnp.float32) for n, m in [(32, rank)] * 2)
    layer = LowRank(down, up.T, jnp.zeros(rank, jnp.int32))
    return Adapters({LAYER: layer}, jnp.full((1, 1), 0.7))


def run(params: Any, given: Any, **more: Any) -> Any:
    return NETWORK.apply(params, *given, **more)


def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has every block traced by itself from here on."""
    monkeypatch.setattr(module_under_test, "is_tracing", lambda: False)
    jax.clear_caches()


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_blocks_are_traced_once(traced: Any, params: Any, inputs: Any, platform: str) -> None:
    with lowering_for([platform]):
        lowered = jax.jit(run).trace(params, inputs).lower(lowering_platforms=(platform,))
    assert traced == {"FluxTransformerBlock": 1, "FluxSingleTransformerBlock": 1}
    calls = lowered.as_text().count("call @_block")
    # The TPU's compiler wants to see through them.
    assert calls == (platform == "cpu") * (CONFIG.num_layers + CONFIG.num_single_layers)


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_results_and_gradients_are_those_of_blocks_alone(
    params: Any, inputs: Any, checkpointing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(params: Any, adapted: Any) -> jax.Array:
        y = run(params, inputs, adapters=adapted, gradient_checkpointing=checkpointing)
        return jnp.sum(y**2)

    gradient = jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)
    found = jax.jit(gradient)(params, adapters(4))
    alone(monkeypatch)
    wanted = jax.jit(gradient)(params, adapters(4))
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        if jnp.issubdtype(x.dtype, jnp.floating):
            np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * float(jnp.abs(y).max()))


def test_blocks_with_adapters_are_of_another_form(traced: Any, params: Any, inputs: Any) -> None:
    jax.jit(run).lower(params, inputs, adapters=adapters(4))
    assert traced == {"FluxTransformerBlock": 1, "FluxSingleTransformerBlock": 2}
    jax.jit(run).lower(params, inputs, adapters=adapters(8))
    assert traced == {"FluxTransformerBlock": 1, "FluxSingleTransformerBlock": 3}


def test_hooks_see_every_block(params: Any, inputs: Any) -> None:
    def keep(value: Any, at: Any) -> Any:
        return value, jnp.mean(value)

    hooks = {r"single_transformer_blocks\.\d+": keep}
    _, kept = jax.jit(functools.partial(run, hooks=hooks))(params, inputs)
    assert len(set(map(float, kept.values()))) == CONFIG.num_single_layers


def test_no_array_of_a_trace_outlives_it(params: Any, inputs: Any) -> None:
    with jax.checking_leaks():
        jax.clear_caches()
        jax.jit(run).lower(params, inputs, adapters=adapters(4))


class Scaled(nnx.Module):
    """A layer whose result depends on what is no array."""

    def __init__(self, factor: Any, seed: int):
        self.factor = factor
        self.layer = Linear(4, 4, rngs=nnx.Rngs(seed))

    def __call__(self, x: jax.Array, *, more: Any = None) -> jax.Array:
        y = self.layer(x)
        y = self.factor(y) if callable(self.factor) else np.prod(self.factor) * y
        return y if more is None else y + more


@pytest.mark.parametrize("factors", [(2, 3), (jnp.sin, jnp.cos), ((1.0, 2.0), (3.0, 4.0))])
def test_what_is_no_array_tells_forms_apart(factors: Any) -> None:
    x = jnp.linspace(0.0, 1.0, 4)
    blocks = [Scaled(factor, i) for i, factor in enumerate(factors)]
    found = jax.jit(lambda x: [shared(block)(x) for block in blocks])(x)
    for y, block in zip(found, blocks, strict=True):
        np.testing.assert_allclose(y, block(x), atol=1e-6)


def test_arguments_that_are_given_before_count() -> None:
    x, block = jnp.ones(4), Scaled(2, 0)
    given = [None, jnp.full(4, 1.0), jnp.full(4, 5.0), 3]

    @jax.jit
    def all_of(x: jax.Array, given: Any) -> Any:
        return [shared(functools.partial(block, more=more))(x) for more in [*given, 7]]

    for y, more in zip(all_of(x, given), [*given, 7], strict=True):
        np.testing.assert_allclose(y, block(x, more=more), atol=1e-6)


def test_other_functions_are_called_as_they_are() -> None:
    def double(x: jax.Array) -> jax.Array:
        return 2 * x

    assert shared(double) is double
