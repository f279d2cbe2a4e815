"""A run whose state lies in the order in which the device's library reads kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.effort import first
from support.runs.toy_run import INPUTS, Toy

from diffusax.runtime.devices.layouts import ORDERS, order_of
from diffusax.runtime.devices.mesh import make_mesh
from diffusax.training import TrainConfig, read_config, train
from diffusax.training.loop.checkpoints import Checkpoints
from diffusax.training.loop.program import abstract_arguments, lower_step

ORDER = (3, 0, 1, 2)


class ConvolvedToy(Toy):
    """A convolution of rows as maps, with a frozen one before it."""

    def shapes(self):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.trained())

    def trained(self, mesh=None):
        rng = np.random.default_rng(0)
        kernel = rng.standard_normal((3, 3, 4, 6), np.float32) * 0.1
        return {"w": {"kernel": kernel, "bias": rng.standard_normal(6, np.float32)}}

    def frozen(self, mesh=None):
        rng = np.random.default_rng(1)
        return {"first": {"kernel": rng.standard_normal((3, 3, 4, 4), np.float32)}}

    def frozen_shapes(self):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.frozen())

    def loss(self, trained, frozen, batch, keys):
        x = batch["x"].reshape(-1, 4, INPUTS // 16, 4)
        for layer in (frozen["first"], trained["w"]):
            numbers = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(
                x, layer["kernel"], (1, 1), "SAME", dimension_numbers=numbers
            )
        return ((jnp.tanh(x + trained["w"]["bias"]) - 0.5) ** 2).mean((1, 2, 3))


@pytest.fixture
def in_order(monkeypatch):
    """Returns a function after which CPUs keep kernels as GPUs do; they can read any order."""
    return lambda: monkeypatch.setitem(ORDERS, "cpu", ORDER)


def config(folder, **options) -> TrainConfig:
    given = {"steps": 4, "batch_size": 8, "checkpoint_every": 2, "mesh": "data=1"}
    given |= {"optimizer.learning_rate": 0.01, "ema.rule": "constant", "ema.decay": 0.5, **options}
    pairs = [f"{name}={value}" for name, value in given.items()]
    return read_config(TrainConfig, None, [f"output={folder}", "report_to=[]", *pairs])


def run(folder, **options):
    return train(ConvolvedToy(), config(folder, **options))


def orders(tree):
    """The orders of kernels, of which a state has four: parameters, two moments and averages."""
    return [order_of(x) for x in jax.tree.leaves(tree) if x.ndim == 4]


def stored(folder, like):
    """The state of the last checkpoint, in the order of another one."""
    found = Checkpoints(folder / "checkpoints", keep=2, average="an average of one length")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.format), like)
    return found.restore(lambda averaged: shapes)[1]


def assert_equal(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)


def assert_close(one, other):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-6), one, other)


@pytest.mark.parametrize("start", first([0, 1]))
def test_a_run_may_change_the_order_when_it_goes_on(tmp_path, in_order, start):
    """start: the step at which averages begin."""
    options = {"ema.start": start}
    usual = run(tmp_path / "usual", **options)
    run(tmp_path / "changed", steps=2, **options)
    in_order()
    own = run(tmp_path / "own", **options)
    changed = run(tmp_path / "changed", **options)
    assert orders(usual) == 4 * [None]
    assert orders(own) == orders(changed) == 4 * [ORDER]
    for state in (own, changed):
        assert_close(state, usual)
    for folder, state in [("usual", usual), ("own", own), ("changed", changed)]:
        for order in (usual, own):
            found = stored(tmp_path / folder, order)
            assert_equal(found, state)
            assert orders(found) == orders(order)
        for name in ("model", "model_ema"):
            assert_close(
                np.load(tmp_path / folder / name / "kernel.npy"),
                (usual if name == "model" else usual.ema).params["w"]["kernel"],
            )


def test_a_step_keeps_its_state_in_place(tmp_path, in_order):
    options = config(tmp_path)
    mesh = make_mesh("data=1", devices=jax.local_devices()[:1])
    usual = lower_step(ConvolvedToy(), options, mesh).as_text()
    assert "layout_mode" not in usual
    in_order()
    state, frozen, _ = abstract_arguments(ConvolvedToy(), options, mesh)
    assert orders(state) == 4 * [ORDER]
    assert orders(frozen) == [ORDER]
    compiled = lower_step(ConvolvedToy(), options, mesh).compile()
    (head,) = (line for line in compiled.as_text().splitlines() if line.startswith("HloModule"))
    given, returned = head.split("entry_computation_layout={")[1].split("->")
    layout = "f32[3,3,4,6]{2,1,0,3}"
    assert given.count(layout) == returned.count(layout) == 4
    assert "f32[3,3,4,4]{2,1,0,3}" in given
    assert head.count("-alias)") == len(jax.tree.leaves(state))
