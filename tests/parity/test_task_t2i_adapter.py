"""T2I-Adapters, one and several, against diffusers."""

import numpy as np
import pytest
import torch
from support.effort import few, first
from support.pairs import NEGATIVES, PROMPTS, picture

SD, XL = "StableDiffusionAdapterPipeline", "StableDiffusionXLAdapterPipeline"
TEXT = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "num_inference_steps": 5}
CALL = {**TEXT, "image": [picture(11), picture(12)]}
OPTIONS = {
    "as-is": {},
    "scale": {"adapter_conditioning_scale": 0.45},
    "negative-scale": {"adapter_conditioning_scale": -1.3},
    "no-guidance": {"guidance_scale": 1.0},
    "ancestral": {"sampler": "euler-ancestral"},
    "heun": {"sampler": "heun"},
    "a-generator-per-image": {"seed": [3, 4]},
    "timesteps": {"timesteps": [801, 501, 301, 1], "sampler": "lcm"},
    "clip-skip": {"clip_skip": 1},
    "another-size": {
        "image": [picture(11, 90, 50), picture(12, 90, 50)],
        "height": 64,
        "width": 72,
    },
    "own-size": {"image": [picture(11, 74, 59), picture(12, 74, 59)]},
}
OF_XL = {
    "as-is": {},
    "factor": {"adapter_conditioning_factor": 0.5},
    "no-factor": {"adapter_conditioning_factor": 0.0},
    "factor-of-doubled-rows": {"adapter_conditioning_factor": 0.6, "sampler": "heun"},
    "doubled-rows": {"sampler": "heun"},
    "factor-of-timesteps": {
        "adapter_conditioning_factor": 0.5,
        "timesteps": [801, 501, 301, 101, 1],
        "sampler": "lcm",
    },
    "factor-of-a-part": {"adapter_conditioning_factor": 0.5, "denoising_end": 0.7},
    "rescale": {"guidance_rescale": 0.6, "adapter_conditioning_scale": 0.7},
    "sizes": {"original_size": (30, 40), "target_size": (70, 80), "crops_coords_top_left": (2, 5)},
    "second-prompts": {"prompt_2": ["a pear", "cats"]},
}


@pytest.mark.parametrize("option", few(OPTIONS, "as-is", "scale"))
def test_one_adapter_equals_diffusers(pairs, option):
    pairs(SD, "sd", t2i=("sd",)).check(**{**CALL, **OPTIONS[option]})


@pytest.mark.parametrize("option", few(OF_XL, "factor", "no-factor"))
def test_an_adapter_of_xl(pairs, option):
    """The autoencoder's latents_mean is left out, as by diffusers for this pipeline."""
    pairs(XL, "xl", "b", t2i=("xl-b",)).check(**{**CALL, **OF_XL[option]})


@pytest.mark.slow
def test_negative_sizes_of_xl(pairs):
    """Of a single picture: diffusers gives those of several to the wrong ones."""
    sizes = {"negative_original_size": (20, 30), "negative_target_size": (50, 60)}
    call = {**CALL, "prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0], "image": picture(1)}
    call |= {**sizes, "negative_crops_coords_top_left": (3, 4), "original_size": (70, 80)}
    pairs(XL, "xl", t2i=("xl",)).check(**call)


@pytest.mark.slow
def test_a_light_adapter_of_one_channel(pairs):
    pair = pairs(SD, "sd", t2i=("light",))
    expected = pair.check(**{**CALL, "image": [picture(n).convert("L") for n in (11, 12)]})
    tensors = torch.rand(2, 1, 64, 64)
    pair.check(**{**CALL, "image": tensors})
    pair.check(**{**CALL, "image": list(tensors)})
    # diffusers refuses colours here.
    colours = {**CALL, "image": [picture(11), picture(12)], "output_type": "np", "seed": 7}
    assert np.isfinite(pair.ours(**colours).images).all()
    assert expected.shape == (2, 64, 64, 3)


@pytest.mark.parametrize("scales", first([[1.0, 0.4], [0.0, -0.8]]))
def test_two_adapters_equal_diffusers(pairs, scales):
    call = {**CALL, "image": [[picture(11), picture(12)], [picture(13), picture(14)]]}
    pairs(SD, "sd", t2i=("sd", "sd")).check(**call, adapter_conditioning_scale=scales)


@pytest.mark.slow
@pytest.mark.parametrize("steps", [{}, {"timesteps": [999, 499]}])
def test_a_consistency_model_equals_diffusers(pairs, steps):
    """As in diffusers' own tests."""
    pairs(SD, "lcm", t2i=("sd",)).check(**CALL, **steps)


@pytest.mark.slow
def test_two_adapters_of_xl(pairs):
    pair = pairs(XL, "xl", t2i=("xl", "xl"))
    call = {**TEXT, "prompt": PROMPTS[0], "negative_prompt": NEGATIVES[0]}
    call |= {"num_images_per_prompt": 2, "image": [picture(11), picture(12)]}
    factor = {"adapter_conditioning_factor": 0.5}
    pair.check(**call, adapter_conditioning_scale=[1.0, 0.4])
    pair.check(**call, adapter_conditioning_scale=[0.3, 0.9], **factor)
    # Equal shares.
    pair.check(**call, adapter_conditioning_scale=None)
