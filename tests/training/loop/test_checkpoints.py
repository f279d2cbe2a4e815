"""Checkpoints on disks that are full."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from support.effort import first
from support.runs.toy_run import Toy

from diffusax.lora.trained import LayerPlan, TrainedLora
from diffusax.training import TrainConfig, train
from diffusax.training.loop.checkpoints import Checkpoints
from diffusax.training.step.step import TrainState, initial_state


def state(megabytes: float, seed: int = 0) -> TrainState:
    """Random numbers, which do not compress."""
    kernel = jax.random.normal(jax.random.key(seed), (int(megabytes * 2**18),))
    return initial_state({"w": {"kernel": kernel}}, optax.sgd(0.1), seed=0)


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 16 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("only root may mount a small disk here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def assert_intact(folder: Path, first: TrainState) -> None:
    checkpoints = Checkpoints(folder, keep=2)
    assert checkpoints.steps() == [1]
    step, restored, _ = checkpoints.restore(lambda averaged: first)
    assert step == 1
    jax.tree.map(np.testing.assert_array_equal, restored, first)


def test_keeps_the_last_ones_and_restores_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(0.1, step), {"seen": step})
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["2", "3"]
    again = Checkpoints(tmp_path, keep=2)
    step, restored, position = again.restore(lambda averaged: state(0.1))
    assert (step, position) == (3, {"seen": 3})
    jax.tree.map(np.testing.assert_array_equal, restored, state(0.1, 3))
    again.finish()
    assert Checkpoints(tmp_path / "empty", keep=2).restore(lambda averaged: state(0.1)) is None


def two(folder: Path) -> list[Path]:
    """Two checkpoints, of steps 1 and 2; the files of the second, the largest first."""
    checkpoints = Checkpoints(folder, keep=2)
    for step in (1, 2):
        checkpoints.save(step, state(0.1, step), {"seen": step})
    checkpoints.finish()
    files = [file for file in (folder / "2").rglob("*") if file.is_file()]
    return sorted(files, key=lambda file: -file.stat().st_size)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


HARM = {
    "flipped": flip,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:-3]),
    "missing": Path.unlink,
}


@pytest.mark.parametrize("harm", first(HARM, 12))
@pytest.mark.parametrize("which", range(12))
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, harm, which, caplog):
    files = two(tmp_path / "run")
    file = files[which % len(files)]
    if file.name == "sha256.json" and harm == "missing":
        return
    HARM[harm](file)
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    step, restored, position = checkpoints.restore(lambda averaged: state(0.1))
    assert (step, position) == (1, {"seen": 1})
    jax.tree.map(np.testing.assert_array_equal, restored, state(0.1, 1))
    (message,) = [m for m in caplog.messages if "is damaged" in m]
    # With other digests it is the files that seem wrong.
    assert file.name in message or file.name == "sha256.json"
    assert (tmp_path / "damaged-2").is_dir()
    checkpoints.save(2, state(0.1, 2), {"seen": 2})
    checkpoints.finish()
    assert Checkpoints(tmp_path / "run", keep=2).restore(lambda averaged: state(0.1))[0] == 2


def test_without_digests_a_file_that_is_cut_is_found_too(tmp_path, caplog):
    files = two(tmp_path / "run")
    (tmp_path / "run" / "2" / "sha256.json").unlink()
    files[0].write_bytes(files[0].read_bytes()[:100])
    assert Checkpoints(tmp_path / "run", keep=2).restore(lambda averaged: state(0.1))[0] == 1
    assert "checkpoint of step 2 is damaged" in caplog.text


def test_where_all_are_damaged_nothing_is_begun_anew(tmp_path):
    two(tmp_path / "run")
    for step in "12":
        flip(tmp_path / "run" / step / "facts" / "metadata")
    with pytest.raises(ValueError, match=r"no checkpoint in .* can be read \(step 2: .*metadata"):
        Checkpoints(tmp_path / "run", keep=2).restore(lambda averaged: state(0.1))
    assert Checkpoints(tmp_path / "run", keep=2).steps() == [1, 2]


def test_the_state_of_another_run_is_refused_in_a_sentence(tmp_path):
    two(tmp_path / "run")
    checkpoints = Checkpoints(tmp_path / "run", keep=2)
    params = state(0.1).params
    with pytest.raises(ValueError, match="holds a run with another optimizer, which cannot"):
        checkpoints.restore(lambda averaged: initial_state(params, optax.adam(0.1), seed=0))
    with pytest.raises(ValueError, match=r"as w.kernel: \(26214,\) f.* instead of \(52428,"):
        checkpoints.restore(lambda averaged: state(0.2))
    assert checkpoints.steps() == [1, 2]


def test_a_run_goes_on_only_with_the_alphas_of_its_adapters(tmp_path):
    def train_with(scale: float, steps: int):
        recipe = Toy()
        recipe.lora = TrainedLora({"w": {"fc": LayerPlan(rank=4, scale=scale)}})
        return train(recipe, TrainConfig(output=str(tmp_path), steps=steps, report_to=()))

    train_with(1.0, steps=2)
    assert train_with(1.0, steps=3).step == 3
    with pytest.raises(ValueError, match=r"other alphas \(4.0 of w.fc, which has 64.0 now\)"):
        train_with(16.0, steps=4)


def test_a_checkpoint_that_cannot_fit_is_not_begun(small_disk):
    checkpoints = Checkpoints(small_disk / "run", keep=2)
    first = state(7, 1)
    checkpoints.save(1, first, {})
    with pytest.raises(OSError, match=r"checkpoint of step 2.* disk is full .* of step 1, is unt"):
        checkpoints.save(2, state(12, 2), {})
    assert not [path for path in (small_disk / "run").iterdir() if path.name.startswith("2")]
    checkpoints.finish()
    assert_intact(small_disk / "run", first)


def test_a_disk_that_fills_up_while_writing(small_disk, monkeypatch, caplog):
    checkpoints = Checkpoints(small_disk / "run", keep=2)
    first = state(6, 1)
    checkpoints.save(1, first, {})
    # Another program takes the room after it was checked.
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=2**40))

    def save() -> None:
        checkpoints.save(2, state(12, 2), {})
        checkpoints.finish()

    with pytest.raises(OSError, match=r"disk is full .* of step 1, is untouched"):
        save()
    assert "No space left" not in caplog.text
    monkeypatch.undo()
    assert_intact(small_disk / "run", first)
