"""The LoRA inside the package."""

import runpy

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.repository import ROOT

import diffusax
from diffusax.checkpoints.hub import EMBEDDED, EMBEDDED_LORAS

FOLDER = EMBEDDED_LORAS["emoji-owl"]
SCRIPT = ROOT / "examples" / "dreambooth" / "draw_subject.py"
PROMPT = "a sks owl"


def small(image) -> np.ndarray:
    return np.asarray(image.resize((32, 32), Image.Resampling.BOX), np.float32) / 255


def distance(a, b) -> float:
    return float(np.square(small(a) - small(b)).mean() ** 0.5)


def test_it_is_small_and_draws_its_subject_alone():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1e6
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    pipe.set_progress_bar_config(disable=True)
    call = {"num_inference_steps": 10, "seed": [1, 1]}
    before, other = pipe([PROMPT, "an owl"], **call).images
    pipe.load_lora_weights("emoji-owl")
    after, same = pipe([PROMPT, "an owl"], **call).images
    owl = runpy.run_path(str(SCRIPT))
    subject = owl["owl"](owl["Pose"]())
    assert distance(after, subject) < 0.7 * distance(before, subject)
    assert distance(same, other) < 0.5 * distance(same, subject)


@pytest.mark.slow
def test_pytorch_diffusers_draws_the_same_with_it():
    theirs = diffusers.DiffusionPipeline.from_pretrained(EMBEDDED["emoji"], dtype=torch.float32)
    theirs.load_lora_weights(FOLDER)
    theirs.set_progress_bar_config(disable=True)
    latents = torch.randn((1, 8, 8, 8), generator=torch.Generator().manual_seed(0))
    call = {"num_inference_steps": 5, "guidance_scale": 2.0, "output_type": "np"}
    ours = diffusax.DiffusionPipeline.from_pretrained("emoji")
    ours.load_lora_weights("emoji-owl")
    np.testing.assert_allclose(
        ours(PROMPT, latents=latents.numpy(), **call).images,
        theirs(PROMPT, latents=latents, **call).images,
        atol=1e-4,
    )
