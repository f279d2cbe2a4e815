import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support.repository import ROOT

EXAMPLES = ROOT / "examples"


def run(*args: object) -> str:
    done = subprocess.run([sys.executable, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_demo_draws_a_sheet_of_eight(tmp_path):
    output = tmp_path / "demo.png"
    assert "8 pictures in" in run(EXAMPLES / "demo.py", "--output", output, "--steps", 2)
    assert Image.open(output).size == (4 * 196 - 4, 2 * 196 - 4)


@pytest.mark.slow
def test_the_sheet_of_tasks_has_a_row_of_pictures_for_each(tmp_path):
    output = tmp_path / "tasks.png"
    assert "24 pictures in" in run(EXAMPLES / "tasks.py", "--output", output)
    sheet = Image.open(output)
    assert sheet.size == (4 * 136 - 8, 6 * 176)
    for row in range(6):
        drawn = sheet.crop((0, row * 176 + 20, sheet.width, row * 176 + 148))
        assert len(np.unique(np.asarray(drawn).reshape(-1, 3), axis=0)) > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "size", "said"),
    [
        ("ddim_inversion", ["--steps", 3], (6 * 132 - 4, 128), "null-text: mean squared error"),
        ("likelihood", ["--steps", 2], (4 * 164 - 4, 160), "a full moon"),
        ("ddpo", ["--steps", 2, "--iterations", 1], (12 * 68 - 4, 2 * 68 - 4), "iteration 1: mean"),
    ],
)
def test_research_on_runs_draws_a_sheet(tmp_path, name, options, size, said):
    """Its numbers are compared with PyTorch's in parity/test_research_of_runs.py."""
    output = tmp_path / "sheet.png"
    assert said in run(EXAMPLES / "research" / f"{name}.py", "--output", output, *options)
    sheet = Image.open(output)
    assert (sheet.width, sheet.height >= size[1]) == (size[0], True)
    assert len(np.unique(np.asarray(sheet.convert("RGB")).reshape(-1, 3), axis=0)) > 1000
