import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.effort import first
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.models import AsymmetricAutoencoderKL, AsymmetricAutoencoderKLConfig
from diffusax.networks import load_network

TINY = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "down_block_out_channels": (8, 16, 16),
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "up_block_out_channels": (8, 16, 32),
    "layers_per_up_block": 2,
    "norm_num_groups": 4,
}


def levels(down, up, **more):
    return {
        "down_block_types": ("DownEncoderBlock2D",) * len(down),
        "down_block_out_channels": down,
        "up_block_types": ("UpDecoderBlock2D",) * len(up),
        "up_block_out_channels": up,
        **more,
    }


# The published network's four levels, a fourth of its widths, doubled up to a limit.
PUBLISHED = levels((8, 16, 32, 32), (12, 24, 48, 48), layers_per_down_block=2)


def save(folder, **config):
    vae = randomize(diffusers.AsymmetricAutoencoderKL(**{**TINY, **config}))
    vae.save_pretrained(folder)
    return vae


def nhwc(x):
    return np.asarray(x).transpose(0, 2, 3, 1)


def uniform(*shape, seed=0):
    return np.random.default_rng(seed).uniform(-1, 1, size=shape).astype(np.float32)


def assert_close(actual, expected, tolerance=1e-5):
    expected = nhwc(expected.numpy())
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    "config",
    first(
        [
            {},
            PUBLISHED,
            # Both maps of the picture's size have one width here: the second counts.
            levels((8,), (16,), latent_channels=6),
        ]
    ),
    ids=["three", "four", "one"],
)
def test_encode_and_decode_equal_diffusers(tmp_path, config):
    vae = save(tmp_path, **config)
    network = load_network(tmp_path)
    factor = network.config.downsampling
    assert factor == 2 ** (len(vae.config.up_block_out_channels) - 1)
    height = max(2, 8 // factor)
    z = uniform(2, vae.config.latent_channels, height, height + 1)
    x = uniform(2, 3, height * factor, (height + 1) * factor)
    mask = (uniform(2, 1, *x.shape[2:], seed=1) > 0).astype(np.float32)
    mean, logvar = network.apply(network.params, nhwc(x), method="encode")
    posterior = vae.encode(torch.tensor(x)).latent_dist
    assert_close(mean, posterior.mean)
    assert_close(logvar, posterior.logvar)
    alone = network.run(nhwc(z), method="decode")
    assert_close(alone, vae.decode(torch.tensor(z)).sample)
    given = {"image": torch.tensor(x), "mask": torch.tensor(mask)}
    beside = network.run(nhwc(z), image=nhwc(x), mask=nhwc(mask), method="decode")
    assert_close(beside, vae.decode(torch.tensor(z), **given).sample)
    assert np.abs(beside - alone).max() > 0.1
    # One of the two alone is nothing, as upstream.
    np.testing.assert_array_equal(network.run(nhwc(z), image=nhwc(x), method="decode"), alone)


@pytest.mark.slow
@torch.no_grad()
def test_reconstruction_equals_diffusers(tmp_path):
    vae = save(tmp_path)
    network = load_network(tmp_path)
    x, mask = uniform(1, 3, 8, 12), np.float32(uniform(1, 1, 8, 12, seed=2) > 0)
    assert_close(network.run(nhwc(x)), vae(torch.tensor(x)).sample)
    assert_close(network.run(nhwc(x), nhwc(mask)), vae(torch.tensor(x), torch.tensor(mask)).sample)


@pytest.mark.slow
def test_network_runs_in_the_dtype_of_its_parameters(tmp_path):
    save(tmp_path)
    x, z, mask = uniform(1, 8, 12, 3), uniform(1, 2, 3, 4), np.ones((1, 8, 12, 1), np.float32)
    half, single = (load_network(tmp_path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    actual, expected = (model.run(z, x, mask, method="decode") for model in (half, single))
    assert actual.dtype == jnp.bfloat16
    error = np.abs(np.asarray(actual, np.float32) - expected).max()
    assert 1e-4 < error / np.abs(expected).max() < 0.05


def test_saved_autoencoder_is_the_same_file(tmp_path):
    vae = save(tmp_path / "in", scaling_factor=0.5, sample_size=64)
    save_network(AsymmetricAutoencoderKL.from_pretrained(tmp_path / "in"), tmp_path / "out")
    name = "diffusion_pytorch_model.safetensors"
    again = diffusers.AsymmetricAutoencoderKL.from_pretrained(tmp_path / "out")
    assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()
    written, read = ({k: c[k] for k in c if k[0] != "_"} for c in (again.config, vae.config))
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()} == {
        k: tuple(v) if isinstance(v, list) else v for k, v in read.items()
    }


def test_a_decoder_that_the_condition_does_not_fit(tmp_path):
    save(tmp_path, **levels((8, 8), (8, 32)))
    network = load_network(tmp_path)
    x, z, mask = uniform(1, 4, 8, 3), uniform(1, 2, 4, 4), np.ones((1, 4, 8, 1), np.float32)
    network.run(z, method="decode")
    with pytest.raises(
        ValueError, match=r"image and mask must give a map of shape \(1, 4, 8, 32\)"
    ):
        network.run(z, x, mask, method="decode")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"act_fn": "mish"}, "act_fn='mish'"),
        ({"down_block_types": ["DownEncoderBlock2D"] * 2}, "down_block_types must have one entry"),
        ({"up_block_out_channels": [32, 64]}, "up_block_types must have one entry per level"),
        (
            {"up_block_out_channels": [32, 64], "up_block_types": ["UpDecoderBlock2D"] * 2},
            "must have as many levels",
        ),
        ({"up_block_out_channels": [33]}, r"up_block_out_channels=\(33,\) must be divisible"),
    ],
)
def test_config_that_is_not_supported_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AsymmetricAutoencoderKLConfig, config)
