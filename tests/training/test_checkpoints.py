"""Checkpoints on disks that are full."""

import subprocess
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from diffusax.training.checkpoints import Checkpoints
from diffusax.training.step import TrainState, initial_state


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
    assert checkpoints.latest() == 1
    jax.tree.map(
        np.testing.assert_array_equal, checkpoints.restore(1, lambda averaged: first)[0], first
    )


def test_keeps_the_last_ones_and_restores_all(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, state(0.1, step), {"seen": step})
    checkpoints.finish()
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["2", "3"]
    again = Checkpoints(tmp_path, keep=2)
    assert again.latest() == 3
    restored, position = again.restore(3, lambda averaged: state(0.1))
    assert position == {"seen": 3}
    jax.tree.map(np.testing.assert_array_equal, restored, state(0.1, 3))


def test_a_checkpoint_that_cannot_fit_is_not_begun(small_disk):
    checkpoints = Checkpoints(small_disk / "run", keep=2)
    first = state(7, 1)
    checkpoints.save(1, first, {})
    with pytest.raises(OSError, match=r"checkpoint of step 2.* disk is full .* of step 1, is unt"):
        checkpoints.save(2, state(12, 2), {})
    assert not [path for path in (small_disk / "run").iterdir() if path.name.startswith("2")]
    checkpoints.finish()
    assert_intact(small_disk / "run", first)


def test_a_disk_that_fills_up_while_writing(small_disk, monkeypatch):
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
    monkeypatch.undo()
    assert_intact(small_disk / "run", first)
