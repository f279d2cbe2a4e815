"""Qwen-Image's autoencoder against PyTorch's, on videos of one frame."""

import diffusers
import numpy as np
import pytest
import torch
from support.tiny_transformers import qwen_image_autoencoder
from support.torch_params import params_of

from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints import save_network
from diffusax.checkpoints.tree import torch_shapes
from diffusax.models import AutoencoderKLQwenImage, AutoencoderKLQwenImageConfig
from diffusax.models.autoencoders.latents import LatentFormat
from diffusax.models.network import Network, cast_params
from diffusax.networks import Model, load_network
from diffusax.pipelines.run import autoencoding

MORE = {
    "base_dim": 6,
    "dim_mult": [1, 2, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [True, False],
    "input_channels": 4,
}
"""Another number of levels, and images with an opacity."""


@pytest.fixture(scope="module", params=[{}, MORE], ids=["as in Krea 2", "other options"])
def both(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    network = qwen_image_autoencoder(**request.param)
    network.save_pretrained(folder)
    return network, load_network(folder)


def images(network, h, w, b=2):
    """Videos of one frame, b c 1 h w."""
    shape = b, network.config.input_channels, 1, h, w
    return torch.tensor(np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32))


def latents(network, h, w, b=2):
    """b z 1 h w."""
    numbers = np.random.default_rng(1).standard_normal((b, network.config.z_dim, 1, h, w))
    return torch.tensor(numbers.astype(np.float32))


def assert_close(actual, expected, tolerance=1e-5):
    expected = np.asarray(expected.detach())
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() <= tolerance * np.abs(expected).max()


@torch.no_grad()
def test_encodes_and_decodes_as_diffusers_does(both):
    vae, model = both
    # No side is a multiple of the pixels per latent.
    x = images(vae, 27, 45)
    found, expected = model.encode(x).latent_dist, vae.encode(x).latent_dist
    assert_close(found.mode(), expected.mode())
    assert_close(found.logvar, expected.logvar)
    z = latents(vae, 3, 5)
    decoded = vae.decode(z).sample
    assert ((decoded > -1) & (decoded < 1)).float().mean() > 0.2
    assert_close(model.decode(z).sample, decoded)
    assert_close(model(x).sample, vae(x).sample)
    (as_tuple,) = model.decode(z, return_dict=False)
    assert_close(as_tuple, decoded)


@torch.no_grad()
def test_values_beyond_the_range_are_clipped():
    vae = qwen_image_autoencoder()
    vae.decoder.conv_out.weight *= 5
    network = Network(AutoencoderKLQwenImage, config_of(vae))
    z = latents(vae, 3, 5)
    decoded = vae.decode(z).sample
    assert (decoded.abs() == 1).float().mean() > 0.05
    assert_close(Model(network, params_of(network, vae)).decode(z).sample, decoded)


@torch.no_grad()
@pytest.mark.parametrize(("h", "w"), [(40, 17), (33, 65)])
def test_tiles_and_blending_are_those_of_diffusers(h, w):
    changes = {"base_dim": 4, "dim_mult": [1, 1, 1, 1]}
    vae = qwen_image_autoencoder(**changes)
    network = Network(AutoencoderKLQwenImage, config_of(vae))
    model = Model(network, params_of(network, vae))
    vae.enable_tiling()
    model.enable_tiling()
    z = latents(vae, h, w, b=1)
    decoded = vae.decode(z).sample
    assert_close(model.decode(z).sample, decoded)
    model.disable_tiling()
    assert (model.decode(z).sample - decoded).abs().max() > 1e-3
    model.enable_tiling()
    x = images(vae, 8 * h + 3, 8 * w + 5, b=1)
    found, expected = model.encode(x).latent_dist, vae.encode(x).latent_dist
    assert_close(found.mean, expected.mean)
    assert_close(found.logvar, expected.logvar)


@torch.no_grad()
def test_latents_of_pipelines_are_normalised_by_mean_and_deviation(both):
    vae, model = both
    x = images(vae, 24, 40)
    mean, std = (
        torch.tensor(vae.config[name]).view(1, -1, 1, 1, 1)
        for name in ("latents_mean", "latents_std")
    )
    expected = (vae.encode(x).latent_dist.mode() - mean) / std
    pixels = x.numpy()[:, :, 0].transpose(0, 2, 3, 1)
    found = autoencoding.encode_image(model.network, model.params, pixels, None, normalize=True)
    assert found.shape[1:] == LatentFormat.of(model.config).shape(24, 40)
    assert_close(np.asarray(found).transpose(0, 3, 1, 2)[:, :, None], expected)
    decoded = vae.decode(expected * std + mean).sample
    ours = autoencoding.decode_pixels(
        model.network, model.params, found, upcast=False, normalize=True
    )
    assert_close(np.asarray(ours).transpose(0, 3, 1, 2)[:, :, None].clip(-1, 1), decoded, 2e-5)


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_pytorch_is(both):
    vae, model = both
    half = Model(model.network, cast_params(model.params, "bfloat16"))
    rounded = type(vae)(**vae.config).to(torch.bfloat16)
    rounded.load_state_dict(vae.state_dict())
    x, z = images(vae, 96, 120), latents(vae, 12, 15)
    for call, given in (
        (lambda v, t: v.encode(t).latent_dist.mean, x),
        (lambda v, t: v.decode(t).sample, z),
    ):
        exact = call(vae, given)
        theirs = (call(rounded, given.to(torch.bfloat16)).float() - exact).abs().mean()
        ours = (call(half, given.to(torch.bfloat16)).float() - exact).abs().mean()
        # A convolution here rounds its sums before it adds the bias.
        assert 0 < ours < 1.5 * theirs


@torch.no_grad()
def test_saved_it_is_the_same_for_images_in_diffusers_and_has_zeros_for_earlier_frames(
    both, tmp_path
):
    vae, model = both
    save_network(model, tmp_path)
    again = type(vae).from_pretrained(tmp_path)
    x, z = images(vae, 24, 40), latents(vae, 3, 5)
    assert_close(again.encode(x).latent_dist.mean, vae.encode(x).latent_dist.mean, 1e-6)
    assert_close(again.decode(z).sample, vae.decode(z).sample, 1e-6)
    found, expected = again.state_dict(), vae.state_dict()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        if tensor.ndim == 5 and "time_conv" not in name:
            assert not found[name][:, :, :-1].any()
            assert tensor.shape[2] == 1 or tensor[:, :, :-1].any()
            tensor, found[name] = tensor[:, :, -1], found[name][:, :, -1]
        np.testing.assert_array_equal(found[name], tensor)
    assert again.config.temperal_downsample == vae.config.temperal_downsample


@torch.no_grad()
def test_videos_of_several_frames_are_refused(both):
    vae, model = both
    for call, name, given in (
        (model.encode, "x", torch.zeros(1, vae.config.input_channels, 5, 24, 40)),
        (model.decode, "z", torch.zeros(1, vae.config.z_dim, 3, 5)),
    ):
        with pytest.raises(ValueError, match=f"{name} must have shape .*, 1, height, width"):
            call(given)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperal_downsample": [True, True]}, "one entry for each level of dim_mult but the"),
        ({"latents_mean": [0.0] * 4}, r"latents_mean must have one entry per latent channel \(got"),
        ({"latents_std": [0.0] * 16}, "latents_std"),
        ({"patch_size": 2}, "no option 'patch_size'"),
        ({"attn_scales": [1.0]}, "attn_scales"),
    ],
)
def test_other_configs_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict(AutoencoderKLQwenImageConfig, changes)


def test_the_whole_has_the_tensors_and_options_of_diffusers():
    with torch.device("meta"):
        theirs = diffusers.AutoencoderKLQwenImage()
    shapes = torch_shapes(Network(AutoencoderKLQwenImage, AutoencoderKLQwenImageConfig()).shapes)
    assert shapes == {name: tuple(x.shape) for name, x in theirs.state_dict().items()}
    assert config_of(theirs) == AutoencoderKLQwenImageConfig()


def config_of(vae):
    """Our config of PyTorch's network."""
    given = {k: v for k, v in vae.config.items() if not k.startswith("_")}
    return config_from_dict(AutoencoderKLQwenImageConfig, given)
