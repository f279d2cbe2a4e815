"""Samplers at k-diffusion's noise levels, which diffusers' classes lack."""

import diffusers
import numpy as np
import pytest
import torch
from scipy import stats

from diffusax.samplers import SPACED_NAMES, sampler_name, scheduler_from_name

BETAS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SD = {"_class_name": "PNDMScheduler", "skip_prk_steps": True, **BETAS}
SD |= {"timestep_spacing": "leading", "steps_offset": 1}
COUNTS = (1, 2, 10, 11, 27)


def training_sigmas():
    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000, dtype=torch.float64) ** 2
    alphas = torch.cumprod(1 - betas, 0)
    return ((1 - alphas) / alphas).sqrt()


EVERY = training_sigmas()


def at(timestep):
    """k-diffusion's t_to_sigma."""
    low, high, share = timestep.floor().long(), timestep.ceil().long(), timestep.frac()
    return ((1 - share) * EVERY.log()[low] + share * EVERY.log()[high]).exp()


def align_your_steps(n, listed):
    if n == len(listed):
        return listed
    ends = np.log(listed[::-1])
    found = np.interp(np.linspace(0, 1, n), np.linspace(0, 1, len(listed)), ends)
    return np.exp(found)[::-1]


SD_STEPS = [14.615, 6.475, 3.861, 2.697, 1.886, 1.396, 0.963, 0.652, 0.399, 0.152, 0.029]
XL_STEPS = [14.615, 6.315, 3.771, 2.181, 1.342, 0.862, 0.555, 0.380, 0.234, 0.113, 0.029]


def karras(n):
    low, high = EVERY[0] ** (1 / 7), EVERY[-1] ** (1 / 7)
    return (high + torch.linspace(0, 1, n, dtype=torch.float64) * (low - high)) ** 7


FORMULAS = {
    "karras": karras,
    "exponential": lambda n: torch.linspace(EVERY[-1].log(), EVERY[0].log(), n).exp(),
    "beta": lambda n: (
        EVERY[0] + torch.tensor(stats.beta.ppf(1 - np.linspace(0, 1, n), 0.6, 0.6))
        * (EVERY[-1] - EVERY[0])
    ),
    "sgm_uniform": lambda n: at(torch.linspace(999.0, 0.0, n + 1, dtype=torch.float64)[:-1]),
    "align_your_steps": lambda n: align_your_steps(n, SD_STEPS),
    "align_your_steps_xl": lambda n: align_your_steps(n, XL_STEPS),
}  # fmt: skip
"""The levels without zero, as modules/sd_schedulers.py of stable-diffusion-webui computes them."""


@pytest.mark.parametrize("spacing", FORMULAS)
def test_levels_are_those_of_webui(spacing):
    for n in COUNTS[1:] if spacing.startswith("align") else COUNTS:
        scheduler = scheduler_from_name(f"euler_a_{spacing}", SD)
        scheduler.set_timesteps(n)
        expected = np.append(np.asarray(FORMULAS[spacing](n), np.float64), 0.0)
        np.testing.assert_allclose(scheduler.sigmas, expected, rtol=2e-5)
        assert scheduler.init_noise_sigma == pytest.approx(expected[0], rel=2e-5)
        # The network is asked at k-diffusion's sigma_to_t, which inverts its t_to_sigma.
        inside = (scheduler.sigmas[:-1] > EVERY[0].item()) & (
            scheduler.sigmas[:-1] < EVERY[-1].item()
        )
        asked = torch.tensor(np.asarray(scheduler.timesteps, np.float64)[inside])
        np.testing.assert_allclose(at(asked), scheduler.sigmas[:-1][inside], rtol=1e-4)


@pytest.mark.parametrize("name", ["dpm++2m", "dpm++2m_sde", "dpm++_sde", "heun", "lms", "dpm++2s"])
def test_samplers_run_at_the_levels(name):
    for spacing in ("sgm_uniform", "beta", "align_your_steps", "exponential"):
        scheduler = scheduler_from_name(f"{name}_{spacing}", SD)
        scheduler.set_timesteps(10)
        levels = np.unique(np.asarray(scheduler.sigmas, np.float64))[::-1]
        expected = np.append(np.asarray(FORMULAS[spacing](10), np.float64), 0.0)
        np.testing.assert_allclose(levels, expected, rtol=2e-5)


def test_the_second_level_from_the_end_is_left_out_for_dpm2():
    for name in ("kdpm2", "kdpm2_a"):
        scheduler = scheduler_from_name(f"{name}_exponential", SD)
        scheduler.set_timesteps(10)
        levels = np.unique(np.asarray(scheduler.sigmas, np.float64))[::-1]
        np.testing.assert_allclose(levels[:-1], FORMULAS["exponential"](11)[:-1], rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("euler_exponential", "EulerDiscreteScheduler"),
        ("euler_beta", "EulerDiscreteScheduler"),
        ("dpm++2m_beta", "DPMSolverMultistepScheduler"),
    ],
)
def test_images_are_diffusers_where_it_has_the_levels(name, reference):
    option = {f"use_{name.rpartition('_')[2]}_sigmas": True, "timestep_spacing": "linspace"}
    theirs = getattr(diffusers, reference)(**BETAS, **option)
    theirs.set_timesteps(8)
    ours = scheduler_from_name(name, SD)
    ours.set_timesteps(8)
    np.testing.assert_allclose(ours.sigmas, theirs.sigmas, rtol=2e-6)
    np.testing.assert_allclose(ours.timesteps, theirs.timesteps.numpy(), rtol=2e-6)
    sample = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    expected, found = sample * theirs.init_noise_sigma, sample.numpy() * ours.init_noise_sigma
    for mine, t in zip(ours.timesteps, theirs.timesteps):
        seen = theirs.scale_model_input(expected, t)
        expected = theirs.step(torch.sin(seen), t, expected).prev_sample
        seen = ours.scale_model_input(found, mine)
        found = np.asarray(ours.step(np.sin(seen), mine, found).prev_sample)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


def test_names_go_both_ways():
    for name in SPACED_NAMES:
        scheduler = scheduler_from_name(name, SD)
        assert sampler_name(scheduler) == name
        assert sampler_name(scheduler.with_options(steps_offset=0)) == name
        assert scheduler_from_name(name, scheduler) == scheduler
        assert np.isfinite(scheduler.schedule(4).table().update).all()
    plain = scheduler_from_name("euler_a", scheduler_from_name("euler_a_karras", SD))
    assert sampler_name(plain) == "euler_a"


def test_levels_of_a_config_do_not_matter():
    config = {"_class_name": "EulerDiscreteScheduler", **BETAS, "use_karras_sigmas": True}
    beta, own = (scheduler_from_name("euler_beta", c).schedule(5) for c in (config, SD))
    np.testing.assert_array_equal(beta.table().update, own.table().update)


def test_what_cannot_be_saved_is_refused(tmp_path):
    scheduler = scheduler_from_name("dpm++2m_sgm_uniform", SD)
    with pytest.raises(ValueError, match="the noise levels of this DPMSolverMultistepScheduler"):
        scheduler.save_config(tmp_path)


def test_networks_of_flow_matching_have_none():
    flow = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
    with pytest.raises(ValueError, match="'euler_beta' is for networks trained at discrete noise"):
        scheduler_from_name("euler_beta", flow)
