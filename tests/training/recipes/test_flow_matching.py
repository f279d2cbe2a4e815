"""Training with flow matching, and what its sampler makes of the result."""

import diffusers
import numpy as np
import pytest
from PIL import Image
from support.data_sets import png, write_parquet
from support.tiny import build_stable_diffusion
from support.toy_family import toy_pipeline

import diffusax
from diffusax.training import (
    CaptionedDataConfig,
    DenoiserValidationConfig,
    OptimizerConfig,
    TextToImageConfig,
    TimestepBiasConfig,
    text_to_image,
    train,
)

IMAGE = Image.new("RGB", (32, 32), (200, 40, 90))


@pytest.fixture
def one_image(tmp_path):
    """A data set that has nothing but one image."""
    cell = {"bytes": png(IMAGE), "path": None}
    return write_parquet(tmp_path / "data", [{"image": cell, "text": "a red apple"}] * 8)


def config(folder, data, output, **options):
    return TextToImageConfig(
        model=str(folder),
        data=CaptionedDataConfig(str(data), resolution=32),
        compute_dtype="float32",
        batch_size=8,
        steps=60,
        output=str(output),
        optimizer=OptimizerConfig(learning_rate=3e-3),
        **options,
    )


def errors(pipe):
    """How far the latents of samples are from those of the image, on average."""
    pixels = np.asarray(IMAGE, np.float32)[None] / 127.5 - 1
    kept = np.asarray(pipe.vae.run(pixels, method="encode")[0]) * pipe.vae.config.scaling_factor
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 8, "guidance_scale": 1.0, "output_type": "latent"}
    size = {"height": 32, "width": 32}
    drawn = pipe(["a red apple"] * 4, seed=0, **options, **size).images
    return np.abs(np.asarray(drawn).transpose(0, 2, 3, 1) - kept).mean()


@pytest.mark.slow
def test_a_unet_learns_with_flow_matching_what_its_sampler_draws(tmp_path, one_image):
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=2.0)
    build_stable_diffusion(tmp_path / "model", style="sd1", scheduler=scheduler)
    options = config(tmp_path / "model", one_image, tmp_path / "out")
    train(text_to_image(options), options)
    before, after = (
        errors(diffusax.DiffusionPipeline.from_pretrained(folder))
        for folder in (tmp_path / "model", tmp_path / "out" / "model")
    )
    assert after < 0.5 * before


def test_a_family_of_ones_own_is_trained(tmp_path, one_image):
    toy_pipeline().save_pretrained(tmp_path / "model")
    validation = DenoiserValidationConfig(every=60, prompts=("a red apple",), steps=4)
    options = config(tmp_path / "model", one_image, tmp_path / "out", validation=validation)
    train(text_to_image(options), options)
    result = diffusax.DiffusionPipeline.from_pretrained(tmp_path / "out" / "model")
    assert result.family.name == "Toy"
    assert errors(result) < 0.8 * errors(toy_pipeline())
    assert list((tmp_path / "out").rglob("*.png"))


def test_options_of_discrete_noise_levels_are_refused(tmp_path, one_image):
    toy_pipeline().save_pretrained(tmp_path / "model")
    given = {"timestep_bias": TimestepBiasConfig(strategy="later", multiplier=2.0)}
    for name, option in (*given.items(), ("snr_gamma", 5.0)):
        options = config(tmp_path / "model", one_image, tmp_path / "out", **{name: option})
        with pytest.raises(ValueError, match=f"^{name} .* flow matching has none; leave it out"):
            text_to_image(options)
