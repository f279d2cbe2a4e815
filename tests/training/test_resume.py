"""Runs that are killed, or told to stop, and started again."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

TOY = Path(__file__).with_name("toy_run.py")
EMA = ["ema=constant", "ema_decay=0.9", "ema_start=6"]


def start(output: Path, *pairs: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(TOY), str(output), *EMA, *pairs],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    text, _ = process.communicate(timeout=120)
    assert process.returncode == 0, text
    return text


def steps_logged(output: Path) -> list[int]:
    file = output / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("}")]


def wait_for(process: subprocess.Popen, condition) -> None:
    limit = time.monotonic() + 90
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < limit
        time.sleep(0.001)


def results(output: Path) -> dict[str, np.ndarray]:
    return {n: np.load(output / n / "kernel.npy") for n in ("model", "model_ema")}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, np.ndarray]:
    output = tmp_path_factory.mktemp("uninterrupted")
    finish(start(output))
    return results(output)


def test_killed_runs_end_in_the_same_bits(tmp_path, uninterrupted):
    checkpoints = tmp_path / "checkpoints"
    saving = lambda: any("tmp" in path.name for path in checkpoints.glob("*"))  # noqa: E731

    killed = start(tmp_path)
    wait_for(killed, lambda: max(steps_logged(tmp_path), default=0) >= 6)
    killed.kill()
    killed.wait()
    first = max(steps_logged(tmp_path))

    killed = start(tmp_path)
    wait_for(killed, lambda: max(steps_logged(tmp_path), default=0) >= 9 and saving())
    killed.kill()
    killed.wait()

    killed = start(tmp_path)
    time.sleep(1.0)
    killed.kill()
    killed.wait()

    finish(start(tmp_path))
    assert first < 24
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])
    assert steps_logged(tmp_path) == list(range(1, 25))


def test_sigterm_saves_the_step_it_came_in(tmp_path, uninterrupted):
    stopped = start(tmp_path, "checkpoint_every=1000")
    wait_for(stopped, lambda: max(steps_logged(tmp_path), default=0) >= 5)
    stopped.send_signal(signal.SIGTERM)
    text, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    assert "stopped by SIGTERM" in text
    (saved,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert 5 <= saved < 24

    finish(start(tmp_path, "checkpoint_every=1000"))
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])


def test_a_half_written_checkpoint_is_not_resumed_from(tmp_path, uninterrupted):
    finish(start(tmp_path, "steps=8"))
    whole = tmp_path / "checkpoints" / "8"
    broken = tmp_path / "checkpoints" / "12.orbax-checkpoint-tmp-1"
    broken.mkdir()
    (broken / "state").mkdir()
    assert whole.is_dir()
    finish(start(tmp_path))
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])


def test_a_second_run_in_the_same_folder_is_refused(tmp_path):
    first = start(tmp_path)
    wait_for(first, lambda: steps_logged(tmp_path))
    first.send_signal(signal.SIGSTOP)
    second = start(tmp_path)
    text, _ = second.communicate(timeout=60)
    first.kill()
    first.wait()
    assert second.returncode != 0
    assert "another run is writing to" in text
