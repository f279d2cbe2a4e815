"""Image to image with Stable Diffusion and latent consistency models against diffusers."""

import numpy as np
import pytest
import torch
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, generators, picture, slow

import diffusax

TWO = {
    "prompt": PROMPTS,
    "negative_prompt": NEGATIVES,
    "image": [picture(1), picture(2)],
    "num_inference_steps": 6,
}
EULER = {**TWO, "sampler": "euler", "strength": 0.6}
OPTIONS = {
    "as-is": TWO,
    "weak": {**TWO, "strength": 0.35},
    "whole": {**TWO, "strength": 1.0},
    "odd-start": {**TWO, "strength": 0.57, "num_inference_steps": 7},
    "one-picture-for-two-prompts": {**TWO, "image": picture(3)},
    "two-images-per-prompt": {
        **TWO, "prompt": PROMPTS[0], "negative_prompt": None, "image": picture(4),
        "num_images_per_prompt": 2,
    },
    "two-prompts-two-images-each": {**TWO, "image": picture(4), "num_images_per_prompt": 2},
    "a-generator-per-image": {**TWO, "seed": [3, 4]},
    "no-guidance": {**TWO, "guidance_scale": 1.0},
    "clip-skip": {**TWO, "clip_skip": 1},
    "stochastic-ddim": {**TWO, "sampler": "ddim", "eta": 1.0},
    "latents-out": {**TWO, "output_type": "latent"},
    "own-timesteps": {**EULER, "timesteps": [900, 700, 400, 100]},
    "own-sigmas": {**EULER, "sigmas": [12.0, 3.0, 0.5, 0.1]},
    "odd-size": {**TWO, "image": [picture(1, 67, 71), picture(2, 67, 71)]},
}  # fmt: skip
BRIEF = ("as-is", "weak", "whole", "a-generator-per-image")
CASES = [("a", name) for name in OPTIONS]
CASES += [("b", name) for name in BRIEF]
CASES += [slow("c", name) for name in BRIEF]


KEPT = ("as-is", "weak", "whole", "two-images-per-prompt", "stochastic-ddim", "own-timesteps")


@pytest.mark.parametrize(("variation", "option"), few(CASES, *[("a", name) for name in KEPT]))
def test_image_to_image_equals_diffusers(pairs, variation, option):
    pairs("StableDiffusionImg2ImgPipeline", "sd", variation).check(**OPTIONS[option])


def test_one_prompt_is_for_each_of_several_images(pairs):
    pairs("StableDiffusionImg2ImgPipeline", "sd").check_one_prompt(**TWO)


@pytest.mark.parametrize("strength", [0.8, 0.45])
@pytest.mark.parametrize(
    "sampler",
    few(
        ["pndm", "dpm++2m-karras", "unipc", "heun", "euler-ancestral", "euler", "ddim"],
        *("pndm", "heun", "unipc"),
    ),
)
@pytest.mark.parametrize("variation", ["a", slow("b")])
def test_every_sampler_equals_diffusers(pairs, sampler, variation, strength):
    pair = pairs("StableDiffusionImg2ImgPipeline", "sd", variation)
    pair.check(**{**TWO, "strength": strength, "num_inference_steps": 8}, sampler=sampler)


def forms() -> dict:
    pil = [picture(1), picture(2)]
    array = np.stack([np.asarray(p, np.float32) / 255 for p in pil])
    tensor = torch.tensor(array).permute(0, 3, 1, 2)
    return {
        "list of arrays": list(array),
        "array": array,
        "torch tensor": tensor,
        "torch tensor in [-1, 1]": 2 * tensor - 1,
        "list of torch tensors": list(tensor),
        "palette": [p.convert("P") for p in pil],
        "grey": [p.convert("L").convert("RGB") for p in pil],
    }


@pytest.mark.parametrize("form", forms())
@pytest.mark.filterwarnings("ignore:Passing `image` as torch tensor")
def test_every_form_of_picture(pairs, form):
    pair = pairs("StableDiffusionImg2ImgPipeline", "sd")
    image = forms()[form]
    if form == "palette":
        # diffusers asks for RGB here; ours converts as its documentation tells users to.
        expected = pair.reference(
            **{**TWO, "image": [p.convert("RGB") for p in image]},
            generator=generators(7), output_type="np",
        ).images  # fmt: skip
        actual = pair.ours(**{**TWO, "image": image}, generator=7, output_type="np").images
        assert np.abs(actual - expected).max() < 1e-4
    else:
        pair.check(**{**TWO, "image": image})


def test_latents_instead_of_a_picture(pairs):
    pair = pairs("StableDiffusionImg2ImgPipeline", "sd")
    latents = torch.randn((2, 4, 16, 16), generator=generators(5)) * 0.8
    pair.check(**{**TWO, "image": latents})


def test_a_path_is_a_picture(pairs, tmp_path):
    pair = pairs("StableDiffusionImg2ImgPipeline", "sd")
    picture(1).save(tmp_path / "a.png")
    call = {**TWO, "prompt": PROMPTS[0], "negative_prompt": None, "output_type": "np"}
    by_path = pair.ours(**{**call, "image": tmp_path / "a.png"}, generator=1).images
    np.testing.assert_array_equal(
        by_path, pair.ours(**{**call, "image": picture(1)}, generator=1).images
    )


@pytest.mark.parametrize("variation", ["a", slow("b"), slow("c")])
def test_latent_consistency_models_from_a_picture(pairs, variation):
    pair = pairs("LatentConsistencyModelImg2ImgPipeline", "lcm", variation)
    for strength in (0.8, 0.5):
        call = {"prompt": PROMPTS, "image": [picture(1), picture(2)], "strength": strength}
        pair.check(**call, num_inference_steps=4)
        pair.check(**call, num_inference_steps=6, original_inference_steps=40)


def test_an_image_is_the_argument_before_strength(pairs):
    """The order of arguments is diffusers', for callers who do not name them."""
    pair = pairs("StableDiffusionImg2ImgPipeline", "sd")
    assert isinstance(pair.ours, diffusax.StableDiffusionImg2ImgPipeline)
    expected = pair.reference(
        PROMPTS, TWO["image"], 0.6, 5, generator=generators(2), output_type="np"
    ).images
    actual = pair.ours(PROMPTS, TWO["image"], 0.6, 5, generator=2, output_type="np").images
    assert np.abs(actual - expected).max() < 1e-4
