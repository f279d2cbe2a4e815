import diffusers
import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import randomize

from diffusax.checkpoints import load_network
from diffusax.config import config_from_dict
from diffusax.models import AutoencoderKLConfig
from diffusax.models.tiling import tiled_decode, tiled_encode


def kl(folder, levels, **config):
    vae = randomize(
        diffusers.AutoencoderKL(
            block_out_channels=(16, 32, 16, 32)[:levels],
            down_block_types=("DownEncoderBlock2D",) * levels,
            up_block_types=("UpDecoderBlock2D",) * levels,
            norm_num_groups=8,
            **config,
        )
    )
    vae.save_pretrained(folder)
    return vae


def nhwc(x):
    return x.transpose(0, 2, 3, 1)


def images(*shape):
    return np.random.default_rng(0).uniform(-1, 1, size=shape).astype(np.float32)


def assert_close(actual, expected, tolerance=1e-5):
    expected = nhwc(expected.detach().numpy())
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@pytest.mark.parametrize(
    ("levels", "config"),
    [
        (1, {}),
        (2, {"layers_per_block": 2, "latent_channels": 6}),
        (3, {"use_quant_conv": False, "use_post_quant_conv": False}),
        (4, {"mid_block_add_attention": False}),
    ],
)
def test_encode_and_decode_equal_diffusers(tmp_path, levels, config):
    vae = kl(tmp_path, levels, **config)
    network = load_network(tmp_path)
    factor = network.config.downsampling
    x, z = images(2, 3, 5 * factor, 3 * factor), images(2, vae.config.latent_channels, 5, 3)
    with torch.no_grad():
        posterior = vae.encode(torch.tensor(x)).latent_dist
        decoded = vae.decode(torch.tensor(z)).sample
    mean, logvar = network.apply(network.params, nhwc(x), method="encode")
    assert_close(mean, posterior.mean)
    assert_close(logvar, posterior.logvar)
    assert_close(network.apply(network.params, nhwc(z), method="decode"), decoded)


@pytest.mark.parametrize("convolutions", [False, True])
def test_attention_names_of_old_checkpoints_are_read(tmp_path, convolutions):
    vae = kl(tmp_path, 2)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {}
    for name, tensor in load_file(file).items():
        for new, legacy in (
            ("to_q", "query"),
            ("to_k", "key"),
            ("to_v", "value"),
            ("to_out.0", "proj_attn"),
        ):
            if f".{new}." in name:
                name = name.replace(new, legacy)
                tensor = tensor[..., None, None] if convolutions and tensor.ndim == 2 else tensor
        old[name] = tensor.contiguous()
    save_file(old, file)
    network = load_network(tmp_path)
    z = images(1, 4, 3, 3)
    with torch.no_grad():
        decoded = vae.decode(torch.tensor(z)).sample
    assert_close(network.apply(network.params, nhwc(z), method="decode"), decoded)


@pytest.mark.parametrize("config", [{}, {"num_encoder_blocks": (1, 2), "latent_channels": 6}])
def test_tiny_autoencoder_equals_diffusers(tmp_path, config):
    vae = randomize(
        diffusers.AutoencoderTiny(
            encoder_block_out_channels=(16, 16),
            decoder_block_out_channels=(16, 16),
            num_decoder_blocks=(2, 1),
            **{"num_encoder_blocks": (1, 1), **config},
        )
    )
    vae.save_pretrained(tmp_path)
    network = load_network(tmp_path)
    x, z = images(2, 3, 10, 6), 2 * images(2, vae.config.latent_channels, 5, 3)
    with torch.no_grad():
        latents = vae.encode(torch.tensor(x)).latents
        decoded = vae.decode(torch.tensor(z)).sample
    assert_close(network.apply(network.params, nhwc(x), method="encode"), latents)
    assert_close(network.apply(network.params, nhwc(z), method="decode"), decoded)


def test_tiling_equals_diffusers(tmp_path):
    size = (17, 9)
    vae = kl(tmp_path, 2, sample_size=16)
    vae.enable_tiling()
    network = load_network(tmp_path)
    compiled = []

    def decode(z):
        compiled.append(z.shape)
        return network.apply(network.params, z, method="decode")

    def moments(x):
        return network.apply(network.params, x, method="encode")[0]

    z, x = images(1, 4, *size), images(1, 3, 2 * size[0], 2 * size[1])
    with torch.no_grad():
        decoded = vae.decode(torch.tensor(z)).sample
        mean = vae.encode(torch.tensor(x)).latent_dist.mean
    program = jax.jit(decode)
    assert_close(tiled_decode(program, nhwc(z), tile=8, factor=2), decoded)
    assert_close(tiled_encode(jax.jit(moments), nhwc(x), tile=16, factor=2), mean)
    assert len(compiled) <= 4


def test_unsupported_block_is_an_error():
    with pytest.raises(ValueError, match="AttnDownEncoderBlock2D"):
        config_from_dict(AutoencoderKLConfig, {"down_block_types": ["AttnDownEncoderBlock2D"]})
