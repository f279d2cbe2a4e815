import diffusers
import numpy as np
import pytest
import torch
from support.effort import first
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.models import AutoencoderTinyConfig
from diffusax.networks import load_network

TINY = {
    "encoder_block_out_channels": (16, 16),
    "decoder_block_out_channels": (16, 16),
    "num_encoder_blocks": (1, 1),
    "num_decoder_blocks": (2, 1),
}
THREE_LEVELS = {
    "encoder_block_out_channels": (8, 8, 8),
    "decoder_block_out_channels": (16, 16, 16),
    "num_encoder_blocks": (1, 2, 1),
    "num_decoder_blocks": (1, 2, 1),
}


def save(folder, **config):
    vae = randomize(diffusers.AutoencoderTiny(**{**TINY, **config}))
    vae.save_pretrained(folder)
    return vae


def uniform(*shape):
    return np.random.default_rng(0).uniform(-1, 1, size=shape).astype(np.float32)


def nhwc(x):
    return x.transpose(0, 2, 3, 1)


def assert_close(actual, expected, tolerance=1e-5):
    expected = nhwc(expected.numpy())
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    first(
        [
            {},
            {"latent_channels": 6, "num_encoder_blocks": (1, 2)},
            THREE_LEVELS,
            {"upsampling_scaling_factor": 3},
        ],
        2,
    ),
)
def test_encode_and_decode_equal_diffusers(tmp_path, config):
    vae = save(tmp_path, **config)
    network = load_network(tmp_path)
    # Odd maps on the way down; latents large enough for the tanh that bounds them.
    x, z = uniform(2, 3, 11, 6), 6 * uniform(2, vae.config.latent_channels, 5, 3)
    encoded = network.apply(network.params, nhwc(x), method="encode")
    assert_close(encoded, vae.encode(torch.tensor(x)).latents)
    decoded = network.apply(network.params, nhwc(z), method="decode")
    assert_close(decoded, vae.decode(torch.tensor(z)).sample)
    assert decoded.shape[1] == 5 * network.config.downsampling


@torch.no_grad()
@pytest.mark.parametrize("config", [{}, {"latent_magnitude": 0.5, "latent_shift": 0.25}])
def test_reconstruction_goes_through_bytes_as_in_diffusers(tmp_path, config):
    vae = save(tmp_path, **config)
    network = load_network(tmp_path)
    x = uniform(2, 3, 8, 6)
    actual = network.apply(network.params, nhwc(x))
    assert_close(actual, vae(torch.tensor(x)).sample)


@torch.no_grad()
@pytest.mark.parametrize("config", [{}, {"latent_magnitude": 2, "latent_shift": 0.25}])
def test_scaling_of_latents_equals_diffusers(tmp_path, config):
    vae = save(tmp_path, **config)
    network = load_network(tmp_path)
    z = 6 * uniform(1, 4, 5, 3)
    for method in ("scale_latents", "unscale_latents"):
        expected = getattr(vae, method)(torch.tensor(z))
        assert_close(network.apply(network.params, nhwc(z), method=method), expected)


def test_saved_autoencoder_opens_in_diffusers(tmp_path):
    vae = save(tmp_path / "in", **THREE_LEVELS)
    save_network(load_network(tmp_path / "in"), tmp_path / "out")
    again = diffusers.AutoencoderTiny.from_pretrained(tmp_path / "out").state_dict()
    assert again.keys() == vae.state_dict().keys()
    for key, value in vae.state_dict().items():
        assert torch.equal(again[key], value), key


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"act_fn": "gelu"}, "act_fn='gelu'"),
        ({"upsample_fn": "bilinear"}, "upsample_fn='bilinear'"),
        ({"num_encoder_blocks": [1, 3]}, "num_encoder_blocks must have one entry per level"),
        ({"num_decoder_blocks": [1]}, "num_decoder_blocks must have one entry per level"),
        (
            {"decoder_block_out_channels": [64, 64, 32, 32]},
            "decoder_block_out_channels must all be equal",
        ),
    ],
)
def test_config_that_is_not_supported_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AutoencoderTinyConfig, config)
