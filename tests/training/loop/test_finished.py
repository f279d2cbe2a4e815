"""A run that is started again after its last step."""

import shutil

import jax
import numpy as np
import pytest
import yaml
from support.runs.toy_run import Toy

from diffusax.training import TrainConfig, train


def options(output, steps, batch_size):
    return TrainConfig(
        output=str(output), steps=steps, batch_size=batch_size, log_every=1, report_to=()
    )


@pytest.fixture
def finished(tmp_path):
    train(Toy(), options(tmp_path, steps=6, batch_size=8))
    return tmp_path


def contents(folder):
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


@pytest.mark.parametrize("steps", [4, 6])
def test_a_finished_run_is_not_rewritten(finished, caplog, steps):
    before = contents(finished)
    caplog.set_level("INFO", logger="diffusax.training")
    state = train(Toy(), options(finished, steps=steps, batch_size=2))
    assert int(state.step) == 6
    assert caplog.messages == [f"the run in {finished} is finished at step 6, and stays as it is"]
    assert contents(finished) == before


def test_a_finished_run_is_not_taken_for_one_of_other_parameters(finished):
    class Wider(Toy):
        """A model with a bias."""

        def shapes(self):
            return {"w": {**Toy.shapes(self)["w"], "bias": jax.ShapeDtypeStruct((1,), np.float32)}}

    before = contents(finished)
    with pytest.raises(
        ValueError, match=r"such as w.bias: nothing instead of \(1,\) float32\), wh"
    ):
        train(Wider(), options(finished, steps=6, batch_size=8))
    assert contents(finished) == before


def test_a_missing_result_is_written_with_the_figures_of_the_run(finished, caplog):
    before = contents(finished)
    shutil.rmtree(finished / "model")
    caplog.set_level("INFO", logger="diffusax.training")
    train(Toy(), options(finished, steps=4, batch_size=2))
    assert "is finished at step 6; its result was missing and is written now" in caplog.text
    assert contents(finished) == before
    card = (finished / "model" / "README.md").read_text()
    assert "6 steps of 8 examples" in " ".join(card.split())


def test_more_steps_go_on(finished):
    assert int(train(Toy(), options(finished, steps=8, batch_size=8)).step) == 8
    assert yaml.safe_load((finished / "config.yaml").read_text())["steps"] == 8
