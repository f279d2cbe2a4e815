"""The scripts of examples/research run, in a small form, on the model inside the package."""

import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support.evaluation_rows import build_clip
from support.repository import ROOT

RESEARCH = ROOT / "examples" / "research"


def run(name, output, *args):
    """Runs a script, and returns what it printed and the sheet that it drew."""
    command = [sys.executable, RESEARCH / f"{name}.py", "--output", output, *args]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, np.asarray(Image.open(output).convert("RGB"))


def distances(printed):
    """The squared distances that a script of distillation prints, by network and steps."""
    found = re.findall(r"(\w+, \d+): squared distance ([\d.]+)", printed)
    return {name: float(value) for name, value in found}


def test_each_script_is_below_a_hundred_lines():
    for script in RESEARCH.glob("*.py"):
        assert len(script.read_text("utf-8").splitlines()) < 100, script.name


@pytest.mark.slow
def test_guidance_reaches_each_colour(tmp_path):
    printed, _ = run("guidance", tmp_path / "sheet.png", "--steps", 20, "--scales", 0, 1)
    before, after = [
        [float(score) for score in re.findall(r"[a-z]+ (-[\d.]+)", line)]
        for line in printed.splitlines()
    ]
    assert len(before) == 6
    assert min(before) < -5
    assert min(after) > -1


@pytest.mark.slow
def test_guidance_by_a_clip_model_from_a_folder(tmp_path):
    build_clip(tmp_path / "clip")
    options = "--clip", tmp_path / "clip", "--steps", 4, "--scales", 0, 3
    printed, sheet = run("guidance", tmp_path / "sheet.png", *options)
    before, after = [
        [float(score) for score in re.findall(r"(-?\d+\.\d+)", line)][:2]
        for line in printed.splitlines()
    ]
    assert np.mean(after) > np.mean(before)
    assert sheet.std() > 10


@pytest.mark.slow
def test_dps_comes_near_to_what_was_measured(tmp_path):
    printed, _ = run("dps", tmp_path / "sheet.png", "--steps", 40)
    residuals = [float(value) for value in re.findall(r"residual ([\d.]+)", printed)]
    printed, _ = run("dps", tmp_path / "sheet.png", "--steps", 40, "--strength", 0)
    without = [float(value) for value in re.findall(r"residual ([\d.]+)", printed)]
    assert all(2 * found < alone for found, alone in zip(residuals, without, strict=True))


@pytest.mark.slow
def test_sds_draws_a_red_apple_on_green(tmp_path):
    _, sheet = run("sds", tmp_path / "sheet.png", "--iterations", 120)
    drawn = sheet[-64:, -64:].astype(int)
    red, green, _ = drawn[20:44, 20:44].reshape(-1, 3).mean(0)
    assert red > green + 60
    red, green, _ = drawn[[0, -1]].reshape(-1, 3).mean(0)
    assert green > red


@pytest.mark.slow
def test_a_distilled_student_is_nearer_to_many_steps(tmp_path):
    options = "--iterations", 100, "--counts", 4
    printed, _ = run("progressive_distillation", tmp_path / "sheet.png", *options)
    found = distances(printed)
    assert found["student, 4"] < found["teacher, 4"]


@pytest.mark.slow
def test_a_consistency_model_is_nearer_in_one_step(tmp_path):
    printed, _ = run("consistency_distillation", tmp_path / "sheet.png", "--iterations", 200)
    found = distances(printed)
    assert found["student, 1"] < found["teacher, 1"]


@pytest.mark.slow
def test_the_training_loop_learns_and_saves_a_pipeline(tmp_path):
    import diffusers

    options = "--iterations", 60, "--images", 32, "--save", tmp_path / "saved"
    printed, _ = run("training_loop", tmp_path / "sheet.png", *options)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", printed)]
    assert losses[-1] < losses[0] / 2
    diffusers.DiffusionPipeline.from_pretrained(tmp_path / "saved")
