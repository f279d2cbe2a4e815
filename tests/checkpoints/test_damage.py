"""A damaged checkpoint is a pipeline or one clear sentence, in bounded time and memory."""

import json
import shutil
import subprocess
import sys

import pytest
from support.runs import RUNS
from support.tiny import build_stable_diffusion
from support.tiny_transformers import flux_pipeline as build_flux

from diffusax.checkpoints.hub import EMBEDDED

# Seconds and mebibytes; an undamaged checkpoint takes one second and some hundred mebibytes.
LIMIT_SECONDS, LIMIT_MEBIBYTES = 30, 1500


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Tiny, with the small vocabulary of the embedded model."""
    folder = tmp_path_factory.mktemp("damage") / "whole"
    build_stable_diffusion(folder, text={"vocab_size": 1506, "max_position_embeddings": 28})
    shutil.rmtree(folder / "tokenizer")
    shutil.copytree(EMBEDDED["emoji"] / "tokenizer", folder / "tokenizer")
    return folder


@pytest.mark.skipif(sys.platform == "win32", reason="makes pipes and links")
@pytest.mark.parametrize(
    ("first", "last"),
    [
        pytest.param(0, 60, id="60 cases"),
        pytest.param(60, 500, id="440 cases", marks=pytest.mark.slow),
    ],
)
def test_a_damaged_checkpoint_is_a_pipeline_or_one_sentence(checkpoint, tmp_path, first, last):
    program = RUNS / "damage.py"
    done = subprocess.run(
        [sys.executable, str(program), str(checkpoint), str(tmp_path), str(first), str(last)],
        capture_output=True,
        text=True,
        timeout=60 + 10 * (last - first),
    )
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, (lines[-1:], done.stderr[-2000:])
    cases = [line for line in lines if "result" in line]
    assert len(cases) == last - first
    assert not [case for case in cases if case["result"] not in ("loaded", "ValueError")]
    refused = [case for case in cases if case["result"] == "ValueError"]
    assert len(refused) > len(cases) / 2
    assert not [case for case in refused if "\n" in case["message"]]
    assert not [case for case in refused if str(tmp_path / "damaged") not in case["message"]]
    assert not [case for case in refused if len(case["message"]) > 3000]
    assert not [case for case in cases if case["seconds"] > LIMIT_SECONDS]
    assert not [case for case in cases if case["kibibytes"] > 1024 * LIMIT_MEBIBYTES]


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_stable_diffusion, build_flux])
def test_each_value_of_each_json_file_is_taken_or_named(tmp_path, build):
    build(tmp_path / "whole")
    program = RUNS / "damage.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path / "whole"), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=3600,
    )
    *wrong, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr[-2000:]
    assert last["count"] > 1000
    assert not wrong
