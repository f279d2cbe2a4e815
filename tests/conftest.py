import atexit
import collections
import contextlib
import importlib.metadata
import os
import shutil
import tempfile

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Programs compiled by one process of a test run serve all others of it, and no other run.
    folder = tempfile.mkdtemp(prefix="diffusax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
if "XLA_FLAGS" not in os.environ:
    # Tiny networks are compiled often and run shortly, so compiling quickly is worth more.
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        # These halve it once more. XLA aborts a process at a flag that its version does not know.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"
        os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
# Where libtpu is installed, JAX would look for a TPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("DIFFUSERS_VERBOSITY", "error")

import gc
import logging
import random

import hypothesis
import jax
import numpy as np
import pytest
import torch
from support.effort import ALL, files_of_shard

# PyTorch's networks are tiny here: on several threads they are slower, and far slower beside other
# work.
torch.set_num_threads(1)
# Looking again and again through the millions of objects of a trace took a sixth of the time.
gc.set_threshold(100_000, 50, 100)

LONGEST = 10.0
"""Seconds that a test may take which everybody runs; longer ones are slow."""
_too_long: dict[str, float] = {}


def pytest_addoption(parser):
    parser.addoption("--shard", default="1/1", help="run a part of the files, such as 2/4")


def pytest_collection_modifyitems(config, items):
    """Leaves the tests of the shard's files."""
    if config.getoption("shard") == "1/1":
        return
    sizes = collections.Counter(item.path for item in items)
    files = files_of_shard(sizes, config.getoption("shard"))
    others = [item for item in items if item.path not in files]
    items[:] = [item for item in items if item.path in files]
    config.hook.pytest_deselected(items=others)


def pytest_collection_finish(session):
    """What has been imported by now stays, and need not be looked through at all."""
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report):
    if report.when == "call" and report.duration > LONGEST and not ALL:
        _too_long[report.nodeid] = report.duration


def pytest_terminal_summary(terminalreporter):
    """Says which tests take too long for a suite that everybody runs."""
    if _too_long:
        terminalreporter.section(f"over {LONGEST:.0f} s: mark them slow, or make them shorter")
        for name, seconds in sorted(_too_long.items(), key=lambda item: -item[1]):
            terminalreporter.line(f"{seconds:5.1f} s  {name}", red=True)


# What is drawn at random is the same in every run: a failure can be seen again.
hypothesis.settings.register_profile("suite", derandomize=True)
hypothesis.settings.load_profile("suite")


def seed_all():
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def seeded():
    """A test draws the same numbers alone and after others, in whichever order."""
    seed_all()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_fixture_setup(fixturedef, request):
    """What several tests share is the same, whichever of them is the first to ask for it."""
    if fixturedef.scope != "function":
        seed_all()
    return (yield)


@pytest.fixture(scope="module", autouse=True)
def release_programs():
    """Compiled programs are let go after each file: what it compiles depends on no other file."""
    yield
    from support.compiled_programs import forget_executables

    forget_executables()
    jax.clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def heard_loggers():
    """Libraries that configure logging anew, and the guides' own code, silence our loggers."""
    logging.disable(logging.NOTSET)
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if name.startswith("diffusax") and isinstance(logger, logging.Logger):
            logger.disabled, logger.propagate = False, True
            logger.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def tiny_checkpoints(tmp_path_factory):
    """Tiny checkpoints of every kind, each built once in the session (see support/tiny.py)."""
    from support.tiny import TinyCheckpoints

    return TinyCheckpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture(scope="session")
def pairs(tiny_checkpoints):
    """Pipelines of diffusers and of ours from the same checkpoints (see support/pairs.py)."""
    from support.pairs import Pairs

    return Pairs(tiny_checkpoints)


@pytest.fixture(scope="session", autouse=True)
def kept_session():
    """A thread that fails to connect closes huggingface_hub's client under all other threads.

    Readers of an earlier test may still be trying to reach a server that has gone.
    """
    from huggingface_hub.utils import _http

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_http, "close_session", lambda: None)
        yield


@pytest.fixture
def hub(monkeypatch):
    """Starts a Hub with these repositories, which is that of huggingface_hub from now on."""
    from huggingface_hub import constants
    from support.hub_server import running

    with contextlib.ExitStack() as stack:

        def start(repos):
            address, state = stack.enter_context(running(repos))
            template = address + "/{repo_id}/resolve/{revision}/{filename}"
            monkeypatch.setattr(constants, "ENDPOINT", address)
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
            return state

        yield start
