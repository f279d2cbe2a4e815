"""Text to image with Stable Diffusion 1.x, 2.x and latent consistency models against diffusers."""

import json
import shutil

import diffusers
import numpy as np
import pytest
import torch
from support.effort import few
from support.pairs import NEGATIVES, PROMPTS, Pair, generators, picture, slow

import diffusax

TWO = {"prompt": PROMPTS, "negative_prompt": NEGATIVES}
OPTIONS = {
    "as-is": TWO,
    "no-negative": {"prompt": PROMPTS},
    "two-images-per-prompt": {"prompt": PROMPTS[0], "num_images_per_prompt": 2},
    "a-generator-per-image": {**TWO, "seed": [3, 2**40 + 1]},
    "strong-guidance": {**TWO, "guidance_scale": 12.5},
    "no-guidance": {**TWO, "guidance_scale": 1.0},
    "rescaled-guidance": {**TWO, "guidance_rescale": 0.7},
    "clip-skip": {**TWO, "clip_skip": 1},
    "stochastic-ddim": {**TWO, "sampler": "ddim", "eta": 0.7},
    "latents-out": {**TWO, "output_type": "latent"},
    "one-step": {**TWO, "num_inference_steps": 1, "sampler": "euler"},
    "many-steps": {**TWO, "num_inference_steps": 12},
    "own-timesteps": {**TWO, "sampler": "euler", "timesteps": [900, 500, 120]},
    "own-sigmas": {**TWO, "sampler": "euler", "sigmas": [12.0, 3.0, 0.5]},
}
# The first variation runs every option; the others those that touch their networks or levels.
CASES = [("a", name) for name in OPTIONS] + [
    (variation, name)
    for variation in "bc"
    for name in (
        "as-is",
        "rescaled-guidance",
        "clip-skip",
        "a-generator-per-image",
        "own-timesteps",
    )
]


KEPT = ("as-is", "a-generator-per-image", "no-guidance", "rescaled-guidance", "clip-skip")
KEPT = [("a", name) for name in (*KEPT, "stochastic-ddim", "own-sigmas")]


@pytest.mark.parametrize(("variation", "option"), few(CASES, ("b", "as-is"), *KEPT))
def test_text_to_image_equals_diffusers(pairs, variation, option):
    pair = pairs("StableDiffusionPipeline", "sd", variation)
    pair.check(**OPTIONS[option])


@pytest.mark.parametrize("sampler", ["pndm", "dpm++2m-karras", "unipc", "heun", "euler-ancestral"])
@pytest.mark.parametrize("variation", ["a", slow("b")])
def test_every_sampler_equals_diffusers(pairs, sampler, variation):
    pair = pairs("StableDiffusionPipeline", "sd", variation)
    pair.check(**TWO, sampler=sampler, num_inference_steps=6)


