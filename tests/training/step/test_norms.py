"""Norms of trees by rows, as GPUs take them, against those of each array."""

import jax
import numpy as np
import optax
import pytest
from support.effort import first
from support.many_devices import run_on_devices
from support.runs import RUNS

from diffusax.training.optimizers import (
    OptimizerConfig,
    global_norm,
    global_norm_by_rows,
    make_optimizer,
)
from diffusax.training.step.step import initial_state, make_train_step

SHAPES = {"kernel": (3, 3, 4, 6), "pixel": (1, 1, 5, 7), "matrix": (8, 3), "bias": (6,), "one": ()}


def draw(names, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.standard_normal(SHAPES[name]), dtype) for name in names}


@pytest.mark.parametrize("stored", [True, False])
@pytest.mark.parametrize("names", [tuple(SHAPES), ("bias", "one"), ("kernel",)])
def test_rows_give_the_norm_of_all_numbers(names, stored):
    tree = draw(names, dtype=np.float16)
    expected = np.linalg.norm(np.concatenate([x.ravel().astype(np.float64) for x in tree.values()]))
    assert float(global_norm_by_rows(tree, stored=stored)) == pytest.approx(expected, rel=1e-6)
    assert float(global_norm(tree)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", first(["adamw", "adafactor", "lion", "muon"]))
def test_a_step_by_rows_is_the_same(name):
    def loss(params, frozen, batch, keys):
        return batch["x"] * sum((x**4).sum() for x in params.values())

    config = OptimizerConfig(name=name, max_grad_norm=0.1, learning_rate=0.01)
    optimizer = make_optimizer(config, 3, {"matrix": 0.02})
    batch = {"x": np.ones(2, np.float32)}
    found = []
    for norm in (None, global_norm_by_rows):
        step = jax.jit(make_train_step(loss, optimizer, norm=norm))
        state = initial_state(draw(SHAPES), optimizer, seed=0)
        for _ in range(3):
            state, metrics = step(state, {}, batch)
        found.append((state, metrics))
    assert float(metrics["grad_norm"]) > 1
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5), *found)


@pytest.mark.parametrize("rates", [None, {"kernel": 0.5}])
def test_clipping_takes_the_norm_that_is_known(rates):
    params, grads = draw(SHAPES), draw(SHAPES, seed=1)
    config = OptimizerConfig(name="lion", beta2=0.99, max_grad_norm=0.3)
    optimizer = make_optimizer(config, 3, rates)
    clip = optax.clip_by_global_norm(0.3)
    state = optimizer.init(params)
    for size in (None, global_norm(grads)):
        _, after = optimizer.update(grads, state, params, grad_norm=size)
        momentum = optax.tree_utils.tree_get(after, "mu")
        expected = optax.tree.scale(0.01, clip.update(grads, clip.init(params))[0])
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4), momentum, expected)
    _, after = optimizer.update(grads, state, params, grad_norm=global_norm(grads) * 2)
    half = optax.tree_utils.tree_get(after, "mu")
    jax.tree.map(lambda x, y: np.testing.assert_allclose(2 * x, y, rtol=1e-4), half, momentum)


@pytest.mark.parametrize("name", first(["adamw", "adafactor", "lion", "muon"]))
def test_updates_that_are_finite_for_certain_need_no_check(name):
    # The rate is the largest that options take, the gradients' norm nearly the largest there is.
    given = {"learning_rate": 1e6, "max_grad_norm": np.inf, "epsilon": 1e-12, "weight_decay": 0}
    config = OptimizerConfig(name=name, **given)
    assert config.keeps_finite == (name in ("adamw", "lion"))
    assert not OptimizerConfig(name=name, epsilon=1e-300).keeps_finite or name == "lion"
    assert not OptimizerConfig(name=name, learning_rate=101, weight_decay=1e-2).keeps_finite
    optimizer, grads = make_optimizer(config, 3), draw(("kernel", "bias"))
    grads = jax.tree.map(lambda x: np.float32(x * 1e18), grads)
    assert np.isfinite(global_norm(grads))
    params = draw(grads)
    state, found = optimizer.init(params), []
    for scale in (1, 1e-30, 0):
        some = jax.tree.map(lambda g, s=scale: g * np.float32(s), grads)
        updates, state = optimizer.update(some, state, params)
        found.append(all(np.isfinite(x).all() for x in jax.tree.leaves(updates)))
    assert all(found) or not config.keeps_finite


def test_devices_add_up_their_shares():
    assert run_on_devices(RUNS / "norm_of_shares.py") == ["equal"]
