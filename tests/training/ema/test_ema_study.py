"""The scripts of examples/ema_study, on a linear model."""

import dataclasses
import importlib
import json
from pathlib import Path

import numpy as np
import pytest
from support.repository import ROOT
from support.runs.toy_run import Toy

from diffusax.training import EMAConfig, TrainConfig
from diffusax.training import train as train_in_the_library
from diffusax.training.ema.posthoc import power_gamma

STEPS = 20
STUDY = ROOT / "examples" / "ema_study"


@pytest.fixture(scope="module")
def study():
    """Imports a script."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(STUDY)
        yield importlib.import_module


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return TrainConfig(
        output=str(tmp_path_factory.mktemp("constant-0")),
        ema=EMAConfig(rule="power", snapshot_every=1),
        steps=STEPS,
        batch_size=8,
        report_to=(),
    )


@pytest.fixture(scope="module")
def run(study, config):
    """The study's run, written, and the parameters after each step."""
    script, trajectory = study("train"), []
    configs = study("side_by_side").averages_in_training()
    state, averages = script.train(
        Toy(),
        config,
        configs,
        watch=lambda step, params: trajectory.append(np.array(params["w"]["kernel"], np.float64)),
    )
    script.write_models(Toy(), config, state, averages)
    return Path(config.output), np.stack(trajectory)


def averaged(run: Path, name: str) -> np.ndarray:
    return np.load(run / "models" / name / "kernel.npy")


def decayed(trajectory, start: int, decay: float) -> np.ndarray:
    average = trajectory[start]
    for params in trajectory[start + 1 :]:
        average = decay * average + (1 - decay) * params
    return average


@pytest.mark.parametrize(
    ("name", "start", "decay"),
    [
        ("none", 20, 0),
        ("full-0.9", 0, 0.9),
        ("full-0.98", 0, 0.98),
        ("late-0.05-0.9", 19, 0.9),
        ("late-0.1-0.98", 18, 0.98),
        ("late-0.2-0.9", 16, 0.9),
    ],
)
def test_an_average_is_that_of_the_parameters_after_each_step(run, name, start, decay):
    folder, trajectory = run
    assert len(trajectory) == STEPS + 1
    moved = np.abs(trajectory[-1] - trajectory[max(start - 1, 0)]).max()
    assert moved > 1e-5
    expected = decayed(trajectory, start, decay)
    np.testing.assert_allclose(averaged(folder, name), expected, rtol=0, atol=1e-7 + 1e-4 * moved)


def test_an_average_made_after_the_run_is_the_power_function(run):
    folder, trajectory = run
    weights = np.diff(np.linspace(0, 1, STEPS + 1) ** (power_gamma(0.15) + 1))
    expected = np.einsum("k,k...->...", weights, trajectory[1:])
    moved = np.abs(trajectory[-1] - trajectory[0]).max()
    found = averaged(folder, "posthoc-0.15")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-7 + 1e-3 * moved)


def test_a_mean_of_the_last_steps_is_made_after_the_run(run):
    folder, trajectory = run
    moved = np.abs(trajectory[-1] - trajectory[16]).max()
    expected = trajectory[17:].mean(0)
    np.testing.assert_allclose(averaged(folder, "mean-0.2"), expected, rtol=0, atol=1e-3 * moved)


@pytest.mark.parametrize(
    ("ema", "name"),
    [
        (EMAConfig(rule="constant", decay=0.9, start=0.8), "late-0.2-0.9"),
        (EMAConfig(rule="constant", decay=0.98), "full-0.98"),
    ],
)
def test_the_library_s_own_run_ends_with_the_same_average(run, config, tmp_path, ema, name):
    folder, _ = run
    train_in_the_library(Toy(), dataclasses.replace(config, output=str(tmp_path), ema=ema))
    for found, wanted in (("model_ema", name), ("model", "none")):
        ours = np.load(tmp_path / found / "kernel.npy")
        np.testing.assert_allclose(averaged(folder, wanted), ours, rtol=1e-6, atol=1e-7)


def test_measures_of_pictures_tell_right_from_wrong(study):
    evaluate = study("evaluate")
    before, after = np.zeros((64, 64, 3), np.float32), np.zeros((64, 64, 3), np.float32)
    after[:32] = 1
    wrong = np.full((64, 64, 3), 0.5, np.float32)
    pairs = [evaluate.Pair(kind, "", before, after, [wrong]) for kind in ("half", "half", "whole")]
    pairs[2] = pairs[2]._replace(before=1 - after)
    image = after.copy()
    image[:, :, 0] += 0.3
    found = evaluate.score(np.stack([after, before, image]), pairs)
    assert found["rights"] == {"half": 1, "whole": 1}
    assert found["right"] == pytest.approx(2 / 3, abs=1e-4)
    # The first two keep the lower half; the third has nothing to keep.
    assert found["kept"] == 0
    assert evaluate.kept_error(image, pairs[0]) == pytest.approx(0.3 / 3**0.5, rel=1e-5)
    assert evaluate.kept_error(image, pairs[2]) is None
    chosen = evaluate.some_of_each([*pairs, pairs[2], *pairs[:2]], 3)
    assert [pair.kind for pair in chosen] == ["half", "half", "whole"]


def test_gains_are_differences_within_a_run(study, tmp_path):
    lines = [
        {"schedule": "constant", "seed": seed, "average": average, "loss": loss}
        for average, losses in (("none", (3, 5, 7)), ("full-0.9", (2, 5, 6)))
        for seed, loss in enumerate(losses)
    ]
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    results = study("report").Results(path)
    assert results.spread("constant", "none", "loss")[:2] == (5, 2)
    gain = results.gain("constant", "full-0.9", "loss")
    assert gain.mean == pytest.approx(-2 / 3)
    assert gain.interval == pytest.approx(4.30 * (1 / 3) ** 0.5 / 3**0.5)
