"""Targets, weights and distances against diffusers and closed forms."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from diffusers.training_utils import compute_snr

import diffusax
from diffusax.samplers.processes import Diffusion, Flow, add_noise
from diffusax.training.recipes.autoencoder import (
    gradient_difference,
    kl_divergence,
    structural_dissimilarity,
)
from diffusax.training.step.denoising import squared_error

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
    process, t = Diffusion(scheduler.alphas_cumprod.numpy()), torch.tensor(TIMESTEPS)
    noisy = scheduler.add_noise(to_torch(x0), to_torch(noise), t)
    np.testing.assert_allclose(
        to_torch(add_noise(process, x0, noise, np.array(TIMESTEPS))), noisy, rtol=1e-5, atol=1e-6
    )
    velocity = scheduler.get_velocity(to_torch(x0), to_torch(noise), t)
    target = process.target(x0, noise, np.array(TIMESTEPS), "v_prediction")
    np.testing.assert_allclose(to_torch(target), velocity, rtol=1e-5, atol=1e-6)


def test_the_other_targets_are_the_noise_and_the_sample(arrays):
    x0, noise = arrays
    process, t = Diffusion(np.full(5, 0.3)), np.arange(5)
    assert process.target(x0, noise, t, "epsilon") is noise
    assert process.target(x0, noise, t, "sample") is x0
    with pytest.raises(ValueError, match="score"):
        process.target(x0, noise, t, "score")


@pytest.mark.parametrize(("prediction", "plus"), [("epsilon", 0), ("v_prediction", 1)])
def test_min_snr_weights_match_diffusers(prediction, plus):
    scheduler = DDPMScheduler(beta_schedule="scaled_linear")
    snr = compute_snr(scheduler, torch.tensor(TIMESTEPS))
    expected = torch.minimum(snr, torch.full_like(snr, 5.0)) / (snr + plus)
    process = Diffusion(scheduler.alphas_cumprod.numpy())
    weight = process.weight(np.array(TIMESTEPS), prediction, 5.0)
    np.testing.assert_allclose(weight, expected, rtol=1e-4)


def test_min_snr_weights_without_signal():
    process, first = Diffusion(np.array([0.0, 0.5, 0.999])), np.array([0])
    assert process.weight(first, "epsilon", 5.0) == 1
    assert process.weight(first, "v_prediction", 5.0) == 0
    np.testing.assert_allclose(process.weight(np.array([1, 2]), "sample", 5.0), [1, 5])


def test_flow_matching_is_what_its_sampler_takes_it_for(arrays):
    x0, noise = arrays
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    ours = diffusax.FlowMatchEulerDiscreteScheduler(shift=3.0)
    process, sigmas = ours.forward_process, scheduler.sigmas[TIMESTEPS]
    noisy = scheduler.scale_noise(to_torch(x0), scheduler.timesteps[TIMESTEPS], to_torch(noise))
    np.testing.assert_allclose(
        to_torch(add_noise(process, x0, noise, sigmas.numpy())), noisy, atol=1e-5
    )
    told = process.timesteps(sigmas.numpy())
    np.testing.assert_allclose(told, scheduler.timesteps[TIMESTEPS], rtol=1e-5)
    # One step along the target leads to the sample, from any level.
    target = process.target(x0, noise, sigmas.numpy(), "flow_prediction")
    level = sigmas.numpy().reshape(-1, 1, 1, 1)
    start = add_noise(process, x0, noise, sigmas.numpy())
    np.testing.assert_allclose(start - level * target, x0, atol=1e-5)
    with pytest.raises(ValueError, match="prediction_type='epsilon' is not supported"):
        process.target(x0, noise, sigmas.numpy(), "epsilon")


def test_times_of_flow_matching_follow_the_shifted_logit_normal_density():
    keys = jax.vmap(jax.random.key)(jnp.arange(20_000))
    drawn = np.asarray(jax.vmap(Flow(3.0).sample_time)(keys))
    normal = np.asarray(jax.vmap(jax.random.normal)(keys))
    plain = 1 / (1 + np.exp(-normal))
    np.testing.assert_allclose(drawn, 3 * plain / (1 + 2 * plain), rtol=1e-4)
    with pytest.raises(ValueError, match="timestep_bias is for discrete timesteps"):
        Flow().sample_time(keys[0], np.ones(3))
    with pytest.raises(ValueError, match="snr_gamma weighs the errors of discrete"):
        Flow().weight(drawn, "flow_prediction", 5.0)


def test_squared_error_is_the_mean_of_each_example(arrays):
    x, y = arrays
    expected = torch.nn.functional.mse_loss(to_torch(x), to_torch(y), reduction="none")
    np.testing.assert_allclose(squared_error(x, y), expected.mean((1, 2, 3)), rtol=1e-5)


def test_kl_matches_diffusers(arrays):
    mean, logvar = arrays
    moments = torch.cat([to_torch(mean), to_torch(logvar)], dim=1)
    expected = DiagonalGaussianDistribution(moments).kl()
    np.testing.assert_allclose(kl_divergence(mean, logvar), expected, rtol=1e-5)


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
    result = structural_dissimilarity(jnp.asarray(x), jnp.asarray(y))
    np.testing.assert_allclose(result, expected, rtol=1e-3)


def test_gradient_difference_sees_edges_and_not_levels():
    x = jnp.zeros((1, 4, 4, 1))
    assert gradient_difference(x, x + 0.7) == 0
    edge = x.at[:, 2:].set(1.0)
    np.testing.assert_allclose(gradient_difference(x, edge), [1 / 3], rtol=1e-6)
    gradient = jax.grad(lambda y: gradient_difference(edge, y).sum())(x + 0.1)
    assert np.isfinite(gradient).all()
