"""Wan's pipelines against diffusers, live, on tiny checkpoints with random weights."""

import numpy as np
import pytest
import torch
from support.tiny_transformers import wan_pipeline

import diffusax
from diffusax.runtime.programs.compilations import count_compilations

SIZE = {"height": 16, "width": 32, "num_frames": 5}
CALL = {**SIZE, "num_inference_steps": 3, "max_sequence_length": 24}
PROMPT, NEGATIVE = "a photo of a cat &amp; the red   sofa", "the quick brown foxes"


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan")
    theirs = wan_pipeline(folder)
    ours = diffusax.DiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return theirs, ours


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    "call",
    [
        {},
        {"guidance_scale": 1.0, "num_frames": 1},
        {"prompt": [PROMPT, NEGATIVE], "num_videos_per_prompt": 2, "num_frames": 3},
    ],
)
def test_every_frame_is_that_of_diffusers(both, call):
    theirs, ours = both
    assert isinstance(ours, diffusax.WanPipeline)
    given = {"prompt": PROMPT, "negative_prompt": NEGATIVE, **CALL, **call}
    if isinstance(given["prompt"], list):
        given["negative_prompt"] = [NEGATIVE] * 2
    expected = theirs(**given, generator=generator()).frames
    found = ours(**given, generator=generator())
    assert found.frames.shape == expected.shape
    assert found[0] is found.frames
    np.testing.assert_allclose(found.frames, expected, atol=1e-4)
    assert expected.std() > 0.05
