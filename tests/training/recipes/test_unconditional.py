"""The unconditional recipe: what it starts from, draws and writes."""

import dataclasses
import json
from pathlib import Path

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_unconditional import UNET, build_unconditional

import diffusax
from diffusax.models import UNet2DConfig
from diffusax.training import (
    CaptionedDataConfig,
    EMAConfig,
    ImageDataConfig,
    OptimizerConfig,
    TextToImageConfig,
    UnconditionalConfig,
    UnconditionalValidationConfig,
    text_to_image,
    train,
    unconditional,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The config of a UNet alone, as diffusers' tutorial makes one, without parameters."""
    folder = tmp_path_factory.mktemp("config")
    diffusers.UNet2DModel(**{**UNET, "sample_size": 8}).save_config(folder)
    return folder


@pytest.fixture(scope="module")
def config(folder, pictures, tmp_path_factory):
    return UnconditionalConfig(
        model=str(folder),
        from_scratch=True,
        data=ImageDataConfig(str(pictures), resolution=16),
        output=str(tmp_path_factory.mktemp("out")),
        steps=4,
        batch_size=4,
        compute_dtype="float32",
        optimizer=OptimizerConfig(learning_rate=1e-3),
        ema=EMAConfig(rule="warmup", power=3 / 4),
        validation=UnconditionalValidationConfig(every=4, images=2, steps=3),
        report_to=(),
        checkpoint_every=2,
    )


def keys(n):
    return jax.vmap(jax.random.key)(np.arange(n))


@pytest.mark.slow
def test_trains_from_a_config_and_writes_pipelines_that_diffusers_opens(config):
    recipe = unconditional(config)
    state = train(recipe, config)
    assert int(state.step) == 4
    for name in ("model", "model_ema"):
        folder = f"{config.output}/{name}"
        theirs = diffusers.DDPMPipeline.from_pretrained(folder)
        assert theirs.unet.config.sample_size == 16
        ours = diffusax.DDPMPipeline.from_pretrained(folder)
        for pipe in (theirs, ours):
            pipe.set_progress_bar_config(disable=True)
        call = {"num_inference_steps": 2, "output_type": "np"}
        generator = torch.Generator().manual_seed(0)
        expected = theirs(**call, generator=generator).images
        np.testing.assert_allclose(ours(**call, generator=0).images, expected, atol=1e-4)
    card = Path(config.output, "model", "README.md").read_text()
    assert "pipeline_tag: unconditional-image-generation" in card
    assert "pipe().images[0]" in card


@pytest.mark.slow
def test_a_run_that_is_continued_gives_the_same_parameters(config, tmp_path):
    whole = dataclasses.replace(config, output=str(tmp_path / "whole"))
    state = train(unconditional(whole), whole)
    parts = dataclasses.replace(config, output=str(tmp_path / "parts"))
    first = dataclasses.replace(parts, steps=2)
    train(unconditional(first), first)
    again = train(unconditional(parts), parts)
    jax.tree.map(np.testing.assert_array_equal, again.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, again.ema.params, state.ema.params)


def test_a_new_model_has_the_network_of_the_script(pictures):
    config = UnconditionalConfig(data=ImageDataConfig(str(pictures)), prediction_type="sample")
    recipe = unconditional(config)
    theirs = diffusers.UNet2DModel(
        sample_size=64,
        layers_per_block=2,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=(*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
    )
    count = sum(x.size for x in jax.tree.leaves(recipe.shapes()))
    assert count == sum(p.numel() for p in theirs.parameters())
    assert recipe.size == 64
    assert recipe.start.scheduler == diffusax.DDPMScheduler(prediction_type="sample")
    assert recipe.denoising.snr_gamma == float("inf")
    row = recipe.source[0]
    assert recipe.example(row, np.random.default_rng(0))["pixel_values"].shape == (64, 64, 3)
    assert recipe.card() == {"pipeline_tag": "unconditional-image-generation"}


def test_a_checkpoint_is_trained_further(pictures, tmp_path):
    folder = build_unconditional(tmp_path, "large")
    config = UnconditionalConfig(model=str(folder), data=ImageDataConfig(str(pictures)))
    recipe = unconditional(config)
    assert recipe.size == UNET["sample_size"]
    assert recipe.start.scheduler.variance_type == "fixed_large"
    before = diffusax.DDPMPipeline.from_pretrained(folder).params["unet"]
    jax.tree.map(np.testing.assert_array_equal, recipe.trained()["unet"], before)
    changes = {"num_train_timesteps": 500, "beta_schedule": "squaredcos_cap_v2"}
    changed = unconditional(dataclasses.replace(config, from_scratch=True, **changes))
    assert changed.start.scheduler.num_train_timesteps == 500
    assert changed.start.scheduler.beta_schedule == "squaredcos_cap_v2"
    kernel = changed.trained()["unet"]["conv_in"]["kernel"]
    assert not np.array_equal(kernel, before["conv_in"]["kernel"])


def test_what_cannot_be_trained(folder, config, checkpoint, pictures, tmp_path):
    data = ImageDataConfig(str(pictures))
    cases = [
        ({"data": ImageDataConfig()}, "--data.path must be given"),
        ({"model": str(checkpoint)}, "Stable Diffusion, which generates from prompts"),
        ({"model": str(checkpoint / "unet")}, "trains a UNet2DModel; .* a UNet2DConditionModel"),
        ({"data": dataclasses.replace(data, resolution=17)}, "divisible by 2.*; use 16 or 18"),
        ({"data": ImageDataConfig(str(pictures), image_column="x")}, "has no column 'x'"),
        ({"validation": UnconditionalValidationConfig(every=1, steps=1000),
          "num_train_timesteps": 10}, "num_train_timesteps=10"),
    ]  # fmt: skip
    for changes, message in cases:
        with pytest.raises(ValueError, match=message):
            unconditional(dataclasses.replace(config, **changes))
    for change, message in (
        ({"num_class_embeds": 3}, "networks without classes"),
        ({"in_channels": 1}, "in_channels=3 and out_channels=3"),
        ({"time_embedding_type": "fourier"}, "discrete timesteps"),
        ({"sample_size": None}, "data.resolution must be given"),
    ):
        other = {**json.loads((folder / "config.json").read_text()), **change}
        (tmp_path / "config.json").write_text(json.dumps(other))
        given = dataclasses.replace(config, model=str(tmp_path), data=data)
        with pytest.raises(ValueError, match=message):
            unconditional(given)
    captioned = CaptionedDataConfig(str(pictures))
    with pytest.raises(ValueError, match="reads no texts; use `diffusax train unconditional`"):
        text_to_image(
            TextToImageConfig(model=str(build_unconditional(tmp_path / "m")), data=captioned)
        )


def test_the_loss_is_that_of_its_own_random_numbers(config):
    recipe = unconditional(config)
    assert isinstance(recipe.network.config, UNet2DConfig)
    rng = np.random.default_rng(0)
    batch = {"pixel_values": rng.integers(0, 256, (3, 16, 16, 3), np.uint8)}
    trained, frozen = recipe.trained(), recipe.frozen()
    draws = recipe.denoising.draw(batch, keys(3))
    expected = recipe.denoising.with_draws(trained, frozen, batch, draws)
    np.testing.assert_allclose(recipe.loss(trained, frozen, batch, keys(3)), expected, rtol=1e-5)
    # A new network predicts zero.
    np.testing.assert_allclose(expected, (np.asarray(draws.noise) ** 2).mean((1, 2, 3)), rtol=1e-5)
