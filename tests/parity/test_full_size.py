"""Full-size networks with random weights against PyTorch, one forward each, in float32."""

import diffusers
import jax
import numpy as np
import pytest
import torch
import transformers
from full_size import SD1, SD2, VAE, VIT_H, VIT_L
from tiny import randomize

from diffusax.checkpoints import load_network

pytestmark = pytest.mark.full_size


def normal(*shape):
    return np.random.default_rng(0).standard_normal(shape, np.float32)


def load(model, folder):
    randomize(model).save_pretrained(folder)
    return load_network(folder)


def assert_close(actual, expected):
    actual, expected = np.asarray(actual), expected.detach().numpy()
    if expected.ndim == 4:
        expected = expected.transpose(0, 2, 3, 1)
    assert np.abs(actual - expected).max() <= 1e-4 * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize("config", [SD1, SD2])
def test_unet(tmp_path, config):
    unet = diffusers.UNet2DConditionModel(**config)
    network = load(unet, tmp_path)
    x, context = normal(2, 4, 64, 64), normal(2, 77, config["cross_attention_dim"])
    expected = unet(torch.tensor(x), torch.tensor(500), torch.tensor(context)).sample
    x = x.transpose(0, 2, 3, 1)
    assert_close(jax.jit(network.apply)(network.params, x, np.float32(500), context), expected)


@torch.no_grad()
@pytest.mark.parametrize("config", [VIT_L, VIT_H])
def test_text_encoder(tmp_path, config):
    encoder = transformers.CLIPTextModel(transformers.CLIPTextConfig(**config))
    network = load(encoder, tmp_path)
    ids = np.random.default_rng(0).integers(0, 49407, (2, 77)).astype(np.int32)
    ids[:, -1] = 49407
    expected = encoder(torch.tensor(ids)).last_hidden_state
    assert_close(jax.jit(network.apply)(network.params, ids).last_hidden_state, expected)


@torch.no_grad()
def test_autoencoder(tmp_path):
    vae = diffusers.AutoencoderKL(**VAE)
    network = load(vae, tmp_path)
    x, z = normal(1, 3, 256, 256), normal(1, 4, 64, 64)

    def run(method, value):
        apply = jax.jit(lambda params, v: network.apply(params, v, method=method))
        return apply(network.params, value.transpose(0, 2, 3, 1))

    assert_close(run("encode", x)[0], vae.encode(torch.tensor(x)).latent_dist.mean)
    assert_close(run("decode", z), vae.decode(torch.tensor(z)).sample)
