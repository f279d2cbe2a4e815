"""Runs that are killed, or told to stop, and started again."""

import functools
import json
import os
import random
import signal
import socket

import pytest
from support.offline_runs import (
    errors,
    files,
    finish,
    kill,
    pictures,
    pixels,
    settled,
    shards,
    start,
    until,
    wait_for,
)
from support.tiny import build_stable_diffusion
from support.tiny_transformers import flux_pipeline, klein_pipeline, z_image_pipeline

OPTIONS = ["--steps", 2, "--batch-size", 4, "--images-per-shard", 8]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A checkpoint that takes no time."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    build_stable_diffusion(folder, unet={"sample_size": 8})
    return ["--model", folder]


def write_prompts(path, count):
    """Prompts of which each seventh is bad and each fifth has a sampler of its own."""

    def line(number):
        if number % 7 == 3:
            return '{"prompt": 1}'
        sampler = ', "sampler": "euler_a", "steps": 3' if number % 5 == 0 else ""
        return f'{{"prompt": "number {number}"{sampler}}}'

    path.write_text("".join(line(number) + "\n" for number in range(1, count + 1)))
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """60 lines."""
    return write_prompts(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", 60)


@pytest.fixture(scope="module")
def undisturbed(model, prompts, tmp_path_factory):
    """What a run over them writes, by format."""
    runs = {}

    def run(name):
        if name not in runs:
            runs[name] = tmp_path_factory.mktemp(f"undisturbed-{name}")
            finish(start(prompts, runs[name], *OPTIONS, *model, "--format", name))
        return runs[name]

    return run


def run_killed(prompts, out, times, seed, *options):
    """Runs until it ends, killed so many times, each time a little after a batch more."""
    chance = random.Random(seed)
    kills = 0
    while kills < times:
        process = start(prompts, out, *options)
        before = settled(out)
        if not wait_for(process, lambda: settled(out) > before):  # noqa: B023
            break
        # Anywhere in the batches that follow: while files are written, or renamed.
        wait_for(process, lambda: chance.random() < 0.1)
        kill(process)
        kills += 1
    finish(start(prompts, out, *options))
    return kills


def check_each_once(out, expected, count, rounding=0):
    """rounding: in levels of 255, where other devices have drawn some pictures."""
    found, wanted = files(out), files(expected)
    if rounding:
        for name in [name for name in wanted if name.endswith(".png")]:
            one, other = (pixels(data.pop(name)).astype(int) for data in (found, wanted))
            assert abs(one - other).max() <= rounding
    assert found == wanted
    lines = [info["line"] for info, _ in pictures(out)]
    bad = [number for number in range(1, count + 1) if number % 7 == 3]
    assert sorted(lines) == [number for number in range(1, count + 1) if number not in bad]
    assert [error["line"] for error in errors(out)] == bad
    assert not list((out / "work").iterdir())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kills"), [("images", 2), pytest.param("webdataset", 1, marks=pytest.mark.slow)]
)
def test_a_killed_run_makes_each_picture_once(tmp_path, model, prompts, undisturbed, name, kills):
    options = [*OPTIONS, *model, "--format", name]
    assert run_killed(prompts, tmp_path, kills, name, *options) == kills
    check_each_once(tmp_path, undisturbed(name), 60)


TRANSFORMERS = {
    "flux": flux_pipeline,
    # The hidden states that it reads by default.
    "klein": functools.partial(klein_pipeline, layers=28),
    "z-image": z_image_pipeline,
}


@pytest.mark.slow
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_killed_runs_of_transformers_over_two_processes_make_each_picture_once(tmp_path, family):
    TRANSFORMERS[family](tmp_path / "model")
    size, count = '"height": 24, "width": 40', 14

    def line(number):
        scale = ', "guidance": 0.0, "steps": 3' if number % 2 else ""
        return '{"prompt": 1}' if number % 7 == 3 else f'{{"prompt": "a {number}", {size}{scale}}}'

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(line(number) + "\n" for number in range(1, count + 1)))
    options = ["--steps", 2, "--batch-size", 2, "--images-per-shard", 2]
    options += ["--model", tmp_path / "model"]
    finish(start(prompts, tmp_path / "whole", *options))
    assert run_killed(prompts, tmp_path / "killed", 1, 0, *options) == 1
    check_each_once(tmp_path / "killed", tmp_path / "whole", count)
    parts = [start(prompts, tmp_path / "parts", *options, "--shard", f"{i}/2") for i in range(2)]
    for part in parts:
        finish(part)
    check_each_once(tmp_path / "parts", tmp_path / "whole", count)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["images", "webdataset", "parquet"])
