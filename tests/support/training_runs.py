"""Training runs as processes of their own: started, watched, and what they leave."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from diffusax.training import CaptionedDataConfig
from support.many_devices import run_on_devices
from support.runs import RUNS, toy_run

RUN = RUNS / "devices_run.py"
"""Trains a tiny checkpoint."""
TOY = RUNS / "toy_run.py"
"""Trains a linear model."""
EMA = ["ema.rule=constant", "ema.decay=0.9", "ema.start=6"]
PICTURES = ("validation.every=4", "validation.prompts=[a dog]", "validation.steps=1")


def prepared(path, kind=CaptionedDataConfig, **options) -> CaptionedDataConfig:
    """A data set in pictures of 32 pixels."""
    return kind(str(path), resolution=32, center_crop=True, **options)


def keys(n: int = 4) -> jax.Array:
    return jax.vmap(jax.random.key)(jnp.arange(n))


def start(output: Path, *pairs: str, own_session: bool = False) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(TOY), str(output), *EMA, *pairs],
        start_new_session=own_session,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run_here(output: Path, *pairs: str) -> None:
    """Runs in this process what `start` runs in another one, which takes seconds to import."""
    toy_run.main(str(output), *EMA, *pairs)


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


def train_on_devices(
    output: Path, model: Path, data: Path, devices: int, *pairs: str
) -> list[float]:
    """Trains a tiny checkpoint on so many devices; the losses."""
    run_on_devices(RUN, model, data, output, *pairs, devices=devices)
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def weights(output: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(output / name / "unet" / "diffusion_pytorch_model.safetensors")


def start_two_processes(output: Path, *pairs: str) -> list[subprocess.Popen]:
    ema = ["ema.rule=power", "ema.snapshot_every=10"]
    return start_both([str(TOY), str(output), "distributed=true", *ema, *pairs])


def start_both(command: list[str]) -> list[subprocess.Popen]:
    """Starts two processes that find each other."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    environment = {**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2"}
    return [
        subprocess.Popen(
            [sys.executable, *command],
            env={**environment, "JAX_PROCESS_ID": str(i)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i in range(2)
    ]


def train_in_two_processes(output: Path, *pairs: str) -> None:
    finish_both(start_two_processes(output, *pairs))


def finish_both(processes: list[subprocess.Popen], timeout: int = 120) -> None:
    for process in processes:
        text, _ = process.communicate(timeout=timeout)
        assert process.returncode == 0, text[-3000:]
