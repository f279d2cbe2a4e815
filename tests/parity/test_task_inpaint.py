"""Inpainting by blending (four channels) and with nine channels, SD and SDXL, against diffusers."""

import numpy as np
import pytest
import torch
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, generators, mask, picture, slow

SD, XL = "StableDiffusionInpaintPipeline", "StableDiffusionXLInpaintPipeline"
KINDS = {"sd": SD, "sd-inpaint": SD, "xl": XL, "xl-inpaint": XL}
TWO = {
    "prompt": PROMPTS,
    "negative_prompt": NEGATIVES,
    "image": [picture(1), picture(2)],
    "mask_image": [mask(1), mask(2)],
    "strength": 1.0,
    "num_inference_steps": 6,
}
OPTIONS = {
    "whole": TWO,
    "partial": {**TWO, "strength": 0.6},
    "one-picture-for-two-prompts": {**TWO, "image": picture(1), "mask_image": mask(1)},
    "two-images-per-prompt": {
        **TWO,
        "prompt": PROMPTS[0],
        "negative_prompt": None,
        "image": picture(3),
        "mask_image": mask(3),
        "num_images_per_prompt": 2,
    },
    "a-generator-per-image": {**TWO, "seed": [3, 4], "strength": 0.7},
    "clip-skip": {**TWO, "clip_skip": 1},
    "no-guidance": {**TWO, "guidance_scale": 1.0},
    "latents-out": {**TWO, "output_type": "latent", "strength": 0.7},
    "other-size": {
        **TWO,
        "image": [picture(1, 90, 50), picture(2, 90, 50)],
        "mask_image": [mask(1, 90, 50), mask(2, 90, 50)],
        "height": 64,
        "width": 64,
    },
    "arrays": {
        **TWO,
        "image": np.stack([np.asarray(picture(s), np.float32) / 255 for s in (1, 2)]),
        "mask_image": np.stack([np.asarray(mask(s), np.float32) / 255 for s in (1, 2)]),
    },
}
CROP = {
    **TWO,
    "prompt": PROMPTS[0],
    "negative_prompt": NEGATIVES[0],
    "image": picture(5, 128, 112),
    "mask_image": mask(5, 128, 112),
    "padding_mask_crop": 8,
    "strength": 0.8,
    "height": 64,
    "width": 64,
    "num_images_per_prompt": 2,
}
BRIEF = ("whole", "partial")
CASES = [(kind, "a", name) for kind in KINDS for name in OPTIONS]
CASES += [(kind, "b", "whole") for kind in KINDS]
CASES += [slow(kind, "b", "partial") for kind in KINDS]
CASES += [slow(kind, "c", name) for kind in KINDS for name in BRIEF]
SAMPLERS = ("pndm", "dpm++2m-karras", "unipc", "heun", "euler-ancestral", "euler", "ddim")
EACH = [(name, strength) for name in SAMPLERS for strength in (1.0, 0.55)]
FEW = [("pndm", 0.55), ("heun", 1.0)]
SAMPLER_CASES = [("sd", *case) for case in EACH]
SAMPLER_CASES += [(kind, *case) for kind in ("sd-inpaint", "xl") for case in FEW]
SAMPLER_CASES += [
    slow(kind, *case) for kind in ("sd-inpaint", "xl") for case in EACH if case not in FEW
]


KEPT = [("sd", "a", name) for name in ("whole", "partial", "a-generator-per-image", "arrays")]
KEPT += [("sd-inpaint", "a", "whole"), ("xl", "a", "partial"), ("xl-inpaint", "a", "whole")]


@pytest.mark.parametrize(("kind", "variation", "option"), few(CASES, *KEPT))
def test_inpainting_equals_diffusers(pairs, kind, variation, option):
    pairs(KINDS[kind], kind, variation).check(**OPTIONS[option])


def test_one_prompt_is_for_each_of_several_images(pairs):
    pairs(KINDS["sd"], "sd").check_one_prompt(**TWO)


@pytest.mark.parametrize(
    ("kind", "sampler", "strength"),
    few(SAMPLER_CASES, ("sd", "pndm", 0.55), ("sd", "heun", 1.0), ("sd", "unipc", 0.55)),
)
def test_every_sampler_equals_diffusers(pairs, kind, sampler, strength):
    pair = pairs(KINDS[kind], kind)
    pair.check(**{**TWO, "strength": strength, "num_inference_steps": 8}, sampler=sampler)


@pytest.mark.parametrize("kind", few(KINDS, "sd"))
def test_only_the_crop_around_the_mask_is_drawn(pairs, kind):
    pair = pairs(KINDS[kind], kind)
    call = {**CROP, "output_type": "pil"}
    expected = pair.reference(**call, generator=generators(2)).images
    actual = pair.ours(**call, generator=generators(2)).images
    for theirs, ours in zip(expected, actual, strict=True):
        assert ours.size == theirs.size == (128, 112)
        # Both are rounded to eighths of a byte's step before they are resized.
        assert np.abs(np.asarray(ours, int) - np.asarray(theirs, int)).max() <= 1


@pytest.mark.parametrize("kind", few(["sd-inpaint", "xl-inpaint"], "sd-inpaint"))
def test_given_latents_of_the_masked_picture(pairs, kind):
    latents = torch.randn((1, 4, 16, 16), generator=generators(8))
    pairs(KINDS[kind], kind).check(**TWO, masked_image_latents=latents)


def test_a_number_is_no_latents_of_the_masked_picture(pairs):
    with pytest.raises(ValueError, match="masked_image_latents must"):
        pairs(KINDS["sd-inpaint"], "sd-inpaint").ours(**TWO, masked_image_latents=np.int64(3))


@pytest.mark.parametrize("kind", few(["sd", "xl-inpaint"], "sd"))
def test_given_latents_equal_diffusers(pairs, kind):
    latents = torch.randn((2, 4, 16, 16), generator=generators(9))
    pairs(KINDS[kind], kind).check(**TWO, latents=latents)


def test_a_blurred_mask_equals_diffusers(pairs):
    pair = pairs(SD, "sd")
    theirs = pair.reference.mask_processor.blur(mask(1), blur_factor=6)
    ours = pair.ours.mask_processor.blur(mask(1), blur_factor=6)
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    pair.check(**{**TWO, "mask_image": theirs, "strength": 0.7})


@pytest.mark.parametrize("start", few([0.3, 0.6], 0.3))
def test_the_base_hands_over_to_an_inpainting_refiner(pairs, start):
    pair = pairs(XL, "xl")
    pair.check(**{**TWO, "denoising_start": start, "num_inference_steps": 8, "strength": 0.9999})
    pair.check(**{**TWO, "denoising_end": start, "output_type": "latent"})


@pytest.mark.slow
def test_the_refiner_inpaints_as_in_diffusers(pairs):
    pair = pairs(XL, "xl-refiner")
    pair.check(**TWO)
    pair.check(**{**TWO, "aesthetic_score": 8.0, "negative_aesthetic_score": 1.0, "strength": 0.7})


def test_sizes_of_xl_equal_diffusers(pairs):
    pair = pairs(XL, "xl")
    pair.check(**TWO, original_size=(30, 40), target_size=(70, 80), crops_coords_top_left=(2, 5))
    pair.check(**TWO, negative_original_size=(30, 40), negative_target_size=(9, 8))
