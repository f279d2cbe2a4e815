"""The same run on one device and on eight, split in different ways, and in two processes."""

import json
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support.data_sets import edit_row, write_parquet
from support.training_runs import (
    PICTURES,
    RUN,
    TOY,
    finish_both,
    start_both,
    start_two_processes,
    train_in_two_processes,
    train_on_devices,
    weights,
)

from diffusax.training.ema.snapshots import AVERAGES


@pytest.fixture(scope="module")
def alone(tmp_path_factory, checkpoint, pictures):
    output = tmp_path_factory.mktemp("alone")
    return output, train_on_devices(output, checkpoint, pictures, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("mesh=fsdp=-1", "accumulate=2", *PICTURES), marks=pytest.mark.slow),
        ("mesh=data=2,fsdp=2,tensor=2",),
    ],
    ids=["data", "fsdp", "tensor"],
)
def test_eight_devices_train_as_one_does(tmp_path, checkpoint, pictures, alone, pairs):
    output, expected = alone
    result = train_on_devices(tmp_path, checkpoint, pictures, 8, *pairs)
    assert abs(expected[-1] - expected[0]) > 1e-2
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    for name in ("model", "model_ema"):
        theirs = weights(output, name)
        for key, value in weights(tmp_path, name).items():
            # Adam divides by the gradient's size, so that rounding errors of tiny gradients count.
            np.testing.assert_allclose(value, theirs[key], atol=4e-3, err_msg=key)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("data=8", "data=2,fsdp=2,tensor=2"),
        ("data=4,tensor=2", "data=2,tensor=4"),
        ("fsdp=4,tensor=2", "fsdp=8"),
    ],
)
def test_a_run_goes_on_over_other_devices(tmp_path, checkpoint, pictures, alone, first, then):
    output, expected = alone
    train_on_devices(tmp_path, checkpoint, pictures, 8, f"mesh={first}", "steps=2")
    result = train_on_devices(tmp_path, checkpoint, pictures, 8, f"mesh={then}")
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    for name in ("model", "model_ema"):
        theirs = weights(output, name)
        for key, value in weights(tmp_path, name).items():
            np.testing.assert_allclose(value, theirs[key], atol=4e-3, err_msg=key)


@pytest.mark.slow
def test_two_processes_stop_and_go_on_as_one_run(tmp_path):
    train_in_two_processes(tmp_path / "whole", "mesh=fsdp=2")
    train_in_two_processes(tmp_path / "parts", "mesh=fsdp=2", "steps=10")
    train_in_two_processes(tmp_path / "parts", "mesh=fsdp=2")
    for name in ("model", "model_ema"):
        whole, parts = (np.load(tmp_path / run / name / "kernel.npy") for run in ("whole", "parts"))
        np.testing.assert_array_equal(whole, parts)
    stored = sorted(file.name for file in (tmp_path / "whole" / AVERAGES).iterdir())
    assert stored == [f"00000{t}-{x}.safetensors" for t in (10, 20, 24) for x in (0.05, 0.1)]
    for file in stored:
        whole, parts = (
            (tmp_path / run / AVERAGES / file).read_bytes() for run in ("whole", "parts")
        )
        assert whole == parts

    subprocess.run([sys.executable, str(TOY), str(tmp_path / "alone")], check=True)
    losses = {}
    for run in ("whole", "alone"):
        lines = (tmp_path / run / "metrics.jsonl").read_text().splitlines()
        losses[run] = [json.loads(line)["loss"] for line in lines]
    assert losses["whole"][-1] < 0.99 * losses["whole"][0]
    np.testing.assert_allclose(losses["whole"], losses["alone"], rtol=0.02)


@pytest.mark.slow
def test_two_processes_train_an_editing_model_as_one_does(tmp_path, checkpoint):
    # Each process has rows of its own, in an order of its own; so they are all alike here.
    data = write_parquet(tmp_path / "rows", [edit_row(3)] * 16)
    pairs = ["recipe=instruct-pix2pix", "data.random_flip=false", "data.center_crop=true"]
    pairs += ["mesh=data=2"]
    expected = train_on_devices(tmp_path / "one", checkpoint, data, 2, *pairs)
    command = [str(RUN), str(checkpoint), str(data), str(tmp_path / "two"), *pairs]
    finish_both(start_both([*command, "distributed=true"]), timeout=600)
    lines = (tmp_path / "two" / "metrics.jsonl").read_text().splitlines()
    np.testing.assert_allclose([json.loads(line)["loss"] for line in lines], expected, rtol=1e-5)
    assert abs(expected[-1] - expected[0]) > 1e-3


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_at_the_same_step(tmp_path):
    processes = start_two_processes(tmp_path, "steps=100000", "checkpoint_every=100000")
    limit = time.monotonic() + 90
    while not (tmp_path / "metrics.jsonl").is_file() or not (
        tmp_path / "metrics.jsonl"
    ).read_text().count("loss"):
        assert time.monotonic() < limit
        time.sleep(0.1)
    processes[1].send_signal(signal.SIGTERM)
    for process in processes:
        text, _ = process.communicate(timeout=90)
        assert process.returncode != 0
        assert "stopped by SIGTERM; saved at step" in text
    (saved,) = (tmp_path / "checkpoints").iterdir()
    assert 0 < int(saved.name) < 100000
