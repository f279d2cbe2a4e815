"""The same run on one device and on eight, split in different ways, and in two processes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

RUN = Path(__file__).with_name("devices_run.py")


def train(output: Path, model: Path, data: Path, devices: int, *pairs: str) -> list[float]:
    flags = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, str(RUN), str(model), str(data), str(output), *pairs],
        env={**os.environ, "XLA_FLAGS": flags},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = (output / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


def weights(output: Path, name: str) -> dict[str, np.ndarray]:
    return load_file(output / name / "unet" / "diffusion_pytorch_model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory, checkpoint, pictures):
    output = tmp_path_factory.mktemp("alone")
    return output, train(output, checkpoint, pictures, 1)


@pytest.mark.parametrize("pairs", [(), ("fsdp=-1", "accumulate=2")], ids=["data", "fsdp"])
def test_eight_devices_train_as_one_does(tmp_path, checkpoint, pictures, alone, pairs):
    output, expected = alone
    result = train(tmp_path, checkpoint, pictures, 8, *pairs)
    assert abs(expected[-1] - expected[0]) > 1e-2
    np.testing.assert_allclose(result, expected, rtol=1e-4)
    for name in ("model", "model_ema"):
        theirs = weights(output, name)
        for key, value in weights(tmp_path, name).items():
            # Adam divides by the gradient's size, so that rounding errors of tiny gradients count.
            np.testing.assert_allclose(value, theirs[key], atol=4e-3, err_msg=key)
