"""A pipeline's scheduler stepped by hand: the latents of the call, which does not see the steps."""

import inspect

import jax
import numpy as np
import pytest
from support.effort import few
from support.tiny import SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax
from diffusax.samplers import SAMPLER_NAMES, fitting_samplers, scheduler_from_name

CALL = {"num_inference_steps": 5, "guidance_scale": 1.0, "num_images_per_prompt": 2, "seed": 3}
QUICK = ("ddim", "ddpm", "dpm++2m_sde", "dpm++_sde", "euler_a", "heun", "kdpm2_a", "lcm", "pndm")


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sd") / "smallest"
    build_stable_diffusion(folder, unet=SMALLEST_UNET, vae=SMALLEST_VAE)
    pipe = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture(scope="module")
def predict(pipe):
    context = np.repeat(pipe.encode_prompt("a cat")[0], 2, axis=0)
    apply = jax.jit(pipe.unet.network.apply)
    return lambda x, t: apply(pipe.unet.params, x, np.full(2, t, np.float32), context)


@pytest.mark.parametrize("name", few(SAMPLER_NAMES, *QUICK))
def test_a_loop_by_hand_gives_the_latents_of_the_call(pipe, predict, name):
    if name not in fitting_samplers(pipe.scheduler)[0]:
        pytest.skip("for networks of another process")
    scheduler = scheduler_from_name(name, pipe.scheduler)
    pipe.scheduler = scheduler
    expected = pipe("a cat", output_type="latent", **CALL).images
    latents = pipe.prepare_inputs("a cat", **CALL).plan.latents
    scheduler.set_timesteps(5)
    given = {"generator": jax.random.key(3), "eta": 0.0}
    taken = inspect.signature(scheduler.step).parameters
    given = {key: value for key, value in given.items() if key in taken}
    for t in scheduler.timesteps:
        output = predict(scheduler.scale_model_input(latents, t), t)
        latents = scheduler.step(output, t, latents, **given).prev_sample
    found = np.asarray(latents).transpose(0, 3, 1, 2)
    assert abs(found - expected).max() <= 1e-5 * abs(np.asarray(expected)).max()


def test_a_call_does_not_see_the_steps(pipe):
    pipe.scheduler = scheduler_from_name("heun", pipe.scheduler)
    before = pipe("a cat", output_type="latent", **CALL).images
    pipe.scheduler.set_timesteps(7)
    x = np.ones((1, 4, 8, 8), np.float32)
    pipe.scheduler.step(x, pipe.scheduler.timesteps[0], x)
    after = pipe("a cat", output_type="latent", **CALL).images
    np.testing.assert_array_equal(before, after)
    assert (pipe.scheduler.step_index, len(pipe.scheduler.timesteps)) == (1, 13)
