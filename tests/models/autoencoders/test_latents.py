"""Scales of latents and pixels."""

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from diffusax.models import AutoencoderKLConfig, AutoencoderTinyConfig
from diffusax.models.autoencoders import latents

MEAN, STD = (-1.5, 0.25, 3.0, 0.5), (8.0, 5.0, 2.0, 4.0)
CONFIG = AutoencoderKLConfig(scaling_factor=0.5, latents_mean=MEAN, latents_std=STD)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def test_stable_diffusion_scales_and_ignores_mean_and_deviation():
    z = normal(2, 3, 5, 4)
    np.testing.assert_allclose(latents.scale_latents(CONFIG, z, normalize=False), z * 0.5)


def test_sdxl_normalizes_by_mean_and_deviation():
    z = normal(2, 3, 5, 4)
    expected = (z - np.float32(MEAN)) * 0.5 / np.float32(STD)
    scaled = latents.scale_latents(CONFIG, z, normalize=True)
    np.testing.assert_allclose(scaled, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [CONFIG, AutoencoderKLConfig(shift_factor=0.3), AutoencoderTinyConfig(scaling_factor=2.0)],
)
@pytest.mark.parametrize("normalize", [False, True])
def test_unscale_is_the_inverse(config, normalize):
    z = normal(2, 3, 5, 4)
    scaled = latents.scale_latents(config, z, normalize=normalize)
    back = latents.unscale_latents(config, scaled, normalize=normalize)
    np.testing.assert_allclose(back, z, rtol=1e-5, atol=1e-5)
    assert scaled.dtype == np.float32


def test_shift_comes_before_scale():
    config = AutoencoderKLConfig(scaling_factor=0.5, shift_factor=0.25)
    z = np.ones((1, 1, 1, 4), np.float32)
    assert float(latents.scale_latents(config, z, normalize=True).max()) == 0.375


def test_samples_equal_those_of_diffusers():
    moments = normal(2, 8, 3, 5)
    distribution = DiagonalGaussianDistribution(torch.tensor(moments))
    expected = distribution.sample(torch.Generator().manual_seed(0)).numpy()
    noise = torch.randn(2, 4, 3, 5, generator=torch.Generator().manual_seed(0)).numpy()
    actual = latents.sample_latents(moments[:, :4], moments[:, 4:], noise)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_pixel_ranges_equal_those_of_diffusers():
    x = 2 * normal(2, 3, 5, 3)
    expected = VaeImageProcessor.denormalize(torch.tensor(x)).numpy()
    np.testing.assert_allclose(latents.to_unit(x), expected, atol=1e-7)
    pixels = np.array([0, 51, 255], np.uint8)
    np.testing.assert_allclose(latents.from_bytes(pixels), [-1, -0.6, 1], atol=1e-7)
