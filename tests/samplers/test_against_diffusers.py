"""Every sampler against diffusers' scheduler, each intermediate x, on a non-linear model."""

import numpy as np
import pytest
import torch
from support.upstream_samplers import SD, build, compare, config_of, upstream_class

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]


def half(timestep):
    """A function of SA-Solver: how stochastic its steps are."""
    return 0.5 + timestep / 4000


STEPS = (1, 2, 4, 7, 20, 50)
CASES = [
    ("DDPMScheduler", {**SD, "clip_sample": False}),
    ("DDPMScheduler", {"clip_sample_range": 1.5, "variance_type": "fixed_large"}),
    ("DDPMScheduler", {**SD, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
    ("DDPMScheduler", {**SD, "prediction_type": "sample", "variance_type": "fixed_small_log"}),
    ("DDIMScheduler", {**SD, "clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}),
    ("DDIMScheduler", {"clip_sample_range": 1.5, "timestep_spacing": "linspace"}),
    (
        "DDIMScheduler",
        {
            **SD,
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
        },
    ),
    ("DDIMScheduler", {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample"}),
    ("PNDMScheduler", {**SD, "skip_prk_steps": True, "steps_offset": 1}),
    ("PNDMScheduler", {**SD, "skip_prk_steps": True, "prediction_type": "v_prediction"}),
    ("PNDMScheduler", {**SD, "skip_prk_steps": False, "set_alpha_to_one": True}),
    ("PNDMScheduler", {**SD, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
    ("LCMScheduler", {}),
    ("LCMScheduler", {"clip_sample": True, "prediction_type": "v_prediction"}),
    ("TCDScheduler", {}),
    ("EulerDiscreteScheduler", SD),
    ("EulerDiscreteScheduler", {**SD, "use_karras_sigmas": True, "timestep_spacing": "leading"}),
    ("EulerDiscreteScheduler", {**SD, "use_exponential_sigmas": True, "steps_offset": 1}),
    ("EulerDiscreteScheduler", {**SD, "use_beta_sigmas": True, "prediction_type": "sample"}),
    ("EulerDiscreteScheduler", {**SD, "interpolation_type": "log_linear"}),
    (
        "EulerDiscreteScheduler",
        {
            **SD,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
            "final_sigmas_type": "sigma_min",
        },
    ),
    ("EulerAncestralDiscreteScheduler", SD),
    ("EulerAncestralDiscreteScheduler", {**SD, "prediction_type": "v_prediction"}),
    ("LMSDiscreteScheduler", SD),
    ("LMSDiscreteScheduler", {**SD, "use_karras_sigmas": True, "prediction_type": "v_prediction"}),
    ("HeunDiscreteScheduler", SD),
    ("HeunDiscreteScheduler", {**SD, "use_karras_sigmas": True, "clip_sample": True}),
    ("HeunDiscreteScheduler", {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
    ("KDPM2DiscreteScheduler", SD),
    ("KDPM2DiscreteScheduler", {**SD, "use_karras_sigmas": True}),
    ("KDPM2AncestralDiscreteScheduler", {**SD, "timestep_spacing": "leading"}),
    ("KDPM2AncestralDiscreteScheduler", {**SD, "prediction_type": "v_prediction"}),
    ("DPMSolverMultistepScheduler", SD),
    ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {**SD, "use_lu_lambdas": True, "solver_type": "heun"}),
    ("DPMSolverMultistepScheduler", {**SD, "use_lu_lambdas": True, "use_karras_sigmas": True}),
    ("DPMSolverMultistepScheduler", {**SD, "use_lu_lambdas": True, "use_beta_sigmas": True}),
    ("DPMSolverMultistepScheduler", {**SD, "use_exponential_sigmas": True, "euler_at_final": True}),
    (
        "DPMSolverMultistepScheduler",
        {**SD, "solver_order": 3, "final_sigmas_type": "sigma_min", "timestep_spacing": "leading"},
    ),
    (
        "DPMSolverMultistepScheduler",
        {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1},
    ),
    (
        "DPMSolverMultistepScheduler",
        {**SD, "algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    ),
    (
        "DPMSolverMultistepScheduler",
        {
            **SD,
            "algorithm_type": "dpmsolver",
            "final_sigmas_type": "sigma_min",
            "solver_order": 3,
            "prediction_type": "v_prediction",
        },
    ),
    ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}),
    (
        "DPMSolverMultistepScheduler",
        {**SD, "algorithm_type": "sde-dpmsolver++", "solver_type": "heun"},
    ),
    (
        "DPMSolverMultistepScheduler",
        {**SD, "algorithm_type": "sde-dpmsolver++", "solver_order": 3},
    ),
    (
        "DPMSolverMultistepScheduler",
        {
            **SD,
            "algorithm_type": "sde-dpmsolver",
            "final_sigmas_type": "sigma_min",
            "prediction_type": "sample",
        },
    ),
    ("DPMSolverSinglestepScheduler", SD),
    ("DPMSolverSinglestepScheduler", {**SD, "solver_order": 3, "use_karras_sigmas": True}),
    (
        "DPMSolverSinglestepScheduler",
        {**SD, "solver_order": 3, "final_sigmas_type": "sigma_min", "solver_type": "heun"},
    ),
    (
        "DPMSolverSinglestepScheduler",
        {**SD, "algorithm_type": "sde-dpmsolver++", "prediction_type": "v_prediction"},
    ),
    (
        "DPMSolverSinglestepScheduler",
        {**SD, "algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
    ),
    ("DEISMultistepScheduler", SD),
    ("DEISMultistepScheduler", {**SD, "solver_order": 3, "prediction_type": "v_prediction"}),
    ("DEISMultistepScheduler", {**SD, "use_karras_sigmas": True, "lower_order_final": False}),
    ("DEISMultistepScheduler", {**SD, "thresholding": True, "timestep_spacing": "leading"}),
    ("DPMSolverSDEScheduler", SD),
    ("DPMSolverSDEScheduler", {**SD, "use_karras_sigmas": True}),
    ("DPMSolverSDEScheduler", {"prediction_type": "v_prediction", "timestep_spacing": "trailing"}),
    ("EDMEulerScheduler", {}),
    ("EDMEulerScheduler", {"sigma_schedule": "exponential", "final_sigmas_type": "sigma_min"}),
    ("EDMEulerScheduler", {"prediction_type": "v_prediction", "sigma_data": 1.0, "rho": 5.0}),
    ("EDMDPMSolverMultistepScheduler", {}),
    ("EDMDPMSolverMultistepScheduler", {"solver_order": 3, "prediction_type": "v_prediction"}),
    (
        "EDMDPMSolverMultistepScheduler",
        {"algorithm_type": "sde-dpmsolver++", "solver_type": "heun", "sigma_max": 30.0},
    ),
    ("EDMDPMSolverMultistepScheduler", {"final_sigmas_type": "sigma_min", "thresholding": True}),
    ("DDPMScheduler", {**SD, "thresholding": True, "sample_max_value": 1.5}),
    ("DDPMScheduler", {"beta_schedule": "sigmoid"}),
    ("DDPMScheduler", {"beta_schedule": "laplace", "clip_sample": False}),
    ("DDIMScheduler", {**SD, "thresholding": True, "dynamic_thresholding_ratio": 0.9}),
    ("LCMScheduler", {"thresholding": True, "sample_max_value": 1.2}),
    ("HeunDiscreteScheduler", {"beta_schedule": "exp"}),
    (
        "EulerDiscreteScheduler",
        {
            **SD,
            "timestep_type": "continuous",
            "prediction_type": "v_prediction",
            "use_karras_sigmas": True,
            "sigma_min": 0.002,
            "sigma_max": 700.0,
        },
    ),
    ("DPMSolverMultistepScheduler", {**SD, "thresholding": True, "sample_max_value": 2.0}),
    (
        "DPMSolverMultistepScheduler",
        {
            **SD,
            "thresholding": True,
            "algorithm_type": "dpmsolver",
            "final_sigmas_type": "sigma_min",
        },
    ),
    ("SASolverScheduler", SD),
    ("SASolverScheduler", {**SD, "predictor_order": 3, "corrector_order": 3, "tau_func": half}),
    (
        "SASolverScheduler",
        {
            **SD,
            "predictor_order": 4,
            "corrector_order": 3,
            "lower_order_final": False,
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
        },
    ),
    (
        "SASolverScheduler",
        {
            **SD,
            "algorithm_type": "noise_prediction",
            "corrector_order": 4,
            "tau_func": half,
            "use_karras_sigmas": True,
        },
    ),
    ("SASolverScheduler", {"predictor_order": 1, "thresholding": True, "steps_offset": 1}),
    (
        "SASolverScheduler",
        {
            "use_flow_sigmas": True,
            "flow_shift": 3.0,
            "prediction_type": "flow_prediction",
            "tau_func": half,
        },
    ),
    ("DDIMInverseScheduler", {**SD, "clip_sample": False, "set_alpha_to_one": False}),
    ("DDIMInverseScheduler", {"clip_sample_range": 1.5, "steps_offset": 1}),
    (
        "DDIMInverseScheduler",
        {
            **SD,
            "clip_sample": False,
            "prediction_type": "v_prediction",
            "rescale_betas_zero_snr": True,
            "timestep_spacing": "trailing",
        },
    ),
    (
        "DDIMInverseScheduler",
        {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "sample"}
        | {"set_alpha_to_one": False},
    ),
    ("DPMSolverMultistepInverseScheduler", SD),
    ("DPMSolverMultistepInverseScheduler", {**SD, "solver_order": 3, "euler_at_final": True}),
    ("DPMSolverMultistepInverseScheduler", {**SD, "solver_type": "heun", "steps_offset": 1}),
    ("DPMSolverMultistepInverseScheduler", {**SD, "timestep_spacing": "leading"}),
    (
        "DPMSolverMultistepInverseScheduler",
        {**SD, "timestep_spacing": "trailing", "prediction_type": "v_prediction"},
    ),
    ("DPMSolverMultistepInverseScheduler", {**SD, "use_karras_sigmas": True}),
    ("DPMSolverMultistepInverseScheduler", {**SD, "use_exponential_sigmas": True}),
    ("DPMSolverMultistepInverseScheduler", {**SD, "use_beta_sigmas": True}),
    ("DPMSolverMultistepInverseScheduler", {**SD, "algorithm_type": "dpmsolver"}),
    (
        "DPMSolverMultistepInverseScheduler",
        {"beta_schedule": "squaredcos_cap_v2", "lambda_min_clipped": -5.1, "thresholding": True},
    ),
    ("UniPCMultistepScheduler", {**SD, "thresholding": True}),
    ("UniPCMultistepScheduler", SD),
    ("UniPCMultistepScheduler", {**SD, "solver_order": 3, "use_karras_sigmas": True}),
    (
        "UniPCMultistepScheduler",
        {
            **SD,
            "solver_type": "bh1",
            "disable_corrector": [0, 2],
            "final_sigmas_type": "sigma_min",
        },
    ),
    (
        "UniPCMultistepScheduler",
        {
            **SD,
            "predict_x0": False,
            "final_sigmas_type": "sigma_min",
            "prediction_type": "v_prediction",
            "timestep_spacing": "trailing",
        },
    ),
]


@pytest.mark.parametrize(("name", "config"), CASES)
def test_every_step_equals_diffusers(name, config):
    for steps in STEPS:
        if name == "PNDMScheduler" and not config.get("skip_prk_steps") and steps < 4:
            continue
        scheduler = build(name, steps, **config)
        if name == "DPMSolverMultistepInverseScheduler" and (scheduler.timesteps[:2] == 0).all():
            # diffusers begins at the second of two equal timesteps, and ends in an IndexError.
            continue
        eta = {"eta": 0.3} if name == "TCDScheduler" else {}
        ours = samplers.scheduler_from_config({**config_of(scheduler), **config})
        compare(ours.schedule(steps, **eta), scheduler, **eta)


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_ddim_with_eta_equals_diffusers(eta):
    scheduler = build("DDIMScheduler", 9, **SD, clip_sample=False)
    ours = samplers.DDIMScheduler.from_config(config_of(scheduler))
    compare(ours.schedule(9, eta=eta), scheduler, eta=eta)


NO_SIGNAL = {
    **SD,
    "rescale_betas_zero_snr": True,
    "timestep_spacing": "trailing",
    "prediction_type": "v_prediction",
    "clip_sample": False,
}


def test_ddim_with_eta_1_from_no_signal_is_finite_where_diffusers_is_not():
    """It takes the root of 1 - a - sigma^2, which is zero there, and below it after rounding."""
    ours = samplers.DDIMScheduler.from_config(config_of(build("DDIMScheduler", 2, **NO_SIGNAL)))
    compare(ours.schedule(2, eta=1.0), build("DDIMScheduler", 2, **NO_SIGNAL), eta=1.0)
    x, theirs, nans = torch.ones(1, 4, 2, 2), upstream_class("DDIMScheduler")(**NO_SIGNAL), []
    for steps in range(2, 40):
        theirs.set_timesteps(steps)
        given = theirs.timesteps[0], x
        after = theirs.step(x, *given, eta=1.0, generator=torch.Generator()).prev_sample
        nans += [] if torch.isfinite(after).all() else [steps]
    assert len(nans) > 5
    ours.set_timesteps(nans[0])
    found = ours.step(x.numpy(), ours.timesteps[0], x.numpy(), eta=1.0, variance_noise=x.numpy())
    signal, noise = ours.schedule(nans[0]).levels[1]
    # What is predicted, here -v, at the signal of the next level, and noise for all the rest: the
    # root of what float32 numbers leave of zero is up to 1e-3.
    np.testing.assert_allclose(found.prev_sample, noise - signal, atol=1.5e-3)


@pytest.mark.parametrize(
    ("name", "timesteps"),
    [
        ("DDPMScheduler", [900, 500, 20]),
        ("EulerDiscreteScheduler", [999, 845, 730, 587, 13]),
        ("HeunDiscreteScheduler", [999, 400, 100]),
        ("DPMSolverMultistepScheduler", [999, 845, 730, 587, 443, 310, 193, 116, 53, 13]),
        ("DPMSolverSinglestepScheduler", [999, 500, 100, 10]),
        ("LCMScheduler", [999, 759, 499, 259]),
    ],
)
def test_custom_timesteps_equal_diffusers(name, timesteps):
    scheduler = build(name, timesteps=timesteps, **SD)
    ours = samplers.scheduler_from_config(config_of(scheduler))
    compare(ours.schedule(timesteps=timesteps), scheduler)


def test_custom_sigmas_equal_diffusers():
    sigmas = [14.6, 6.0, 2.5, 1.1, 0.3, 0.0]
    scheduler = build("EulerDiscreteScheduler", sigmas=sigmas, **SD)
    ours = samplers.EulerDiscreteScheduler.from_config(config_of(scheduler))
    compare(ours.schedule(sigmas=sigmas), scheduler)