@pytest.mark.parametrize(
    ("forwards", "backwards"),
    [
        ("DDIMScheduler", "DDIMInverseScheduler"),
        pytest.param(
            "DPMSolverMultistepScheduler",
            "DPMSolverMultistepInverseScheduler",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_call_with_an_inverse_sampler_equals_diffusers(pairs, forwards, backwards):
    """From an image's latents to noise, as diffusers' pipelines do with such a scheduler."""
    pair = pairs("StableDiffusionPipeline", "sd", "a")
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(1))
    call = {**TWO, "latents": latents, "output_type": "latent", "guidance_scale": 1.5}
    with pair.scheduler(forwards), pair.scheduler(backwards):
        noise = pair.check(**call, num_inference_steps=8, tolerance=5e-4)
    assert np.abs(noise - latents.numpy()).max() > 0.1


@pytest.mark.slow
def test_sa_solver_takes_the_noise_of_each_step_where_diffusers_does(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    pair.check(**TWO, sampler="sa-solver", num_inference_steps=6)
    image_to_image = pairs("StableDiffusionImg2ImgPipeline", "sd")
    call = {"image": picture(3), "strength": 0.6, "num_inference_steps": 6}
    image_to_image.check(**TWO, **call, sampler="sa-solver")


def test_given_latents_equal_diffusers(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    latents = torch.randn((2, 4, 16, 16), generator=generators(1))
    pair.check(**TWO, latents=latents)
    from_torch = pair.ours(**TWO, latents=latents, num_inference_steps=4, output_type="np")[0]
    from_numpy = pair.ours(**TWO, latents=latents.numpy(), num_inference_steps=4, output_type="np")
    np.testing.assert_array_equal(from_torch, from_numpy.images)


def test_another_size_equals_diffusers(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    assert pair.check(**TWO, height=48, width=80).shape == (2, 48, 80, 3)


def test_embeddings_of_encode_prompt(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    theirs = pair.reference.encode_prompt(PROMPTS, "cpu", 1, True, NEGATIVES)
    ours = pair.ours.encode_prompt(PROMPTS, "cpu", 1, True, NEGATIVES)
    for expected, actual in zip(theirs, ours, strict=True):
        np.testing.assert_allclose(actual, expected, atol=1e-5)
    pair.check(prompt_embeds=theirs[0], negative_prompt_embeds=theirs[1])
    pair.check(prompt_embeds=theirs[0], num_images_per_prompt=1, negative_prompt=NEGATIVES)
    images = pair.ours(
        prompt_embeds=ours[0], negative_prompt_embeds=ours[1], generator=7, output_type="np",
        num_inference_steps=4,
    ).images  # fmt: skip
    np.testing.assert_allclose(images, pair.draw(**TWO)[1], atol=1e-5)


def test_an_integer_seeds_as_a_torch_generator_does(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    call = {**TWO, "num_inference_steps": 4, "output_type": "np"}
    np.testing.assert_array_equal(pair.ours(**call, generator=7).images, pair.draw(**TWO)[1])
    listed = pair.ours(**call, generator=[3, 4]).images
    np.testing.assert_array_equal(listed, pair.draw(**TWO, seed=[3, 4])[1])


def test_outputs_as_pil_tuple_and_torch(pairs):
    pair = pairs("StableDiffusionPipeline", "sd")
    call = {**TWO, "num_inference_steps": 4}
    expected = pair.reference(**call, generator=generators(7), return_dict=False)
    actual = pair.ours(**call, generator=generators(7), return_dict=False)
    assert isinstance(actual, tuple)
    assert len(actual) == len(expected)
    for theirs, ours in zip(expected[0], actual[0], strict=True):
        assert ours.mode == theirs.mode
        assert np.abs(np.asarray(ours, int) - np.asarray(theirs, int)).max() <= 1
    assert actual[1] is None is expected[1]


def test_an_outdated_scheduler_config_is_mended_as_diffusers_does(tiny_checkpoints, tmp_path):
    source, _ = tiny_checkpoints.pipeline("sd", "a")
    folder = tmp_path / "outdated"
    shutil.copytree(source, folder)
    scheduler = diffusers.DDIMScheduler(steps_offset=0, clip_sample=True, beta_end=0.012)
    scheduler.save_pretrained(folder / "scheduler")
    index = json.loads((folder / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    (folder / "model_index.json").write_text(json.dumps(index))
    reference = diffusers.StableDiffusionPipeline.from_pretrained(folder, safety_checker=None)
    reference.set_progress_bar_config(disable=True)
    Pair(reference, diffusax.StableDiffusionPipeline.from_pretrained(folder)).check(**TWO)


LCM = {"prompt": PROMPTS, "guidance_scale": 8.5}
LCM_OPTIONS = {
    "as-is": LCM,
    "weak-guidance": {**LCM, "guidance_scale": 1.5},
    "eight-steps": {**LCM, "num_inference_steps": 8},
    "original-steps": {**LCM, "original_inference_steps": 30},
    "two-images-per-prompt": {**LCM, "prompt": PROMPTS[1], "num_images_per_prompt": 2},
    "own-timesteps": {**LCM, "timesteps": [979, 659, 199]},
    "clip-skip": {**LCM, "clip_skip": 1},
}


@pytest.mark.parametrize(
    ("variation", "option"),
    few(
        [("a", name) for name in LCM_OPTIONS]
        + [("b", "as-is"), ("b", "eight-steps"), ("c", "as-is")],
        ("a", "as-is"),
        ("a", "original-steps"),
    ),
)
def test_latent_consistency_equals_diffusers(pairs, variation, option):
    pairs("LatentConsistencyModelPipeline", "lcm", variation).check(**LCM_OPTIONS[option])


@pytest.mark.slow
def test_an_ordinary_checkpoint_with_the_consistency_sampler(pairs):
    """LCM-LoRA's way: a merged checkpoint, LCMScheduler, little or no guidance."""
    pair = pairs("StableDiffusionPipeline", "sd", "c")
    pair.check(**TWO, sampler="lcm", guidance_scale=1.5)
