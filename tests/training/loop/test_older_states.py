"""States of earlier versions, whose lists had numbers instead of texts as keys, are continued."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.runs.toy_run import INPUTS, Toy

from diffusax.training import EMAConfig, OptimizerConfig, TrainConfig, train

DEPTH = 12


class Deep(Toy):
    """A model with more layers than there are digits; `index` makes their keys."""

    def __init__(self, index):
        super().__init__()
        self.index = index

    def trained(self, mesh=None):
        rng = np.random.default_rng(0)
        kernels = rng.standard_normal((DEPTH, INPUTS, INPUTS), np.float32) / INPUTS**0.5
        return {"w": {"layers": {self.index(i): {"kernel": x} for i, x in enumerate(kernels)}}}

    def shapes(self):
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.trained())

    def loss(self, trained, frozen, batch, keys):
        x = batch["x"]
        for i in range(DEPTH):
            x = jnp.tanh(x @ trained["w"]["layers"][self.index(i)]["kernel"])
        return ((x - jax.vmap(lambda key: jax.random.normal(key, (INPUTS,)))(keys)) ** 2).mean(-1)

    def save(self, trained, folder):
        folder.mkdir(parents=True, exist_ok=True)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adafactor"])
def test_a_state_with_numbers_as_keys_is_continued_in_the_same_bits(tmp_path, optimizer):
    def run(index, steps, name):
        return train(
            Deep(index),
            TrainConfig(
                output=str(tmp_path / name),
                steps=steps,
                batch_size=4,
                optimizer=OptimizerConfig(name=optimizer),
                ema=EMAConfig(rule="constant", decay=0.9),
                report_to=(),
            ),
        )

    expected = run(str, 4, "whole")
    older = run(int, 2, "parts")
    assert set(older.params["w"]["layers"]) == set(range(DEPTH))
    found = run(str, 4, "parts")
    assert int(found.step) == 4
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_state_with_another_layer_is_refused_by_its_whole_name(tmp_path):
    class Wider(Deep):
        def trained(self, mesh=None):
            layers = super().trained()["w"]["layers"]
            return {"w": {"layers": {**layers, "10": {"kernel": np.ones((INPUTS, 3), np.float32)}}}}

    config = TrainConfig(output=str(tmp_path), steps=1, batch_size=4, report_to=())
    train(Deep(int), config)
    with pytest.raises(ValueError, match=r"such as w\.layers\.10\.kernel: \(64, 64\) float32 inst"):
        train(Wider(str), config)
