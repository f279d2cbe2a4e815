"""Qwen-Image 2.1's autoencoder against PyTorch's."""

import diffusers
import numpy as np
import pytest
import torch
from support.tiny_transformers import qwen_image21_autoencoder
from support.torch_params import assert_close, params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import AutoencoderKLQwenImage21, AutoencoderKLQwenImage21Config
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network

# Frames are copies of different channels where a level halves them.
MORE = {
    "decoder_base_dim": None,
    "num_res_blocks": 1,
    "temperal_downsample": [True, True, True],
}


@pytest.fixture(scope="module", params=[{}, MORE], ids=["as the real one", "other options"])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    network = qwen_image21_autoencoder(**request.param)
    network.save_pretrained(folder)
    return network, load_network(folder)


def normal(*shape):
    numbers = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    return torch.tensor(numbers)


def equal(actual, expected, tolerance=1e-5):
    assert_close(np.asarray(actual), np.asarray(expected), tolerance)


@torch.no_grad()
def test_encodes_and_decodes_as_diffusers_does(both):
    vae, model = both
    x, z = normal(2, 4, 1, 24, 40) / 2, normal(2, 6, 1, 3, 5)
    found, expected = model.encode(x).latent_dist, vae.encode(x).latent_dist
    equal(found.mode(), expected.mode())
    equal(found.logvar, expected.logvar)
    decoded = vae.decode(z).sample
    assert ((decoded > -1) & (decoded < 1)).float().mean() > 0.2
    equal(model.decode(z).sample, decoded)


@torch.no_grad()
def test_tiles_and_blending_are_those_of_diffusers():
    vae = qwen_image21_autoencoder(dim_mult=[1, 1, 1, 1])
    config = {k: v for k, v in vae.config.items() if not k.startswith("_")}
    network = Network(
        AutoencoderKLQwenImage21, config_from_dict(AutoencoderKLQwenImage21Config, config)
    )
    model = Model(network, params_of(network, vae))
    vae.enable_tiling()
    model.enable_tiling()
    z = normal(1, 6, 1, 33, 33)
    equal(model.decode(z).sample, vae.decode(z).sample, 3e-5)
    x = normal(1, 4, 1, 264, 264) / 2
    equal(model.encode(x).latent_dist.mean, vae.encode(x).latent_dist.mean)


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    vae, model = both
    half = Model(model.network, cast_params(model.params, "bfloat16"))
    rounded = type(vae)(**vae.config).to(torch.bfloat16)
    rounded.load_state_dict(vae.state_dict())
    z = normal(1, 6, 1, 12, 15)
    exact = vae.decode(z).sample
    theirs = (rounded.decode(z.to(torch.bfloat16)).sample.float() - exact).abs().mean()
    ours = np.abs(np.asarray(half.decode(z.numpy()).sample, np.float32) - exact.numpy()).mean()
    assert 0 < ours < 1.5 * theirs


@torch.no_grad()
def test_networks_go_back_to_diffusers_as_they_came(both, tmp_path):
    vae, model = both
    model.save_pretrained(tmp_path)
    state = diffusers.AutoencoderKLQwenImage21.from_pretrained(tmp_path).state_dict()
    assert state.keys() == vae.state_dict().keys()
    for name, tensor in vae.state_dict().items():
        np.testing.assert_array_equal(state[name], tensor)


def test_the_whole_has_the_tensors_and_options_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLQwenImage21()
    config = AutoencoderKLQwenImage21Config()
    shapes = torch_shapes(Network(AutoencoderKLQwenImage21, config).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    given = {k: v for k, v in theirs.config.items() if not k.startswith("_")}
    assert config_from_dict(AutoencoderKLQwenImage21Config, given) == config


def test_a_last_level_that_means_cannot_make_is_refused():
    with pytest.raises(ValueError, match="dim_mult must not have more channels on the last level"):
        AutoencoderKLQwenImage21Config(dim_mult=(1, 2, 2, 4, 8))
