"""Densities and weights of flow matching against diffusers', on the same random numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import (
    compute_density_for_timestep_sampling,
    compute_loss_weighting_for_sd3,
)

from diffusax.pipelines.families import UNCONDITIONAL
from diffusax.samplers import FlowMatchEulerDiscreteScheduler
from diffusax.samplers.processes import Diffusion, Flow, FlowWeighting
from diffusax.training import TextToImageConfig
from diffusax.training.step.denoising import DenoisingLoss

SCHEMES = ("logit_normal", "mode", "cosmap", "sigma_sqrt", "none")
NUMBERS = {"logit_mean": -0.4, "logit_std": 1.3, "mode_scale": 0.8}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_densities_and_weights_are_those_of_diffusers(monkeypatch, scheme):
    rng = np.random.default_rng(0)
    uniform = rng.random(500).astype(np.float32)
    normal = rng.standard_normal(500).astype(np.float32)
    torch_normal = lambda mean, std, **_: mean + std * torch.tensor(normal)  # noqa: E731
    monkeypatch.setattr(torch, "rand", lambda **_: torch.tensor(uniform))
    monkeypatch.setattr(torch, "normal", torch_normal)
    # Their places count from noise to images, our levels from images to noise.
    monkeypatch.setattr(jax.random, "normal", lambda key, *_, **__: -jnp.asarray(normal))
    own = uniform if scheme == "mode" else 1 - uniform
    monkeypatch.setattr(jax.random, "uniform", lambda key, *_, **__: jnp.asarray(own))
    place = compute_density_for_timestep_sampling(scheme, 500, **NUMBERS)
    weighting = FlowWeighting(scheme, **NUMBERS)
    sigmas = weighting.sample(None)
    np.testing.assert_allclose(sigmas, 1 - place.numpy(), atol=1e-6)
    expected = compute_loss_weighting_for_sd3(scheme, 1 - place)
    np.testing.assert_allclose(weighting.weight(sigmas), expected, rtol=1e-3)
    shifted = Flow(3.0, 1000, weighting).sample_time(None)
    assert 0 < shifted.min() < 0.2
    assert shifted.max() <= 1


def test_levels_are_within_the_training_timesteps():
    keys = jax.vmap(jax.random.key)(jnp.arange(30_000))
    for scheme in SCHEMES:
        drawn = jax.vmap(Flow(1.0, 1000, FlowWeighting(scheme)).sample_time)(keys)
        assert 1 / 1000 <= drawn.min() < drawn.max() <= 1


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("within", [(0.0, 0.7), (0.7, 1.0)])
def test_levels_of_a_range_are_as_dense_there_as_without_it(scheme, within):
    whole = Flow(3.0, 1000, FlowWeighting(scheme, **NUMBERS))
    part = dataclasses.replace(whole, within=within)
    keys = jax.vmap(jax.random.key)(jnp.arange(40_000))
    every, drawn = (np.asarray(jax.vmap(flow.sample_time)(keys)) for flow in (whole, part))
    assert within[0] <= drawn.min() < drawn.max() <= within[1]
    kept = every[(every >= within[0]) & (every <= within[1])]
    shares = np.linspace(0.02, 0.98, 25)
    np.testing.assert_allclose(*(np.quantile(x, shares) for x in (drawn, kept)), atol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_mean": 0.1}, "^logit_mean does nothing without weighting_scheme=logit_normal"),
        ({"weighting_scheme": "cosmap", "mode_scale": 1.0}, "^mode_scale does nothing without"),
        ({"weighting_scheme": "sine"}, "^weighting_scheme must be"),
        ({"weighting_scheme": "mode", "mode_scale": 2.0}, "^mode_scale must be"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        TextToImageConfig(**options)


def test_discrete_noise_levels_have_no_such_schemes():
    config = TextToImageConfig(weighting_scheme="mode", mode_scale=1.0)
    assert config.weighted(Flow(3.0)) == Flow(3.0, 1000, FlowWeighting("mode", mode_scale=1.0))
    assert TextToImageConfig().weighted(Flow(3.0)) == Flow(3.0)
    with pytest.raises(ValueError, match=r"^weighting_scheme=mode is for networks of flow"):
        config.weighted(Diffusion(np.linspace(1, 0.1, 10)))
    shifted = TextToImageConfig(timestep_shift=2.0)
    assert shifted.weighted(Flow(3.0)) == Flow(2.0)
    with pytest.raises(ValueError, match=r"^timestep_shift=2.0 is for networks of flow"):
        shifted.weighted(Diffusion(np.linspace(1, 0.1, 10)))


def test_a_recipe_without_pipelines_of_many_sizes_has_no_shift_by_size():
    config = TextToImageConfig(shift_by_size=True)
    with pytest.raises(ValueError, match="shift_by_size cannot be where no pipeline moves noise"):
        DenoisingLoss.of(config, UNCONDITIONAL, {}, FlowMatchEulerDiscreteScheduler())
