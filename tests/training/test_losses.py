"""Targets, weights and distances against diffusers and closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_snr

from diffusax.training.diffusion import losses

TIMESTEPS = np.array([0, 1, 250, 700, 999])


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    return (rng.standard_normal((5, 6, 7, 4)).astype(np.float32) for _ in range(2))


def to_torch(x):
    return torch.tensor(np.moveaxis(np.asarray(x), -1, 1).copy())


def test_noisy_latents_and_velocity_match_diffusers(arrays):
    x0, noise = arrays
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    alpha_bar = jnp.asarray(scheduler.alphas_cumprod.numpy())[TIMESTEPS]
    t = torch.tensor(TIMESTEPS)
    noisy = scheduler.add_noise(to_torch(x0), to_torch(noise), t)
    np.testing.assert_allclose(
        to_torch(losses.add_noise(x0, noise, alpha_bar)), noisy, rtol=1e-5, atol=1e-6
    )
    velocity = scheduler.get_velocity(to_torch(x0), to_torch(noise), t)
    target = losses.prediction_target("v_prediction", x0, noise, alpha_bar)
    np.testing.assert_allclose(to_torch(target), velocity, rtol=1e-5, atol=1e-6)


def test_the_other_targets_are_the_noise_and_the_sample(arrays):
    x0, noise = arrays
    alpha_bar = jnp.full(5, 0.3)
    assert losses.prediction_target("epsilon", x0, noise, alpha_bar) is noise
    assert losses.prediction_target("sample", x0, noise, alpha_bar) is x0
    with pytest.raises(ValueError, match="score"):
        losses.prediction_target("score", x0, noise, alpha_bar)


@pytest.mark.parametrize(("prediction", "plus"), [("epsilon", 0), ("v_prediction", 1)])
def test_min_snr_weights_match_diffusers(prediction, plus):
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    snr = compute_snr(scheduler, torch.tensor(TIMESTEPS))
    expected = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + plus)
    alpha_bar = jnp.asarray(scheduler.alphas_cumprod.numpy())[TIMESTEPS]
    weight = losses.min_snr_weight(prediction, alpha_bar, 5.0)
    np.testing.assert_allclose(weight, expected, rtol=1e-4)


def test_min_snr_weights_without_signal():
    zero = jnp.zeros(1)
    assert losses.min_snr_weight("epsilon", zero, 5.0) == 1
    assert losses.min_snr_weight("v_prediction", zero, 5.0) == 0
    np.testing.assert_allclose(
        losses.min_snr_weight("sample", jnp.array([0.5, 0.999]), 5.0), [1, 5]
    )


def test_squared_error_is_the_mean_of_each_example(arrays):
    x, y = arrays
    expected = torch.nn.functional.mse_loss(to_torch(x), to_torch(y), reduction="none")
    np.testing.assert_allclose(losses.squared_error(x, y), expected.mean((1, 2, 3)), rtol=1e-5)


def test_kl_matches_diffusers(arrays):
    mean, logvar = arrays
    moments = torch.cat([to_torch(mean), to_torch(logvar)], dim=1)
    expected = DiagonalGaussianDistribution(moments).kl()
    np.testing.assert_allclose(losses.kl_divergence(mean, logvar), expected, rtol=1e-5)


def test_structural_dissimilarity_matches_its_definition():
    rng = np.random.default_rng(1)
    x, y = (rng.uniform(-1, 1, (2, 12, 11, 3)) for _ in range(2))
    y = 0.5 * x + 0.5 * y
    expected = []
    for a, b in zip(x, y):
        values = []
        for i in range(12 - 6):
            for j in range(11 - 6):
                p, q = (z[i : i + 7, j : j + 7].reshape(49, 3) for z in (a, b))
                covariance = ((p - p.mean(0)) * (q - q.mean(0))).mean(0)
                c1, c2 = 0.02**2, 0.06**2
                values.append(
                    (2 * p.mean(0) * q.mean(0) + c1)
                    * (2 * covariance + c2)
                    / ((p.mean(0) ** 2 + q.mean(0) ** 2 + c1) * (p.var(0) + q.var(0) + c2))
                )
        expected.append((1 - np.mean(values)) / 2)
    result = losses.structural_dissimilarity(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_gradient_difference_sees_edges_and_not_levels():
    x = jnp.zeros((1, 4, 4, 1))
    assert losses.gradient_difference(x, x + 0.7) == 0
    edge = x.at[:, 2:].set(1.0)
    np.testing.assert_allclose(losses.gradient_difference(x, edge), [1 / 3], rtol=1e-6)
    gradient = jax.grad(lambda y: losses.gradient_difference(edge, y).sum())(x + 0.1)
    assert np.isfinite(gradient).all()
