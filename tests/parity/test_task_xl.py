"""Text to image and image to image with SDXL, its base and its refiner, against diffusers."""

import numpy as np
import pytest
import torch
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, TOLERANCE, generators, picture, slow

TWO = {"prompt": PROMPTS, "negative_prompt": NEGATIVES}
SIZES = {
    "original_size": (40, 72),
    "crops_coords_top_left": (3, 9),
    "target_size": (96, 80),
    "negative_original_size": (20, 30),
    "negative_crops_coords_top_left": (5, 1),
    "negative_target_size": (50, 60),
}
OPTIONS = {
    "as-is": TWO,
    "no-negative-prompt": {"prompt": PROMPTS},
    "an-empty-negative-prompt": {"prompt": PROMPTS, "negative_prompt": ["", ""]},
    "second-prompts": {
        **TWO,
        "prompt_2": ["a pear", "three cats"],
        "negative_prompt_2": ["green", "a dog"],
    },
    "two-images-per-prompt": {"prompt": PROMPTS[0], "num_images_per_prompt": 2},
    "a-generator-per-image": {**TWO, "seed": [3, 4]},
    "no-guidance": {**TWO, "guidance_scale": 1.0},
    "zero-guidance": {**TWO, "guidance_scale": 0.0, "num_inference_steps": 2},
    "rescaled-guidance": {**TWO, "guidance_rescale": 0.7},
    "positive-sizes-only": {**TWO, "original_size": (40, 72), "target_size": (96, 80)},
    "clip-skip": {**TWO, "clip_skip": 1},
    "denoising-end": {**TWO, "denoising_end": 0.6, "num_inference_steps": 8},
    "latents-out": {**TWO, "output_type": "latent"},
    "own-timesteps": {**TWO, "sampler": "euler", "timesteps": [900, 500, 120]},
    "own-sigmas": {**TWO, "sampler": "euler", "sigmas": [12.0, 3.0, 0.5]},
    "lcm-sampler": {**TWO, "sampler": "lcm", "guidance_scale": 1.0},
}
IMAGE = {**TWO, "image": [picture(1), picture(2)], "num_inference_steps": 8, "strength": 0.6}
IMAGE_OPTIONS = {
    "as-is": IMAGE,
    "weak": {**IMAGE, "strength": 0.3},
    "whole": {**IMAGE, "strength": 1.0},
    "denoising-start": {**IMAGE, "denoising_start": 0.6},
    "denoising-start-and-end": {**IMAGE, "denoising_start": 0.3, "denoising_end": 0.8},
    "sizes": {**IMAGE, **SIZES},
    "aesthetic-scores": {**IMAGE, "aesthetic_score": 7.5, "negative_aesthetic_score": 1.0},
    "no-negative-prompt": {**IMAGE, "negative_prompt": None},
    "two-images-per-prompt": {
        **IMAGE,
        "prompt": PROMPTS[0],
        "negative_prompt": None,
        "image": picture(3),
        "num_images_per_prompt": 2,
    },
    "rescaled-guidance": {**IMAGE, "guidance_rescale": 0.5},
    "no-guidance": {**IMAGE, "guidance_scale": 1.0},
    "a-generator-per-image": {**IMAGE, "seed": [5, 6]},
}
BRIEF = ("as-is", "no-negative-prompt", "second-prompts", "denoising-end")
TEXT_CASES = [("a", name) for name in OPTIONS]
TEXT_CASES += [("b", name) for name in BRIEF]
TEXT_CASES += [slow("c", name) for name in BRIEF]
IMAGE_CASES = [("xl", "a", name) for name in IMAGE_OPTIONS if name != "aesthetic-scores"]
IMAGE_CASES += [("xl-refiner", "a", name) for name in IMAGE_OPTIONS]
BRIEF_IMAGES = ("as-is", "denoising-start", "no-negative-prompt")
KINDS = ("xl", "xl-refiner")
IMAGE_CASES += [(kind, "b", name) for kind in KINDS for name in BRIEF_IMAGES]
IMAGE_CASES += [slow(kind, "c", name) for kind in KINDS for name in BRIEF_IMAGES]


TEXT_KEPT = ("as-is", "no-negative-prompt", "second-prompts", "no-guidance", "denoising-end")
IMAGE_KEPT = [("xl", "a", "as-is"), ("xl", "a", "denoising-start")]
IMAGE_KEPT += [("xl-refiner", "a", "as-is"), ("xl-refiner", "a", "aesthetic-scores")]


@pytest.mark.parametrize(
    ("variation", "option"), few(TEXT_CASES, *[("a", name) for name in TEXT_KEPT])
)
def test_text_to_image_equals_diffusers(pairs, variation, option):
    pairs("StableDiffusionXLPipeline", "xl", variation).check(**OPTIONS[option])


