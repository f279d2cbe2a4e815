"""A whole call as a pure function: the picture of the call itself, whatever it is given."""

import diffusers
import jax
import numpy as np
import pytest
from support.pairs import mask, picture
from support.tiny import (
    LATENT_STATISTICS,
    SMALLEST_UNET,
    SMALLEST_VAE,
    UNET,
    build_stable_diffusion,
    build_stable_diffusion_xl,
    randomize,
)

import diffusax
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.program import key, recorded_requests

CALL = {"num_inference_steps": 2, "seed": 0, "guidance_scale": 3.0}
PICTURES = {
    "image": picture(1, 16, 16),
    "mask_image": mask(1, 16, 16),
    "control_image": picture(11, 16, 16),
    "strength": 1.0,
}


def load(name, folder, **options):
    pipe = getattr(diffusax, name).from_pretrained(folder, **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def sd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "smallest"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    return load("StableDiffusionPipeline", folder)


@pytest.fixture(scope="module")
def xl(tmp_path_factory):
    """The autoencoder has latents_mean and latents_std, is float16, and asks for float32."""
    folder = tmp_path_factory.mktemp("xl") / "smallest"
    vae = {**SMALLEST_VAE, **LATENT_STATISTICS}
    build_stable_diffusion_xl(folder, unet=SMALLEST_UNET, vae=vae)
    left_out = ("sample_size", "up_block_types", "mid_block_type")
    config = {k: v for k, v in {**UNET["xl"], **SMALLEST_UNET}.items() if k not in left_out}
    control = diffusers.ControlNetModel(
        **config, mid_block_type="UNetMidBlock2D", conditioning_embedding_out_channels=(4,)
    )
    randomize(control).save_pretrained(folder / "controlnet")
    controlnet = diffusax.ControlNetModel.from_pretrained(folder / "controlnet")
    name = "StableDiffusionXLControlNetInpaintPipeline"
    return load(name, folder, controlnet=controlnet, vae_dtype="float16")


def test_sdxl_decodes_as_the_call_does(xl):
    """Beside a ControlNet inpainting leaves latents_mean out."""
    call = {**CALL, **PICTURES, "prompt": "a cat"}
    with recorded_requests() as made:
        expected = xl(**call, output_type="np").images
    found = ahead.requests(xl.parts, xl.task, ahead.example_call(xl, 1, None, call))
    assert {key(request) for request in found} == {key(request) for request in made}
    images = jax.jit(xl.generate_fn)(xl.params, xl.prepare_inputs(**call))
    np.testing.assert_allclose(images, expected, atol=2e-5)


@pytest.mark.slow
def test_embeddings_stand_for_prompts(sd):
    call = {**CALL, "num_images_per_prompt": 2}
    positive, negative = sd.encode_prompt("a cat", negative_prompt="a hat")
    expected = sd("a cat", negative_prompt="a hat", output_type="np", **call).images
    for given in (
        {"prompt_embeds": positive, "negative_prompt_embeds": np.asarray(negative)},
        {"prompt_embeds": positive, "negative_prompt": "a hat"},
        {"prompt": "a cat", "negative_prompt_embeds": negative},
    ):
        images = jax.jit(sd.generate_fn)(sd.params, sd.prepare_inputs(**given, **call))
        np.testing.assert_allclose(images, expected, atol=1e-5, err_msg=str(list(given)))


def test_pooled_embeddings_stand_for_prompts(xl):
    call = {**CALL, **PICTURES}
    embeds = xl.encode_prompt("a cat", negative_prompt="a hat")
    expected = xl(prompt="a cat", negative_prompt="a hat", output_type="np", **call).images
    names = ("prompt_embeds", "negative_prompt_embeds")
    names += tuple(f"{prefix}pooled_prompt_embeds" for prefix in ("", "negative_"))
    inputs = xl.prepare_inputs(**call, **dict(zip(names, embeds, strict=True)))
    images = jax.jit(xl.generate_fn)(xl.params, inputs)
    np.testing.assert_allclose(images, expected, atol=2e-5)


@pytest.mark.slow
def test_sigmas_are_learned_through_the_table_of_a_call(sd, monkeypatch):
    """With activations kept or computed again, the gradient is the slope of the call itself."""
    euler = diffusax.EulerDiscreteScheduler.from_config(sd.scheduler.config)
    monkeypatch.setattr(sd, "scheduler", euler)
    sigmas = np.array([10.0, 2.0, 0.5, 0.0], np.float32)
    inputs = sd.prepare_inputs("a cat", **{**CALL, "num_inference_steps": None}, sigmas=[*sigmas])

    def brightness(sigmas, rematerialize):
        # The initial latents stay, as those of this call.
        table = sd.scheduler.functional(None, inputs.plan.latents, sigmas=sigmas).table
        changed = inputs._replace(plan=inputs.plan._replace(table=table))
        return sd.generate_fn(sd.params, changed, rematerialize=rematerialize).mean()

    again, kept = (
        jax.jit(jax.grad(brightness), static_argnums=1)(sigmas, choice) for choice in (True, False)
    )
    np.testing.assert_allclose(again, kept, rtol=1e-4, atol=1e-7)
    images = sd.generate_fn(sd.params, inputs, rematerialize=False)
    np.testing.assert_allclose(brightness(sigmas, True), images.mean(), rtol=1e-5)
    # A small step: the network sees another time, in which it is far from straight.
    direction = sigmas * np.array([1, -1, 1, 0], np.float32)
    ends = (brightness(sigmas + step * direction, True) for step in (3e-4, -3e-4))
    slope = np.subtract(*ends) / 6e-4
    np.testing.assert_allclose(again @ direction, slope, rtol=0.02)
    assert abs(slope) > 1e-2


@pytest.mark.slow
def test_a_picture_has_a_gradient_to_embeddings(sd):
    positive, _ = sd.encode_prompt("a cat")
    inputs = sd.prepare_inputs(prompt_embeds=positive, **CALL)

    @jax.jit
    @jax.value_and_grad
    def brightness(embeds):
        changed = inputs._replace(embeds={**inputs.embeds, "prompt_embeds": embeds})
        return sd.generate_fn(sd.params, changed).mean()

    _, gradient = brightness(positive)
    direction = gradient / np.linalg.norm(gradient)
    above, below = (brightness(positive + step * direction)[0] for step in (0.1, -0.1))
    np.testing.assert_allclose((above - below) / 0.2, np.linalg.norm(gradient), rtol=0.05)
