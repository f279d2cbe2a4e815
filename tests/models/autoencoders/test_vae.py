import diffusers
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.effort import first
from support.tiny import randomize

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.models import AutoencoderKLConfig
from diffusax.networks import load_network


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
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@torch.no_grad()
@pytest.mark.parametrize(
    ("levels", "config"),
    first(
        [
            (1, {}),
            (2, {"layers_per_block": 2, "latent_channels": 6}),
            (3, {"use_quant_conv": False, "use_post_quant_conv": False, "out_channels": 4}),
            (4, {"mid_block_add_attention": False}),
        ],
        2,
    ),
)
def test_encode_and_decode_equal_diffusers(tmp_path, levels, config):
    vae = kl(tmp_path, levels, **config)
    network = load_network(tmp_path)
    factor = network.config.downsampling
    # The height is not a multiple of the factor: odd maps on the way down.
    x = images(2, 3, 5 * factor + factor // 2, 3 * factor)
    z = images(2, vae.config.latent_channels, 5, 3)
    mean, logvar = network.apply(network.params, nhwc(x), method="encode")
    posterior = vae.encode(torch.tensor(x)).latent_dist
    assert_close(mean, posterior.mean)
    assert_close(logvar, posterior.logvar)
    decoded = network.apply(network.params, nhwc(z), method="decode")
    assert_close(decoded, vae.decode(torch.tensor(z)).sample)


@torch.no_grad()
def test_reconstruction_and_bounds_of_the_variance_equal_diffusers(tmp_path):
    vae = kl(tmp_path, 2)
    vae.quant_conv.weight *= 30
    vae.save_pretrained(tmp_path)
    network = load_network(tmp_path)
    x = images(1, 3, 8, 6)
    _, logvar = network.apply(network.params, nhwc(x), method="encode")
    assert (logvar.min(), logvar.max()) == (-30, 20)
    assert_close(logvar, vae.encode(torch.tensor(x)).latent_dist.logvar)
    assert_close(network.apply(network.params, nhwc(x)), vae(torch.tensor(x)).sample)


@pytest.mark.slow
def test_network_runs_in_the_dtype_of_its_parameters(tmp_path):
    kl(tmp_path, 2)
    z = nhwc(images(1, 4, 5, 3))
    half, single = (load_network(tmp_path, dtype=dtype) for dtype in ("bfloat16", "float32"))
    actual = half.apply(half.params, z, method="decode")
    expected = single.apply(single.params, z, method="decode")
    assert actual.dtype == jnp.bfloat16
    # bfloat16 has eight bits; twenty layers add up a few of its roundings.
    error = np.abs(np.asarray(actual, np.float32) - expected).max()
    assert 1e-4 < error / np.abs(expected).max() < 0.05


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
    assert sum(".proj_attn." in name for name in old) == 4
    save_file(old, file)
    network = load_network(tmp_path)
    z = images(1, 4, 3, 3)
    with torch.no_grad():
        decoded = vae.decode(torch.tensor(z)).sample
    assert_close(network.apply(network.params, nhwc(z), method="decode"), decoded)


def test_saved_autoencoder_opens_in_diffusers(tmp_path):
    latents = {"latents_mean": [0.1, 0, 0, 0], "latents_std": [2.0, 1, 1, 1], "shift_factor": 0.3}
    vae = kl(tmp_path / "in", 2, **latents, scaling_factor=0.5, force_upcast=False)
    save_network(load_network(tmp_path / "in"), tmp_path / "out")
    again = diffusers.AutoencoderKL.from_pretrained(tmp_path / "out")
    assert again.state_dict().keys() == vae.state_dict().keys()
    for key, value in vae.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    written, read = ({k: c[k] for k in c if k[0] != "_"} for c in (again.config, vae.config))
    assert {k: tuple(v) if isinstance(v, list) else v for k, v in written.items()} == {
        k: tuple(v) if isinstance(v, list) else v for k, v in read.items()
    }


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"down_block_types": ["AttnDownEncoderBlock2D"]}, "AttnDownEncoderBlock2D"),
        ({"up_block_types": ["AttnUpDecoderBlock2D"]}, "AttnUpDecoderBlock2D"),
        ({"block_out_channels": [32, 64]}, "down_block_types must have one entry per level"),
        ({"act_fn": "mish"}, "act_fn='mish'"),
    ],
)
def test_config_that_is_not_supported_is_an_error(config, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AutoencoderKLConfig, config)
