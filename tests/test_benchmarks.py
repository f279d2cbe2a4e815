"""The targets and scripts for machines with a GPU, as far as they can be tried without one."""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import threading
import time

import gpu
import jax
import jax.numpy as jnp
import pytest
from gpu_profile import slowest
from support.repository import ROOT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.skipif(
    any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="XLA's compiler for GPUs is installed",
)
def test_the_tests_of_the_gpu_compiler_fail_without_it(tmp_path):
    (tmp_path / "e-gpu" / "bin").mkdir(parents=True)
    python = tmp_path / "e-gpu" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (tmp_path / "e-gpu" / ".installed").touch()
    command = ["make", "test-gpu-compiler", f"VENV={tmp_path / 'e'}", "ARGS=--collect-only"]
    paths = os.pathsep.join([str(ROOT / "src"), *sys.path])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "XLA's compiler for GPUs is needed here" in done.stderr


@pytest.fixture
def environ(monkeypatch):
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_FLAGS"):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_a_process_gets_most_of_the_memory_unless_the_caller_says_how_much(environ):
    assert gpu.variables("diffusax", tiny=False)["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    environ.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert "XLA_CLIENT_MEM_FRACTION" not in gpu.variables("diffusax", tiny=False)
    environ.setenv("XLA_CLIENT_MEM_FRACTION", "0.6")
    assert gpu.variables("diffusax", tiny=False)["XLA_CLIENT_MEM_FRACTION"] == "0.6"


def rows(monkeypatch, run, **options):
    """What the script runs, and with which environments."""
    monkeypatch.setattr(subprocess, "run", run)
    given = argparse.Namespace(**{"tiny": True, "seconds": 10.0, **options})
    return gpu.run_row("sd2", "diffusax", time.monotonic() + given.seconds, given)


def test_tiny_rows_compile_quickly(environ):
    seen = []

    def run(command, *, env, check, timeout):
        seen.append(env)
        return subprocess.CompletedProcess(command, 3)

    assert rows(environ, run) == 3
    assert "optimization_level=0" in seen[0]["XLA_FLAGS"]


def test_rows_that_the_time_does_not_allow_are_named(environ, capsys):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    assert rows(environ, run, seconds=0.0) == 0
    assert rows(environ, run) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sd2, diffusax: left out, the 0 seconds are over",
        "sd2, diffusax: stopped, the 10 seconds are over",
    ]


def test_only_one_of_the_processes_that_share_a_file_is_timed(tmp_path):
    one, other = gpu.Turns(tmp_path / "lock"), gpu.Turns(tmp_path / "lock")
    seen = []

    def work():
        with other:
            seen.append("works")
            with other.alone():
                seen.append("is timed")

    thread = threading.Thread(target=work)
    with one:
        with one.alone():
            thread.start()
            time.sleep(0.1)
            seen.append("one was timed")
        time.sleep(0.1)
        seen.append("one waits")
    thread.join(timeout=10)
    assert seen == ["one was timed", "works", "one waits", "is timed"]


def test_a_trace_tells_what_took_most_time(tmp_path):
    function = jax.jit(lambda x: (jnp.sin(jnp.tanh(x) @ x) @ x).sum())
    x = jnp.ones((256, 256))
    function(x).block_until_ready()
    with jax.profiler.trace(str(tmp_path)):
        for _ in range(3):
            function(x).block_until_ready()
    found = slowest(tmp_path, 2)
    assert found
    assert found == sorted(found, key=lambda slow: -slow.seconds)
    assert all(slow.seconds > 0 and slow.calls >= 3 for slow in found)
    with pytest.raises(ValueError, match="holds no trace"):
        slowest(tmp_path / "elsewhere")
