"""Runs in two worker processes of a Ray cluster on this machine, which are killed."""

import dataclasses
import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
from support.offline_runs import errors, files, finish, pictures, settled, shards, start
from support.tiny import build_stable_diffusion

import diffusax
from diffusax import offline

ray = pytest.importorskip("ray")

SETTINGS = offline.Settings(batch_size=2, images_per_shard=4, steps=2)
LINES = [*range(1, 6), *range(7, 25)]
OF = {"workers": 2, "progress": False, "source": {"model": "tiny"}}
OPTIONS = ["--batch-size", 2, "--images-per-shard", 4, "--steps", 2]


@pytest.fixture(scope="module")
def cluster():
    """Two workers that start anew for each test module."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_stable_diffusion(folder, unet={"sample_size": 8})
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """24 lines, of which one is bad."""
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [{"prompt": f"number {n}", "sampler": ("euler", "heun")[n % 2]} for n in range(24)]
    rows[5] = {"prompt": 5}
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture(scope="module")
def expected(model, prompts, tmp_path_factory):
    """What one process writes."""
    out = tmp_path_factory.mktemp("one")
    finish(start(prompts, out, "--model", model, *OPTIONS))
    return out


def loader(model, workers):
    """Gives the pipeline, and notes the process that asked for it."""

    # Inside a function, so that it goes to the workers by value: this file is not theirs to import.
    def load():
        pipe = diffusax.DiffusionPipeline.from_pretrained(model)
        pipe.set_progress_bar_config(disable=True)
        (workers / str(os.getpid())).touch()
        return pipe

    workers.mkdir()
    return load


@pytest.mark.slow
@pytest.mark.parametrize("victims", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_killed_workers_are_replaced_and_each_picture_is_drawn_once(
    cluster, model, prompts, expected, tmp_path, victims
):
    out, workers = tmp_path / "out", tmp_path / "workers"
    killed = []

    def kill_some():
        while settled(out) < 1 or len(list(workers.iterdir())) < 2:
            time.sleep(0.01)
        killed.extend(int(file.name) for file in list(workers.iterdir())[:victims])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)

    killer = threading.Thread(target=kill_some)
    load = loader(model, workers)
    killer.start()
    done = offline.generate_with_ray(load, prompts, out, SETTINGS, **OF)
    killer.join()
    assert done.finished
    assert done.errors == 1
    assert not any(Path(f"/proc/{pid}").exists() for pid in killed)
    assert victims == 1 or len(list(workers.iterdir())) > 2
    assert files(out) == files(expected)
    assert sorted(info["line"] for info, _ in pictures(out)) == LINES
    assert [error["line"] for error in errors(out)] == [6]


@pytest.mark.slow
def test_what_cannot_be_is_the_drivers_error(cluster, model, prompts, expected, tmp_path):
    load = loader(model, tmp_path / "workers")
    with pytest.raises(ValueError, match="height must be divisible by") as raised:
        offline.generate_with_ray(load, prompts, tmp_path, offline.Settings(height=33))
    assert "Traceback" not in str(raised.value)
    with pytest.raises(ValueError, match="steps was 2, now 3"):
        offline.generate_with_ray(load, prompts, expected, offline.Settings(steps=3))
    assert not shards(tmp_path)


@pytest.mark.slow
def test_a_signal_stops_the_workers_after_their_batch(cluster, model, prompts, tmp_path):
    out = tmp_path / "out"
    settings = dataclasses.replace(SETTINGS, images_per_shard=24, steps=100)

    def interrupt():
        while settled(out) < 1:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=interrupt)
    killer.start()
    load = loader(model, tmp_path / "workers")
    with pytest.raises(offline.Stopped, match="stopped by SIGTERM"):
        offline.generate_with_ray(load, prompts, out, settings, **OF)
    killer.join()
    assert 0 < settled(out) < 1000
    done = offline.generate_with_ray(load, prompts, out, settings, **OF)
    assert done.finished
    assert 0 < done.drawn < 23
    assert sorted(info["line"] for info, _ in pictures(out)) == LINES
