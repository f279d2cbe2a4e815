"""The compiled training step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from diffusax.training.ema.update import EMAConfig, copy_as_average
from diffusax.training.step.step import initial_state, make_train_step

PARAMS = {"w": {"kernel": np.random.default_rng(0).standard_normal((5, 3)).astype(np.float16)}}
FROZEN = {"bias": jnp.ones(3)}


def loss(params, frozen, batch, keys):
    noise = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
    y = jnp.tanh(batch["x"] @ params["w"]["kernel"]) + frozen["bias"]
    return ((y - noise) ** 2).mean(-1)


def batch(n: int = 12, seed: int = 0) -> dict:
    return {"x": jnp.asarray(np.random.default_rng(seed).standard_normal((n, 5)), jnp.float32)}


def run(steps: int = 3, optimizer=None, batches=None, state=None, **options):
    optimizer = optimizer or optax.adam(0.1)
    step = jax.jit(make_train_step(loss, optimizer, **options))
    state = state or initial_state(PARAMS, optimizer, seed=7)
    history = []
    for i in range(steps):
        state, metrics = step(state, FROZEN, (batches or batch)(seed=i))
        history.append({name: float(value) for name, value in metrics.items()})
    return state, history


def test_parameters_are_float32_and_move():
    state, history = run()
    assert state.params["w"]["kernel"].dtype == jnp.float32
    assert np.abs(state.params["w"]["kernel"] - PARAMS["w"]["kernel"]).mean() > 0.05
    assert int(state.step) == 3
    assert history[0]["loss"] != history[1]["loss"]


@pytest.mark.parametrize("accumulate", [2, 3, 12])
def test_microbatches_give_what_the_whole_batch_gives(accumulate):
    whole, expected = run(optimizer=optax.sgd(0.1))
    split, history = run(optimizer=optax.sgd(0.1), accumulate=accumulate)
    for a, b in zip(history, expected):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
        assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-5)
    np.testing.assert_allclose(
        split.params["w"]["kernel"], whole.params["w"]["kernel"], rtol=1e-5, atol=1e-6
    )


def test_each_example_and_step_draws_its_own_numbers():
    seen = []

    def spying(params, frozen, batch, keys):
        jax.debug.callback(lambda k: seen.append(np.asarray(k)), jax.random.key_data(keys))
        return (params["w"]["kernel"] ** 2).mean() * jnp.ones(keys.shape)

    optimizer = optax.sgd(0.1)
    step = jax.jit(make_train_step(spying, optimizer))
    state = initial_state(PARAMS, optimizer, seed=0)
    for _ in range(2):
        state, _ = step(state, FROZEN, batch())
    jax.effects_barrier()
    keys = np.concatenate(seen)
    assert len(np.unique(keys, axis=0)) == 24


def test_a_step_that_is_not_finite_changes_nothing_and_is_counted():
    def batches(seed):
        values = batch(seed=seed)
        return {"x": values["x"].at[0, 0].set(jnp.nan)} if seed == 1 else values

    ema = EMAConfig(rule="constant", decay=0.5)
    optimizer = optax.adam(0.1)
    start, _ = run(1, optimizer)
    start = start._replace(ema=copy_as_average(start.params))
    after, history = run(2, optimizer, batches, start, ema=ema)
    assert [h["skipped"] for h in history] == [0, 1]
    before, _ = run(1, optimizer, batches, start, ema=ema)
    assert_same((after.params, after.opt_state, after.ema), before[1:4])
    resumed, history = run(1, optimizer, state=after)
    assert np.isfinite(history[0]["loss"])
    assert int(resumed.step) == 4


@pytest.mark.parametrize("rate", [np.nan, np.inf, 1e30])
def test_an_update_that_is_not_finite_is_skipped_too(rate):
    optimizer = optax.adam(rate)
    state = initial_state(PARAMS, optimizer, seed=7)
    state = state._replace(ema=copy_as_average(state.params))
    after, history = run(2, optimizer, state=state, ema=EMAConfig(rule="constant"))
    assert [h["skipped"] for h in history] == [1, 2]
    assert_same((after.params, after.opt_state, after.ema), state[1:4])


def test_without_the_check_of_updates_steps_are_the_same():
    def batches(seed):
        values = batch(seed=seed)
        return {"x": values["x"].at[0, 0].set(jnp.nan)} if seed == 1 else values

    optimizer = optax.adamw(0.1)
    expected, before = run(3, optimizer, batches)
    found, after = run(3, optimizer, batches, check_updates=False)
    assert [h["skipped"] for h in after] == [h["skipped"] for h in before] == [0, 1, 1]
    assert_same((found.params, found.opt_state), expected[1:3])


def assert_same(tree, expected) -> None:
    jax.tree.map(np.testing.assert_array_equal, tree, expected)


def test_the_average_is_of_the_parameters_after_each_step():
    ema = EMAConfig(rule="constant", decay=0.75)
    optimizer = optax.sgd(0.3)
    state = initial_state(PARAMS, optimizer, seed=7)
    state = state._replace(ema=copy_as_average(state.params))
    expected = np.asarray(state.params["w"]["kernel"], np.float64)
    for i in range(4):
        state, _ = run(1, optimizer, lambda seed, i=i: batch(seed=i), state, ema=ema)
        expected = 0.75 * expected + 0.25 * np.asarray(state.params["w"]["kernel"])
    np.testing.assert_allclose(state.ema.params["w"]["kernel"], expected, rtol=1e-5)
    assert run(1, optimizer)[0].ema is None
