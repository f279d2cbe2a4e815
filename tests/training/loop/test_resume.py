"""Runs that are killed, or told to stop, and started again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from support.training_runs import TOY, finish, results, run_here, start, steps_logged, wait_for


def children(pid: int) -> list[int]:
    """The processes that a process has started and that compute for it."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            text, command = status.read_text(), (status.parent / "cmdline").read_text()
        except OSError:
            continue
        if f"PPid:\t{pid}\n" in text and "resource_tracker" not in command:
            found.append(int(status.parent.name))
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> dict[str, np.ndarray]:
    output = tmp_path_factory.mktemp("uninterrupted")
    run_here(output)
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

    run_here(tmp_path)
    assert first < 24
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])
    assert steps_logged(tmp_path) == list(range(1, 25))


def test_the_compiled_step_is_kept_between_processes(tmp_path):
    environment = {n: v for n, v in os.environ.items() if n != "JAX_COMPILATION_CACHE_DIR"}
    environment |= {
        "DIFFUSAX_COMPILATION_CACHE": str(tmp_path / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    subprocess.run(
        [sys.executable, str(TOY), str(tmp_path / "run"), "steps=1"], env=environment, check=True
    )
    assert list((tmp_path / "programs").glob("jit_train_step-*"))


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_sigterm_saves_the_step_it_came_in(tmp_path, uninterrupted, workers):
    stopped = start(tmp_path, "checkpoint_every=1000", f"data.workers={workers}")
    wait_for(stopped, lambda: max(steps_logged(tmp_path), default=0) >= 5)
    stopped.send_signal(signal.SIGTERM)
    text, _ = stopped.communicate(timeout=60)
    assert stopped.returncode != 0
    assert "SIGTERM: the run is saved after this step" in text
    assert "stopped by SIGTERM" in text
    assert "grain" not in text
    (saved,) = [int(path.name) for path in (tmp_path / "checkpoints").iterdir()]
    assert 5 <= saved < 24

    finish(start(tmp_path, "checkpoint_every=1000", f"data.workers={workers}"))
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])


@pytest.mark.slow
def test_ctrl_c_saves_too_and_workers_wait_for_it(tmp_path):
    stopped = start(tmp_path, "steps=100000", "data.workers=2", own_session=True)
    wait_for(stopped, lambda: steps_logged(tmp_path))
    os.killpg(stopped.pid, signal.SIGINT)
    text, _ = stopped.communicate(timeout=60)
    assert "Ctrl-C: the run is saved after this step" in text
    assert "stopped by Ctrl-C; saved at step" in text
    assert text.count("Traceback") == 1
    assert [path for path in (tmp_path / "checkpoints").iterdir() if path.name.isdigit()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_the_step_compiles_ends_the_run(tmp_path, number, code):
    file = tmp_path / "said"
    script = "import sys\nfrom support.runs import toy_run\n"
    script += "from diffusax.training import Preempted\n"
    script += "try: toy_run.main(*sys.argv[1:])\n"
    script += "except Preempted as stopped: print(stopped); sys.exit(stopped.exit_code)\n"
    with file.open("w") as said:
        run = subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "run"), "slow_compile=true"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    limit = time.monotonic() + 60
    while "compiling" not in file.read_text():
        assert time.monotonic() < limit
        assert run.poll() is None, file.read_text()
        time.sleep(0.05)
    # Until after the tracing.
    time.sleep(1.5)
    began = time.monotonic()
    run.send_signal(number)
    assert run.wait(timeout=30) == code, file.read_text()
    assert time.monotonic() - began < 10
    text = file.read_text()
    assert "the run ends; once more stops at once" in text
    assert "before the first step, with nothing to save" in text
    assert "Traceback" not in text
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_second_ctrl_c_stops_at_once(tmp_path):
    stopped = start(tmp_path, "hang_at=3")
    wait_for(stopped, lambda: max(steps_logged(tmp_path), default=0) >= 3)
    stopped.send_signal(signal.SIGINT)
    time.sleep(1.5)
    assert stopped.poll() is None
    stopped.send_signal(signal.SIGINT)
    text, _ = stopped.communicate(timeout=10)
    assert stopped.returncode == 130
    assert "stopping at once" in text
    assert "Traceback" not in text


@pytest.mark.slow
def test_a_signal_during_the_export_is_answered_and_the_result_is_whole(tmp_path, uninterrupted):
    stopped = start(tmp_path, "slow_save=true")
    wait_for(stopped, lambda: (tmp_path / "saving").is_file())
    stopped.send_signal(signal.SIGTERM)
    text = finish(stopped)
    assert "SIGTERM: the result is written, then the run ends" in text
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])


@pytest.mark.slow
def test_workers_end_with_a_killed_run(tmp_path):
    killed = start(tmp_path, "steps=100000", "data.workers=2")
    wait_for(killed, lambda: steps_logged(tmp_path))
    workers = children(killed.pid)
    assert len(workers) >= 2
    killed.kill()
    killed.wait()
    limit = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < limit
        time.sleep(0.1)


@pytest.mark.slow
def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path, uninterrupted):
    finish(start(tmp_path, "steps=12"))
    newest = [file for file in (tmp_path / "checkpoints" / "12").rglob("*") if file.is_file()]
    largest = max(newest, key=lambda file: file.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)
    text = finish(start(tmp_path))
    assert f"the checkpoint of step 12 is damaged: {largest} is not what was written" in text
    for name, array in results(tmp_path).items():
        np.testing.assert_array_equal(array, uninterrupted[name])


@pytest.mark.slow
def test_another_optimizer_on_resume_is_one_sentence(tmp_path):
    finish(start(tmp_path, "steps=8"))
    again = start(tmp_path, "optimizer.name=lion")
    text, _ = again.communicate(timeout=60)
    assert again.returncode
    assert "holds a run with another optimizer, which cannot be continued" in text


@pytest.mark.slow
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


@pytest.mark.slow
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
