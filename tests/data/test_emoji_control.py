"""The ControlNet inside the package."""

import sys

import diffusers
import numpy as np
import pytest
import torch
from PIL import Image
from support.repository import ROOT

import diffusax
from diffusax.checkpoints.hub import EMBEDDED

sys.path.insert(0, str(ROOT / "examples" / "emoji_control"))
from edges import edges

FOLDER = EMBEDDED["emoji-control"]
PROMPTS = ["a red apple", "a rocket", "a cat face", "a pizza", "a sunflower", "a full moon"]
OPTIONS = {"num_inference_steps": 12, "guidance_scale": 2.0, "output_type": "np"}


@pytest.fixture(scope="module")
def emoji():
    return diffusax.DiffusionPipeline.from_pretrained("emoji")


@pytest.fixture(scope="module")
def steered(emoji):
    net = diffusax.ControlNetModel.from_pretrained("emoji-control")
    return diffusax.StableDiffusionControlNetPipeline.from_pipe(emoji, controlnet=net)


@pytest.fixture(scope="module")
def pages(emoji):
    """Emoji smaller and in a corner: not as the model draws them by itself."""
    found = []
    for picture in emoji(PROMPTS, seed=0, **OPTIONS | {"output_type": "pil"}).images:
        page = Image.new("RGB", picture.size, "white")
        page.paste(picture.resize((40, 40), Image.Resampling.LANCZOS), (22, 2))
        found.append(page)
    return found


def test_is_small_half_precision_and_says_what_it_is_made_of():
    files = [file for file in FOLDER.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 6.5e6
    assert str(diffusax.load_network(FOLDER).dtype) == "torch.float16"
    card = (FOLDER / "README.md").read_text("utf-8")
    for words in ("Noto", "Apache-2.0", "Unicode"):
        assert words in card


@pytest.mark.slow
def test_emoji_go_where_the_edges_are(emoji, steered, pages):
    wanted = np.stack([np.asarray(page, np.float32) / 255 for page in pages])
    drawn = steered(PROMPTS, image=[edges(page) for page in pages], seed=1, **OPTIONS).images
    alone = emoji(PROMPTS, seed=1, **OPTIONS).images

    def error(images):
        return np.sqrt(np.square(images - wanted).mean((1, 2, 3)))

    assert (error(drawn) < 0.6 * error(alone)).mean() > 0.8


@pytest.mark.slow
def test_pytorch_diffusers_draws_the_same(steered, pages):
    reference = diffusers.StableDiffusionControlNetPipeline.from_pretrained(
        EMBEDDED["emoji"],
        controlnet=diffusers.ControlNetModel.from_pretrained(FOLDER, torch_dtype=torch.float32),
        safety_checker=None,
        torch_dtype=torch.float32,
    )
    reference.set_progress_bar_config(disable=True)
    drawn = [
        pipe(
            PROMPTS[:2],
            image=[edges(page) for page in pages[:2]],
            generator=torch.Generator().manual_seed(0),
            **OPTIONS,
        ).images
        for pipe in (reference, steered)
    ]
    assert drawn[0].std() > 0.1
    np.testing.assert_allclose(drawn[1], drawn[0], atol=1e-4)
