"""Averages that a run stores, and what is made of them afterwards."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from support.runs.toy_run import Toy
from support.training_runs import finish, start, steps_logged, wait_for

from diffusax.training import EMAConfig, TrainConfig, train
from diffusax.training.ema.posthoc import power_gamma
from diffusax.training.ema.snapshots import AVERAGES, read_snapshots
from diffusax.training.loop.export import make_average

POWER = ["ema.rule=power", "ema.start=2", "ema.snapshot_every=4"]


def kernel(folder) -> np.ndarray:
    return np.load(folder / "kernel.npy")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of 30 steps with averages from step 2, and its parameters after each of them."""
    config = TrainConfig(
        output=str(tmp_path_factory.mktemp("run")),
        steps=30,
        batch_size=8,
        checkpoint_every=10,
        keep=1,
        ema=EMAConfig(rule="power", start=2, snapshot_every=4),
        report_to=(),
    )
    seen = []

    class Watched(Toy):
        def loss(self, trained, frozen, batch, keys):
            jax.debug.callback(lambda w: seen.append(np.asarray(w)), trained["w"]["kernel"])
            return super().loss(trained, frozen, batch, keys)

    state = train(Watched(), config)
    jax.effects_barrier()
    last = np.asarray(state.params["w"]["kernel"])
    return config, np.stack([*seen, last]).astype(np.float64)


@pytest.mark.slow
def test_the_averages_of_all_steps_are_kept_and_one_checkpoint(run, tmp_path):
    config, _ = run
    folder = tmp_path.joinpath(config.output)
    found = {(s.step, s.updates, s.length) for s in read_snapshots(folder / AVERAGES)}
    assert found == {(t, t - 2, x) for t in (4, 8, 12, 16, 20, 24, 28, 30) for x in (0.05, 0.1)}
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.is_dir()] == ["30"]
    assert load_file(folder / AVERAGES / "0000004-0.05.safetensors").keys() == {"w.weight"}


@pytest.mark.parametrize(("length", "step", "atol"), [(0.05, 30, 0), (0.1, 12, 0), (0.07, 28, 1)])
def test_another_length_is_what_training_would_have_kept(run, tmp_path, length, step, atol):
    config, trajectory = run
    assert len(trajectory) == 31
    error = make_average(Toy(), config, tmp_path, length=length, step=step)
    assert error < (0.03 if atol else 1e-9)
    edges = np.linspace(0, 1, step - 2 + 1) ** (power_gamma(length) + 1)
    expected = np.einsum("k,k...->...", np.diff(edges), trajectory[3 : step + 1])
    scale = np.abs(trajectory[step] - trajectory[3]).max()
    np.testing.assert_allclose(kernel(tmp_path), expected, atol=1e-6 + 0.01 * atol * scale)
    assert f"(length {length:g}, made after the run)" in (tmp_path / "README.md").read_text()


def test_the_result_has_the_first_length(run, tmp_path):
    config, _ = run
    make_average(Toy(), config, tmp_path, length=0.05)
    expected = kernel(tmp_path.joinpath(config.output, "model_ema"))
    np.testing.assert_allclose(kernel(tmp_path), expected, rtol=1e-6, atol=1e-7)


def test_a_late_average_from_a_stored_step(run, tmp_path):
    config, trajectory = run
    assert make_average(Toy(), config, tmp_path, start=20) < 0.1
    expected = trajectory[21:].mean(axis=0)
    scale = np.abs(trajectory[30] - trajectory[20]).max()
    np.testing.assert_allclose(kernel(tmp_path), expected, atol=0.02 * scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start": 26}, r"\(late from 26, up to step 30\) cannot be made of those stored: .* 27%"),
        ({"start": 26, "decay": 0.9}, "start it at one of the steps 4, 8, 12, 16, 20, 24, 28, 30"),
        ({"start": 30}, "start=30 must be from 2, .* to before 30"),
        ({"start": 1}, "start=1 must be from 2"),
        ({"start": 1.0}, "start=1.0 must be"),
        ({"length": 0.05, "step": 9}, "step=9 has no stored averages; use one of 4, 8, 12"),
        ({}, "either length or start"),
    ],
)
def test_what_cannot_be_made(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        make_average(Toy(), run[0], tmp_path / "no", **options)
    assert not (tmp_path / "no").exists()


def test_a_run_without_stored_averages(run, tmp_path):
    config = dataclasses.replace(run[0], output=str(tmp_path))
    with pytest.raises(ValueError, match=r"holds no stored averages; a run with ema\.rule=power"):
        make_average(Toy(), config, tmp_path / "no", length=0.05)
    (tmp_path / AVERAGES).mkdir()
    (tmp_path / AVERAGES / "0000004-0.05.safetensors").write_bytes(b"not tensors")
    with pytest.raises(ValueError, match=r"0000004-0.05.safetensors is no stored average"):
        make_average(Toy(), config, tmp_path / "no", length=0.05)


def test_half_precision_takes_half_the_room(run, tmp_path):
    ema = EMAConfig(rule="power", lengths=(0.1,), snapshot_every=4, snapshot_dtype="float16")
    config = dataclasses.replace(run[0], output=str(tmp_path), steps=4, ema=ema)
    train(Toy(), config)
    (snapshot,) = read_snapshots(tmp_path / AVERAGES)
    assert load_file(snapshot.path)["w.weight"].dtype == np.float16
    make_average(Toy(), config, tmp_path / "again", length=0.1)
    expected = kernel(tmp_path / "model_ema")
    np.testing.assert_allclose(kernel(tmp_path / "again"), expected, rtol=1e-3, atol=1e-6)


@pytest.mark.slow
def test_other_averages_cannot_be_gone_on_with(run, tmp_path):
    config = dataclasses.replace(run[0], output=str(tmp_path), steps=4)
    train(Toy(), config)
    for ema in (EMAConfig(rule="power", lengths=(0.1,)), EMAConfig("constant"), EMAConfig()):
        changed = dataclasses.replace(config, steps=8, ema=ema)
        with pytest.raises(ValueError, match=r"averages of the lengths 0.05, 0.1, which cannot"):
            train(Toy(), changed)


@pytest.mark.slow
def test_killed_runs_store_the_same_bits(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    finish(start(whole, *POWER))
    first = start(killed, *POWER)
    wait_for(first, lambda: max(steps_logged(killed), default=0) >= 9)
    first.kill()
    first.wait()
    # What a kill may leave: a file that is not whole, and one that is done again.
    folder = killed / AVERAGES
    (folder / "0000012-0.05.safetensors.partial").write_bytes(b"half")
    (folder / "0000099-0.05.safetensors").write_bytes(b"of an earlier try")
    finish(start(killed, *POWER))
    names = sorted(file.name for file in (whole / AVERAGES).iterdir())
    assert sorted(file.name for file in folder.iterdir()) == names
    assert len(names) == 12
    for name in names:
        assert (folder / name).read_bytes() == (whole / AVERAGES / name).read_bytes()
    np.testing.assert_array_equal(kernel(killed / "model_ema"), kernel(whole / "model_ema"))
