"""Scripts that run on several devices, which a process has from its start."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

from diffusax.runtime.devices import mesh


@contextlib.contextmanager
def split_small_arrays() -> Iterator[None]:
    """Has meshes split the arrays of tiny networks as they do those of full-size ones."""
    with mock.patch.object(mesh, "MIN_SHARDED_SIZE", 1):
        yield


def run_on_devices(*command: Any, devices: int = 4) -> list[str]:
    """Runs Python with a script and its arguments, which must end well; the words it prints."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()