def test_160_prompts_killed_six_times(tmp_path, name):
    prompts = write_prompts(tmp_path / "prompts.jsonl", 160)
    options = ["--steps", 2, "--batch-size", 8, "--images-per-shard", 32, "--format", name]
    finish(start(prompts, tmp_path / "undisturbed", *options))
    assert run_killed(prompts, tmp_path / "killed", 6, name, *options) == 6
    check_each_once(tmp_path / "killed", tmp_path / "undisturbed", 160)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGTERM, "SIGTERM"),
        pytest.param(signal.SIGINT, "Ctrl-C", marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_what_was_begun(tmp_path, model, prompts, undisturbed, number, said):
    process = start(prompts, tmp_path, *OPTIONS, *model)
    until(process, lambda: settled(tmp_path) >= 1)
    process.send_signal(number)
    text = finish(process, 128 + number)
    assert f"{said}: the batches that were begun are finished" in text
    assert f"stopped by {said}; what was begun is in {tmp_path}: start the same again" in text
    assert "Traceback" not in text
    assert len(shards(tmp_path)) < len(shards(undisturbed("images")))
    assert not list(tmp_path.rglob("*.partial"))
    written = len(pictures(tmp_path)) + sum(
        len(json.loads(batch.read_text())["pictures"]) for batch in tmp_path.glob("work/*/*.json")
    )
    said = finish(start(prompts, tmp_path, *OPTIONS, *model))
    assert f"({51 - written} drawn, 9 lines left out: see errors.jsonl)" in said
    check_each_once(tmp_path, undisturbed("images"), 60)


@pytest.mark.slow
def test_a_second_run_in_the_same_folder_is_refused(tmp_path, model, prompts):
    first = start(prompts, tmp_path, *OPTIONS, *model)
    until(first, lambda: settled(tmp_path) >= 1)
    first.send_signal(signal.SIGSTOP)
    same = finish(start(prompts, tmp_path, *OPTIONS, *model), 2)
    divided = finish(start(prompts, tmp_path, *OPTIONS, *model, "--shard", "1/2"), 2)
    kill(first)
    for text in (same, divided):
        assert f"another run is writing to {tmp_path}" in text
        assert "Traceback" not in text


@pytest.mark.slow
def test_processes_draw_their_parts_at_the_same_time(tmp_path, model, prompts, undisturbed):
    parts = [start(prompts, tmp_path, *OPTIONS, *model, "--shard", f"{i}/2") for i in range(2)]
    for process in parts:
        finish(process)
    check_each_once(tmp_path, undisturbed("images"), 60)


@pytest.mark.slow
def test_jax_processes_do_not_end_with_one_of_them(tmp_path, model, prompts, undisturbed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        variables = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free.getsockname()[1]}"}
    variables["JAX_NUM_PROCESSES"] = "2"
    # Each has a mesh of its own devices.
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    options = [*OPTIONS, *model, "--distributed"]
    first, second = (
        start(prompts, tmp_path, *options, **variables, XLA_FLAGS=flags, JAX_PROCESS_ID=str(i))
        for i in range(2)
    )
    # The first one coordinates; it takes the shards with even numbers.
    until(first, lambda: any(tmp_path.glob("work/*[02468]/*.json")))
    kill(first)
    assert "drawn" in finish(second)
    assert {shard.name for shard in shards(tmp_path)} >= {"000001", "000003", "000005", "000007"}
    finish(start(prompts, tmp_path, *OPTIONS, *model))
    check_each_once(tmp_path, undisturbed("images"), 60, rounding=1)


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, model, prompts, undisturbed):
    first = start(prompts, tmp_path, *OPTIONS, *model, "--shard", "1/2")
    until(first, lambda: settled(tmp_path) > 1000)
    kill(first)
    finish(start(prompts, tmp_path, *OPTIONS, *model))
    check_each_once(tmp_path, undisturbed("images"), 60)
