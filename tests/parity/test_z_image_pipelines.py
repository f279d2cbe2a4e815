"""Z-Image's pipelines against PyTorch's: every pixel, on the same weights and noise."""

import functools

import diffusers
import numpy as np
import pytest
import torch
from support.pairs import Pair, mask, picture
from support.tiny_transformers import Z_IMAGE_SIZE, z_image_pipeline

import diffusax

PROMPTS = ["a red apple", "an old house on a hill by the sea, and two dogs that run before it"]
"""The second is longer than 64 tokens with the chat around it."""
DYNAMIC = {"use_dynamic_shifting": True, "base_shift": 0.3, "max_shift": 1.5, "shift": 1.0}


@pytest.fixture(scope="module")
def pairs_of(tmp_path_factory):
    made = {}

    def pair(task="", **scheduler):
        key = tuple(scheduler.items())
        if key not in made:
            folder = tmp_path_factory.mktemp("z-image")
            made[key] = (
                z_image_pipeline(folder, **scheduler),
                diffusax.DiffusionPipeline.from_pretrained(folder),
            )
            made[key][1].set_progress_bar_config(disable=True)
        theirs, ours = made[key]
        if not task:
            return Pair(theirs, ours)
        name = f"ZImage{task}Pipeline"
        reference = getattr(diffusers, name)(**theirs.components)
        reference.set_progress_bar_config(disable=True)
        return Pair(reference, getattr(diffusax, name).from_pipe(ours))

    return pair


def embeds(*lengths, seed=0):
    """Hidden states of different lengths, as PyTorch's calls take them."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(n, 24, generator=generator) for n in lengths]


def test_text_to_image_of_prompts_of_different_lengths(pairs_of):
    pair = pairs_of()
    assert type(pair.ours) is diffusax.ZImagePipeline
    guided = pair.check(prompt=PROMPTS, negative_prompt=["blurry", ""], **Z_IMAGE_SIZE)
    plain = pair.check(prompt=PROMPTS, guidance_scale=0.0, **Z_IMAGE_SIZE)
    assert np.abs(guided - plain).max() > 0.05


@pytest.mark.parametrize(
    "call",
    [
        {"guidance_scale": 0.7, "cfg_normalization": True},
        {"guidance_scale": 4.0, "cfg_normalization": 0.9, "cfg_truncation": 0.2},
        {"sigmas": [1.0, 0.7, 0.2], "num_images_per_prompt": 2, "prompt": PROMPTS[1]},
    ],
)
def test_arguments_of_guidance_and_noise(pairs_of, call):
    pairs_of().check(**{"prompt": PROMPTS, **call}, **Z_IMAGE_SIZE)


def test_a_callback_turns_guidance_off(pairs_of):
    def after(pipe, step, timestep, tensors):
        pipe._guidance_scale = 3.0 if step == 0 else 0.0
        return tensors

    call = {"prompt": PROMPTS, "negative_prompt": ["blurry", ""], **Z_IMAGE_SIZE}
    changed = pairs_of().check(**call, callback_on_step_end=after)
    assert np.abs(changed - pairs_of().draw(**call)[1]).max() > 0.01


def test_a_callback_changes_prompts_and_masks(pairs_of):
    def shift(pipe, step, timestep, tensors):
        return {"prompt_embeds": [x + 1 for x in tensors["prompt_embeds"]]}

    def mask_nothing(pipe, step, timestep, tensors):
        assert tuple(tensors["mask"].shape) == (1, 1, 12, 20)
        return {"mask": 0 * tensors["mask"]}

    def inputs(name, after):
        return {"callback_on_step_end": after, "callback_on_step_end_tensor_inputs": [name]}

    call = {"prompt": PROMPTS, **Z_IMAGE_SIZE}
    changed = pairs_of().check(**call, **inputs("prompt_embeds", shift))
    assert np.abs(changed - pairs_of().draw(**call)[1]).max() > 0.01
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "prompt": PROMPTS[1]}
    pairs_of("Inpaint").check(**call, guidance_scale=0.0, **inputs("mask", mask_nothing))
    one = inputs("prompt_embeds", lambda *_: {"prompt_embeds": [np.ones(3)]})
    with pytest.raises(ValueError, match=r"must keep the shapes \[\(\d+, 24\)\]"):
        pairs_of().ours(PROMPTS[1], **one, **Z_IMAGE_SIZE)


def test_embeddings_of_different_lengths_and_shifts_that_depend_on_the_size(pairs_of):
    given = {"prompt_embeds": embeds(7, 40), "negative_prompt_embeds": embeds(70, 3, seed=1)}
    pairs_of(**DYNAMIC).check(**given, **Z_IMAGE_SIZE)


def test_guided_embeddings_without_negative_ones_are_refused(pairs_of):
    pair, given = pairs_of(), {"prompt_embeds": embeds(7), **Z_IMAGE_SIZE}
    for pipe in (pair.reference, pair.ours):
        with pytest.raises(ValueError, match=r"negative_prompt_embeds.* must"):
            pipe(**given)
    pair.check(**given, guidance_scale=0.0)


def test_steps_of_consistency_models(pairs_of, monkeypatch):
    pair, generator = pairs_of(), torch.Generator().manual_seed(7)
    with pair.scheduler("FlowMatchLCMScheduler"):
        # diffusers' pipeline leaves the noise of steps to PyTorch's global generator.
        step = functools.partial(pair.reference.scheduler.step, generator=generator)
        monkeypatch.setattr(pair.reference.scheduler, "step", step)
        call = {"prompt": PROMPTS[1], "guidance_scale": 0.0, "output_type": "np", **Z_IMAGE_SIZE}
        expected = pair.reference(generator=generator, num_inference_steps=4, **call).images
        found = pair.ours(generator=7, num_inference_steps=4, **call).images
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("strength", [0.6, pytest.param(0.9, marks=pytest.mark.slow)])
def test_image_to_image_equals_diffusers(pairs_of, strength):
    call = {"prompt": PROMPTS, "strength": strength, "seed": [3, 4], "num_inference_steps": 4}
    pairs_of("Img2Img").check(image=picture(1, 42, 26), guidance_scale=2.0, **call)


def test_inpainting_keeps_the_size_and_what_is_black(pairs_of):
    image, white = picture(1, 40, 24), mask(2, 40, 24)
    call = {"image": image, "mask_image": white, "prompt": PROMPTS[1], "guidance_scale": 2.0}
    pair = pairs_of("Inpaint")
    pair.check(**call)
    pair.check(**call, strength=0.6)


def test_inpainting_from_latents_puts_the_image_back_with_noise_of_its_own(pairs_of):
    call = {"image": picture(1, 40, 24), "mask_image": mask(2, 40, 24), "prompt": PROMPTS[0]}
    latents = torch.randn(1, 16, 12, 20, generator=torch.Generator().manual_seed(0))
    pairs_of("Inpaint").check(**call, latents=latents, guidance_scale=0.0)


def test_encode_prompt_returns_lists_without_padding(pairs_of):
    pair = pairs_of()
    expected = pair.reference.encode_prompt(list(PROMPTS), negative_prompt=["", "a hat"])
    actual = pair.ours.encode_prompt(PROMPTS, negative_prompt=["", "a hat"])
    for theirs, ours in zip(expected, actual, strict=True):
        assert [x.shape for x in ours] == [tuple(x.shape) for x in theirs]
        for x, y in zip(ours, theirs, strict=True):
            assert np.abs(np.asarray(x) - y.numpy()).max() < 1e-5 * y.abs().max()
    assert pair.ours.encode_prompt("a", do_classifier_free_guidance=False)[1] == []
