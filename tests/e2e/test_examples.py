import subprocess
import sys
from pathlib import Path

from PIL import Image

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_demo_draws_a_sheet_and_says_that_the_model_is_untrained(tmp_path):
    output = tmp_path / "demo.png"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "demo.py"), "--output", str(output)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "random weights" in done.stdout
    assert Image.open(output).size == (516, 516)