@pytest.mark.parametrize("variation", ["a", slow("b"), slow("c")])
def test_negative_sizes_equal_diffusers(pairs, variation):
    """Each drawn alone by diffusers, which mixes up the two kinds of sizes in a batch."""
    pair = pairs("StableDiffusionXLPipeline", "xl", variation)
    call = {**SIZES, "num_inference_steps": 4, "output_type": "np"}
    actual = pair.ours(**TWO, **call, generator=[3, 4]).images
    for i, seed in enumerate((3, 4)):
        one = {name: texts[i] for name, texts in TWO.items()}
        expected = pair.reference(**one, **call, generator=generators(seed)).images[0]
        assert np.abs(actual[i] - expected).max() < TOLERANCE


@pytest.mark.parametrize(("kind", "variation", "option"), few(IMAGE_CASES, *IMAGE_KEPT))
def test_image_to_image_equals_diffusers(pairs, kind, variation, option):
    pair = pairs("StableDiffusionXLImg2ImgPipeline", kind, variation)
    pair.check(**IMAGE_OPTIONS[option])


@pytest.mark.parametrize(
    "sampler",
    few(["pndm", "dpm++2m-karras", "unipc", "heun", "euler-ancestral", "ddim"], "heun"),
)
@pytest.mark.parametrize("start", [{"strength": 0.6}, {"denoising_start": 0.45}])
def test_every_sampler_from_a_picture(pairs, sampler, start):
    pair = pairs("StableDiffusionXLImg2ImgPipeline", "xl")
    pair.check(**{**IMAGE, **start}, sampler=sampler)


@pytest.mark.parametrize(
    "sampler",
    few(["pndm", "dpm++2m-karras", "unipc", "heun", "euler-ancestral"], "unipc"),
)
@pytest.mark.parametrize("end", [None, 0.7])
def test_every_sampler_equals_diffusers(pairs, sampler, end):
    pair = pairs("StableDiffusionXLPipeline", "xl")
    pair.check(**TWO, num_inference_steps=8, sampler=sampler, denoising_end=end)


@pytest.mark.parametrize("sampler", few(["euler", "heun", "dpm++2m-karras"], "heun"))
def test_base_then_refiner_equals_diffusers(pairs, sampler):
    """An ensemble of denoisers: the base's noisy latents go to the refiner, which goes on."""
    base = pairs("StableDiffusionXLPipeline", "xl")
    refiner = pairs("StableDiffusionXLImg2ImgPipeline", "xl-refiner")
    call = {**TWO, "num_inference_steps": 10}
    options = {**call, "denoising_end": 0.7, "output_type": "latent"}
    with base.sampler(sampler):
        theirs = base.reference(**options, generator=generators(7)).images
        ours = base.ours(**options, generator=generators(7)).images
    assert np.abs(np.asarray(ours) - theirs.numpy()).max() < 1e-4 * theirs.std()
    options = {**call, "denoising_start": 0.7, "output_type": "np"}
    with refiner.sampler(sampler):
        expected = refiner.reference(**options, image=theirs, generator=generators(1)).images
        actual = refiner.ours(**options, image=ours, generator=generators(1)).images
    assert np.abs(actual - expected).max() < 1e-4


@pytest.mark.parametrize("variation", few("ab", "a"))
@pytest.mark.parametrize("force_zeros", [True, False])
def test_zeros_for_an_empty_negative_prompt(pairs, variation, force_zeros):
    pair = pairs(
        "StableDiffusionXLPipeline", "xl", variation, force_zeros_for_empty_prompt=force_zeros
    )
    without = pair.check(prompt=PROMPTS)
    empty = pair.check(prompt=PROMPTS, negative_prompt=["", ""])
    assert (np.abs(without - empty).max() > 1e-3) == force_zeros


def test_embeddings_of_encode_prompt(pairs):
    pair = pairs("StableDiffusionXLPipeline", "xl")
    options = {"prompt": PROMPTS, "negative_prompt": NEGATIVES, "prompt_2": ["a pear", "a cat"]}
    theirs, ours = pair.reference.encode_prompt(**options), pair.ours.encode_prompt(**options)
    assert len(theirs) == len(ours) == 4
    for expected, actual in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    names = ("prompt_embeds", "negative_prompt_embeds")
    names += ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    expected = pair.check(**dict(zip(names, theirs, strict=True)))
    call = {"num_inference_steps": 4, "output_type": "np"}
    images = pair.ours(**dict(zip(names, ours, strict=True)), generator=7, **call).images
    assert np.abs(images - expected).max() < 1e-4


def test_latents_instead_of_a_picture(pairs):
    pair = pairs("StableDiffusionXLImg2ImgPipeline", "xl")
    latents = torch.randn((2, 4, 16, 16), generator=generators(5))
    pair.check(**{**IMAGE, "image": latents})


def test_given_latents_equal_diffusers(pairs):
    pair = pairs("StableDiffusionXLPipeline", "xl")
    pair.check(**TWO, latents=torch.randn((2, 4, 16, 16), generator=generators(1)))
