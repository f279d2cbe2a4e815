"""The autoencoder recipe."""

import dataclasses

import diffusers
import jax
import numpy as np
import pytest
import torch
from support.tiny_transformers import klein_autoencoder

from diffusax.checkpoints import save_network
from diffusax.checkpoints.networks import read_network
from diffusax.models import AutoencoderKL, AutoencoderKLConfig
from diffusax.networks import initialize, load_network
from diffusax.training import (
    AutoencoderConfig,
    AutoencoderValidationConfig,
    ImageDataConfig,
    OptimizerConfig,
    autoencoder,
    train,
)

TINY = AutoencoderKLConfig(
    block_out_channels=(8, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    norm_num_groups=4,
)


@pytest.fixture(scope="module")
def config(tmp_path_factory, pictures):
    folder = tmp_path_factory.mktemp("autoencoder")
    save_network(initialize(AutoencoderKL, TINY), folder / "vae")
    return AutoencoderConfig(
        model=str(folder / "vae"),
        data=ImageDataConfig(str(pictures), resolution=16),
        output=str(folder / "out"),
        steps=30,
        batch_size=8,
        optimizer=OptimizerConfig(learning_rate=3e-3),
        compute_dtype="float32",
        validation=AutoencoderValidationConfig(every=30, images=2),
        report_to=(),
    )


@pytest.mark.slow
def test_learns_and_writes_a_network_that_diffusers_opens(config):
    recipe = autoencoder(config)
    state = train(recipe, config)
    keys = jax.vmap(jax.random.key)(np.arange(4))
    batch = {
        "pixel_values": np.stack(
            [
                recipe.example(recipe.source[i], np.random.default_rng(0))["pixel_values"]
                for i in range(4)
            ]
        )
    }
    before, after = (
        float(recipe.loss({"vae": params}, {}, batch, keys).mean())
        for params in (recipe.trained()["vae"], state.params["vae"])
    )
    assert after < 0.9 * before

    folder = f"{config.output}/model"
    theirs = diffusers.AutoencoderKL.from_pretrained(folder)
    x = torch.tensor(batch["pixel_values"]).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        posterior = theirs.encode(x).latent_dist
        latents = posterior.sample(torch.Generator().manual_seed(0)) * theirs.config.scaling_factor
    assert 0.7 < latents.std() < 1.3


def test_every_term_counts(config):
    recipe = autoencoder(dataclasses.replace(config, kl_weight=1e-2))
    keys = jax.vmap(jax.random.key)(np.arange(2))
    batch = {"pixel_values": np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), np.uint8)}
    total = recipe.loss(recipe.trained(), {}, batch, keys)
    for name in ("gradient_weight", "ssim_weight", "kl_weight"):
        other = autoencoder(dataclasses.replace(recipe.config, **{name: 0.0}))
        without = other.loss(recipe.trained(), {}, batch, keys)
        assert (without < total).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("quant_conv", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_decoder_alone_is_trained_and_the_latents_stay(config, tmp_path, quant_conv):
    network = dataclasses.replace(TINY, use_quant_conv=quant_conv)
    save_network(initialize(AutoencoderKL, network), tmp_path / "vae")
    once = dataclasses.replace(
        config, model=str(tmp_path / "vae"), output=str(tmp_path / "once"), steps=2
    )
    train(autoencoder(once), once)
    before = load_network(tmp_path / "once" / "model")
    assert before.config.scaling_factor != network.scaling_factor
    config = dataclasses.replace(
        config,
        model=str(tmp_path / "once" / "model"),
        output=str(tmp_path / "out"),
        decoder_only=True,
    )
    recipe = autoencoder(config)
    assert set(recipe.trained()["vae"]) == {"decoder", "post_quant_conv"}
    train(recipe, config)
    after = load_network(tmp_path / "out" / "model")
    assert after.config == before.config
    for name, part in before.params.items():
        pairs = zip(jax.tree.leaves(part), jax.tree.leaves(after.params[name]), strict=True)
        same = [np.array_equal(a, b) for a, b in pairs]
        assert all(same) if name in ("encoder", "quant_conv") else not any(same)
    with pytest.raises(ValueError, match="none to keep"):
        autoencoder(dataclasses.replace(config, from_scratch=True))


@pytest.mark.slow
def test_the_autoencoder_of_a_pipeline_is_found(checkpoint, config, tmp_path):
    config = dataclasses.replace(
        config,
        model=str(checkpoint),
        output=str(tmp_path),
        steps=1,
        data=dataclasses.replace(config.data, resolution=None),
    )
    recipe = autoencoder(config)
    assert recipe.network == read_network(checkpoint / "vae")
    train(recipe, config)
    trained = diffusers.AutoencoderKL.from_pretrained(tmp_path / "model")
    before = diffusers.AutoencoderKL.from_pretrained(checkpoint / "vae")
    assert not torch.equal(trained.decoder.conv_in.weight, before.decoder.conv_in.weight)


def test_patches_of_latents_are_measured_for_diffusers(tmp_path, pictures):
    klein_autoencoder().save_pretrained(tmp_path / "vae")
    data = ImageDataConfig(str(pictures), resolution=16, random_flip=False)
    config = AutoencoderConfig(model=str(tmp_path / "vae"), data=data, output=str(tmp_path / "out"))
    recipe = autoencoder(config)
    recipe.save(recipe.trained(), tmp_path / "saved")
    theirs = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path / "saved")
    rng = np.random.default_rng(0)
    rows = [recipe.example(row, rng)["pixel_values"] for row in recipe.source]
    x = torch.tensor(np.stack(rows)).permute(0, 3, 1, 2) / 127.5 - 1
    with torch.no_grad():
        found = theirs.encode(x).latent_dist
        mean, variance = map(
            diffusers.Flux2KleinPipeline._patchify_latents, (found.mean, found.std**2)
        )
    axes = (0, 2, 3)
    np.testing.assert_allclose(theirs.bn.running_mean, mean.mean(axes), atol=1e-4)
    spread = mean.var(axes, correction=0) + variance.mean(axes)
    np.testing.assert_allclose(theirs.bn.running_var, spread, rtol=1e-4)
