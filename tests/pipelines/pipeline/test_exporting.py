"""An exported pipeline draws without diffusax what the pipeline draws."""

import os
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from support.pairs import slow
from support.tiny import (
    SMALLEST_UNET,
    SMALLEST_VAE,
    build_stable_diffusion,
    build_stable_diffusion_xl,
)

import diffusax
from diffusax.cli.console import main

ALONE = """
import runpy, sys
sys.modules["diffusax"] = None
sys.argv[0] = "draw.py"
runpy.run_path("draw.py", run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.parametrize("build", [build_stable_diffusion_xl, slow(build_stable_diffusion)])
def test_the_script_beside_the_programs_draws_the_same_picture(build, tmp_path):
    build(tmp_path / "model", unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    out = tmp_path / "exported"
    options = ["--platforms", "cpu", "--steps", "3", "--output", str(out)]
    main(["export", str(tmp_path / "model"), *options])
    given = ["a red CAT,  on a table", "--negative-prompt", "ugly " * 90, "--seed", "5"]
    command = [sys.executable, "-c", ALONE, *given]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    subprocess.run(command, cwd=out, env=environment, check=True)

    pipe = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "model")
    call = {"negative_prompt": given[2], "seed": 5, "num_inference_steps": 3}
    expected = pipe(given[0], guidance_scale=7.5, **call).images[0]
    drawn = np.asarray(Image.open(out / "picture-0.png"), np.int32)
    assert np.abs(drawn - np.asarray(expected, np.int32)).max() <= 1
    assert drawn.std() > 5
