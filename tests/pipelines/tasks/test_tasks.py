"""What tasks make of a call, without drawing."""

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.pairs import mask
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax
from diffusax.pipelines.plan.arguments import check_call

SIDE = 16


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Latents have 16 channels, and are 16 high and wide."""
    folder = tmp_path_factory.mktemp("sd") / "sixteen"
    unet = {**SMALLEST_UNET, "in_channels": SIDE, "out_channels": SIDE}
    vae = {**SMALLEST_VAE, "latent_channels": SIDE}
    build_stable_diffusion(folder, unet=unet, vae=vae)
    return folder


def plan(pipe, **call):
    return pipe.task(pipe.parts, check_call({"prompt": "", "seed": 0, **call})).plan


def test_latents_of_any_channels_stand_for_a_picture(checkpoint):
    latents = np.random.default_rng(0).normal(size=(1, SIDE, SIDE, SIDE)).astype(np.float32)
    pipe = diffusax.StableDiffusionImg2ImgPipeline.from_pretrained(checkpoint)
    noise = plan(pipe, image=0 * latents).latents
    schedule = pipe.task(pipe.parts, check_call({"prompt": "", "image": latents})).schedule
    expected = noise + schedule.levels[0, 0] * latents.transpose(0, 2, 3, 1)
    for image in (latents, torch.tensor(latents), jnp.asarray(latents)):
        np.testing.assert_allclose(plan(pipe, image=image).latents, expected, atol=1e-5)

    pipe = diffusax.StableDiffusionInpaintPipeline.from_pretrained(checkpoint)
    made = plan(pipe, image=latents, mask_image=mask(1, SIDE, SIDE), height=SIDE, width=SIDE)
    np.testing.assert_array_equal(made.inpainting.latents, latents.transpose(0, 2, 3, 1))


def test_embeddings_of_no_guidance_are_named_in_a_warning(checkpoint, caplog):
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    found = pipe.encode_prompt("a cat", "cpu", 1, True, "blurry")
    given = dict(zip(("prompt_embeds", "negative_prompt_embeds"), found))
    pipe(**given, guidance_scale=1.0, num_inference_steps=1, output_type="latent")
    assert "negative_prompt_embeds changes nothing in this call" in caplog.text
