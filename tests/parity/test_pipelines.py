"""Pictures of tiny random checkpoints against PyTorch diffusers', from the same latents."""

import diffusers
import numpy as np
import pytest
import torch
from support.effort import few
from support.tiny import build_stable_diffusion

import diffusax
from diffusax import samplers

PROMPTS = ["a red apple, on a table", "Two DOGS running!"]
NEGATIVES = ["blurry", ""]
FOUR_LEVEL_VAE = {
    "block_out_channels": (8, 16, 16, 24),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
V = {"prediction_type": "v_prediction", "beta_schedule": "scaled_linear"}

# style, networks' overrides, scheduler, sampler at run time, height, width, guidance
CHECKPOINTS = {
    "sd1-pndm": ("sd1", {}, None, None, 64, 64, 7.5),
    "sd1-four-level-vae": ("sd1", {"vae": FOUR_LEVEL_VAE}, None, "euler", 136, 88, 5.0),
    "sd1-odd-widths": (
        "sd1",
        {"unet": {"block_out_channels": (24, 40), "layers_per_block": 2}},
        None,
        "dpm++2m_karras",
        52,
        76,
        1.0,
    ),
    "sd2-v-ddim": (
        "sd2",
        {},
        diffusers.DDIMScheduler(**V, clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        None,
        64,
        96,
        9.0,
    ),
    "sd2-unipc": ("sd2", {"vae": FOUR_LEVEL_VAE}, None, "unipc", 64, 128, 7.5),
    "sd2-deep-transformer": (
        "sd2",
        {
            "unet": {"transformer_layers_per_block": 2, "only_cross_attention": (True, False)},
            "text": {"num_hidden_layers": 4, "hidden_act": "gelu"},
        },
        None,
        "heun",
        60,
        68,
        3.0,
    ),
    "sd1-lms": ("sd1", {"vae": {"layers_per_block": 2}}, None, "lms", 96, 32, 7.5),
}


@pytest.mark.parametrize("name", few(CHECKPOINTS, "sd2-deep-transformer"))
def test_pictures_equal_diffusers(tmp_path, name):
    style, networks, scheduler, sampler, height, width, guidance = CHECKPOINTS[name]
    folder = tmp_path / "model"
    reference = build_stable_diffusion(folder, style=style, scheduler=scheduler, **networks)
    pipe = diffusax.DiffusionPipeline.from_pretrained(folder)
    if sampler is not None:
        pipe.scheduler = samplers.scheduler_from_name(sampler, pipe.scheduler)
        upstream = getattr(diffusers, pipe.scheduler.class_name)
        reference.scheduler = upstream.from_config(pipe.scheduler.to_config())
    factor = pipe.vae.config.downsampling
    shape = (2, 4, height // factor, width // factor)
    latents = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    call = {
        "prompt": PROMPTS,
        "negative_prompt": NEGATIVES,
        "num_inference_steps": 6,
        "guidance_scale": guidance,
        "height": height,
        "width": width,
        "output_type": "np",
    }
    if factor < 8:
        # diffusers wants multiples of eight whatever the autoencoder's factor is.
        reference.check_inputs = lambda *_, **__: None
    expected = reference(**call, latents=torch.tensor(latents)).images
    actual = pipe(**call, latents=latents).images
    assert actual.std() > 0.05
    assert np.abs(actual - expected).max() < 1e-3
