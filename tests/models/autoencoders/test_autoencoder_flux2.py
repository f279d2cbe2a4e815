"""FLUX.2's autoencoder and the normalisation of its latents against PyTorch's."""

import diffusers
import numpy as np
import pytest
import torch
from support.tiny_transformers import klein_autoencoder

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import AutoencoderKLFlux2, AutoencoderKLFlux2Config
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Network
from diffusax.networks import load_network
from diffusax.pipelines.run import autoencoding

WIDER = {"decoder_block_out_channels": (8, 16), "block_out_channels": (8, 8)}


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    network = klein_autoencoder(**WIDER)
    network.save_pretrained(folder)
    return network, load_network(folder)


def images(*shape):
    return np.random.default_rng(0).uniform(-1, 1, size=shape).astype(np.float32)


def first(x):
    """b h w c -> b c h w."""
    return np.asarray(x).transpose(0, 3, 1, 2)


def assert_close(actual, expected):
    expected = expected.detach().numpy()
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-5 * np.abs(expected).max()


@torch.no_grad()
def test_latents_are_patches_normalised_by_the_statistics_and_decode_again(both):
    vae, model = both
    x = images(2, 12, 20, 3)
    posterior = vae.encode(torch.tensor(first(x))).latent_dist
    pipe = diffusers.Flux2KleinPipeline
    patches = pipe._patchify_latents(posterior.mode())
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    std = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    expected = (patches - mean) / std
    latents = autoencoding.encode_image(model.network, model.params, x, None)
    assert_close(first(latents), expected)
    assert latents.shape[1:] == LatentFormat.of(model.config).shape(12, 20)

    decoded = vae.decode(pipe._unpatchify_latents(expected * std + mean)).sample
    ours = autoencoding.decode_pixels(
        model.network, model.params, latents, upcast=False, normalize=False
    )
    assert_close(first(ours), decoded)


@torch.no_grad()
def test_called_as_in_diffusers(both):
    vae, model = both
    x = torch.tensor(first(images(1, 12, 20, 3)))
    found = model.encode(x).latent_dist
    expected = vae.encode(x).latent_dist
    assert_close(found.mean.numpy(), expected.mean)
    assert_close(model.decode(expected.mean).sample.numpy(), vae.decode(expected.mean).sample)


@torch.no_grad()
def test_saved_and_read_by_diffusers(both, tmp_path):
    vae, model = both
    save_network(model, tmp_path)
    again = diffusers.AutoencoderKLFlux2.from_pretrained(tmp_path)
    for name, tensor in vae.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], tensor)
    x = torch.tensor(first(images(1, 12, 20, 3)))
    np.testing.assert_array_equal(again(x).sample, vae(x).sample)
    assert again.config.decoder_block_out_channels == [8, 16]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_size": [4, 4]}, "patch_size"),
        ({"block_out_channels": [32, 33, 32, 32]}, "must be divisible by norm_num_groups"),
        ({"decoder_block_out_channels": [32]}, "one entry per level of block_out_channels"),
        ({"down_block_types": ["DownEncoderBlock2D"]}, "down_block_types must have one entry"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AutoencoderKLFlux2Config, changes)


def test_options_that_published_checkpoints_have_are_read():
    more = {"force_upcast": True, "batch_norm_momentum": 0.1, "patch_size": [2, 2]}
    assert config_from_dict(AutoencoderKLFlux2Config, more) == AutoencoderKLFlux2Config()


def test_the_whole_has_the_tensors_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLFlux2()
    shapes = torch_shapes(Network(AutoencoderKLFlux2, AutoencoderKLFlux2Config()).shapes)
    expected = {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    del expected["bn.num_batches_tracked"]
    assert shapes == expected
