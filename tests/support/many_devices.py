"""Scripts that run on several devices, which a process has from its start."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_on_devices(script: Path, *args: Any, devices: int = 4) -> list[str]:
    """The words that a script prints; it must end well."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, script, *args],
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.split()
