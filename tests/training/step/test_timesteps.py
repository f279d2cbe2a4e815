"""Biased timesteps against the weights of diffusers' SDXL training script."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diffusax.samplers.processes import Diffusion
from diffusax.training.config import TimestepBiasConfig
from diffusax.training.step.timesteps import timestep_probabilities


@pytest.mark.parametrize(
    ("options", "biased"),
    [
        ({"strategy": "earlier", "portion": 0.3}, range(30)),
        ({"strategy": "later", "portion": 0.3}, range(70, 100)),
        ({"strategy": "range", "begin": 40, "end": 55}, range(40, 55)),
    ],
)
def test_some_timesteps_are_drawn_more_often(options, biased):
    config = TimestepBiasConfig(multiplier=4, **options)
    probabilities = timestep_probabilities(config, 100)
    expected = np.array([4.0 if t in biased else 1.0 for t in range(100)])
    np.testing.assert_allclose(probabilities, expected / expected.sum())
    process = Diffusion(np.linspace(1, 0, 100))
    keys = jax.vmap(jax.random.key)(jnp.arange(40_000))
    drawn = jax.vmap(lambda key: process.sample_time(key, probabilities))(keys)
    counts = np.bincount(np.asarray(drawn), minlength=100)
    np.testing.assert_allclose(counts / 40_000, probabilities, atol=5e-3)
    assert counts.min() > 0


def test_without_bias_all_timesteps_are_alike():
    assert timestep_probabilities(TimestepBiasConfig(), 1000) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("strategy", "late"),
        ("multiplier", 0.0),
        ("portion", 1.5),
        ("begin", 1000),
    ],
)
def test_options_that_cannot_be(name, value):
    with pytest.raises(ValueError, match=rf"timestep_bias\.{name}"):
        TimestepBiasConfig(**{name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"multiplier": 3.0}, "multiplier=3.0 does nothing without timestep_bias.strategy=earlier"),
        ({"portion": 0.5}, "portion=0.5 does nothing without timestep_bias.strategy=earlier or"),
        (
            {"strategy": "later", "end": 9},
            "end=9 does nothing without timestep_bias.strategy=range",
        ),
    ],
)
def test_options_that_do_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=f"timestep_bias.{message}"):
        TimestepBiasConfig(**options)


def test_a_range_ends_with_the_timesteps():
    config = TimestepBiasConfig(strategy="range", begin=1500, end=2000, multiplier=5)
    with pytest.raises(ValueError, match=r"end=2000 is beyond the last of the 1000 timesteps"):
        timestep_probabilities(config, 1000)
