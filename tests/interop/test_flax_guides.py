"""The programs of diffusers' guides to its Flax classes run, but for the import, on 8 devices."""

import os
import subprocess
import sys

import pytest
from support.runs import RUNS

RUN = RUNS / "flax_guides_run.py"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sd", pytest.param("xl", marks=pytest.mark.slow)])
def test_the_guide_runs(kind, tiny_checkpoints):
    folder, _ = tiny_checkpoints.pipeline(kind)
    done = subprocess.run(
        [sys.executable, str(RUN), kind, str(folder)],
        env={
            **os.environ,
            "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
