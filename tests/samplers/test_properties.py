"""Sampler configurations at random, against diffusers: class, options, steps, first row."""

import itertools

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from support.effort import examples
from support.upstream_samplers import SHAPE, build, compare, reference

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

BETAS = {
    "num_train_timesteps": st.sampled_from([1000, 1000, 500, 100]),
    "beta_start": st.sampled_from([0.0001, 0.00085]),
    "beta_end": st.sampled_from([0.012, 0.02]),
    "beta_schedule": st.sampled_from(["linear", "scaled_linear", "squaredcos_cap_v2"]),
    "timestep_spacing": st.sampled_from(["linspace", "leading", "trailing"]),
    "steps_offset": st.sampled_from([0, 1]),
}
NOISE = st.sampled_from(["epsilon", "v_prediction"])
ANY = st.sampled_from(["epsilon", "v_prediction", "sample"])
FLAG = st.booleans()
FINAL = st.sampled_from(["zero", "sigma_min"])
ORDER = st.sampled_from([1, 2, 3])
LIMITED = {
    "clip_sample": FLAG,
    "clip_sample_range": st.sampled_from([1.0, 2.5]),
    "thresholding": FLAG,
    "dynamic_thresholding_ratio": st.sampled_from([0.995, 0.8]),
    "sample_max_value": st.sampled_from([1.0, 1.7]),
}
THRESHOLDED = {k: v for k, v in LIMITED.items() if not k.startswith("clip")}
SIGMAS = st.sampled_from([None, "use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas"])
RESPACED = {**BETAS, "prediction_type": ANY, "sigmas": SIGMAS}
SNR = {**RESPACED, **THRESHOLDED, "solver_order": ORDER, "lower_order_final": FLAG}
VELOCITY = {
    "flow_shift": st.sampled_from([1.0, 3.0, 8.0]),
    "use_dynamic_shifting": FLAG,
    **THRESHOLDED,
    "solver_order": ORDER,
    "lower_order_final": FLAG,
}
DPM = {
    **SNR,
    "solver_type": st.sampled_from(["midpoint", "heun"]),
    "final_sigmas_type": FINAL,
    "lambda_min_clipped": st.sampled_from([-float("inf"), -5.1]),
}
DISTILLED = {**BETAS, **LIMITED, "prediction_type": ANY, "set_alpha_to_one": FLAG}
EDM = {
    "prediction_type": NOISE,
    "sigma_min": st.sampled_from([0.002, 0.02]),
    "sigma_max": st.sampled_from([80.0, 14.0]),
    "sigma_data": st.sampled_from([0.5, 1.0]),
    "sigma_schedule": st.sampled_from(["karras", "exponential"]),
    "rho": st.sampled_from([7.0, 4.0]),
    "final_sigmas_type": FINAL,
}
FLOW = {
    "num_train_timesteps": st.sampled_from([1000, 1000, 500, 100]),
    "shift": st.sampled_from([1.0, 3.0, 1.73]),
}
OPTIONS = {
    "DDPMScheduler": {
        **BETAS,
        **LIMITED,
        "prediction_type": ANY,
        "variance_type": st.sampled_from(["fixed_small", "fixed_small_log", "fixed_large"]),
        "rescale_betas_zero_snr": FLAG,
    },
    "DDIMScheduler": {
        **BETAS,
        **LIMITED,
        "prediction_type": ANY,
        "set_alpha_to_one": FLAG,
        "rescale_betas_zero_snr": FLAG,
    },
    # From the last alpha-bar of squaredcos_cap_v2, 2e-9, Runge-Kutta steps are mostly rounding.
    "PNDMScheduler": {
        **BETAS,
        "beta_schedule": st.sampled_from(["linear", "scaled_linear"]),
        "prediction_type": NOISE,
        "skip_prk_steps": FLAG,
        "set_alpha_to_one": FLAG,
    },
    "LCMScheduler": {**DISTILLED, "original_inference_steps": st.sampled_from([50, 25])},
    "TCDScheduler": {**DISTILLED, "original_inference_steps": st.sampled_from([50, 25])},
    "LMSDiscreteScheduler": RESPACED,
    "EulerDiscreteScheduler": {
        **RESPACED,
        "interpolation_type": st.sampled_from(["linear", "log_linear"]),
        "timestep_type": st.sampled_from(["discrete", "continuous"]),
        "final_sigmas_type": FINAL,
        "rescale_betas_zero_snr": FLAG,
    },
    "EulerAncestralDiscreteScheduler": {
        **BETAS,
        "prediction_type": NOISE,
        "rescale_betas_zero_snr": FLAG,
    },
    "HeunDiscreteScheduler": {**RESPACED, "clip_sample": FLAG},
    "KDPM2DiscreteScheduler": {**RESPACED, "prediction_type": NOISE},
    # With the last beta of squaredcos_cap_v2 diffusers' first timestep is rounding, or NaN.
    "KDPM2AncestralDiscreteScheduler": {
        **RESPACED,
        "prediction_type": NOISE,
        "beta_schedule": st.sampled_from(["linear", "scaled_linear"]),
    },
    "DPMSolverSDEScheduler": {**RESPACED, "prediction_type": NOISE},
    "DPMSolverMultistepScheduler": {
        **DPM,
        "algorithm_type": st.sampled_from(
            ["dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"]
        ),
        "euler_at_final": FLAG,
        "use_lu_lambdas": FLAG,
        "rescale_betas_zero_snr": FLAG,
    },
    "DDIMInverseScheduler": {
        **{k: v for k, v in BETAS.items() if k != "timestep_spacing"},
        "timestep_spacing": st.sampled_from(["leading", "trailing"]),
        "clip_sample": FLAG,
        "clip_sample_range": st.sampled_from([1.0, 2.5]),
        "prediction_type": ANY,
        "set_alpha_to_one": FLAG,
        "rescale_betas_zero_snr": FLAG,
    },
    "DPMSolverMultistepInverseScheduler": {
        **{k: v for k, v in DPM.items() if k != "final_sigmas_type"},
        "algorithm_type": st.sampled_from(["dpmsolver", "dpmsolver++"]),
        "euler_at_final": FLAG,
        # Others begin with equal timesteps in diffusers, at the second of them.
        "sigmas": st.sampled_from([None, "use_karras_sigmas"]),
    },
    "DPMSolverSinglestepScheduler": {
        **{k: v for k, v in DPM.items() if k not in ("timestep_spacing", "steps_offset")},
        "algorithm_type": st.sampled_from(["dpmsolver", "dpmsolver++", "sde-dpmsolver++"]),
    },
    "UniPCMultistepScheduler": {
        **SNR,
        "predict_x0": FLAG,
        "solver_type": st.sampled_from(["bh1", "bh2"]),
        "final_sigmas_type": FINAL,
        "disable_corrector": st.sampled_from([[], [0], [1, 2]]),
        "rescale_betas_zero_snr": FLAG,
    },
    "SASolverScheduler": {
        **{k: v for k, v in SNR.items() if k != "solver_order"},
        "predictor_order": ORDER,
        "corrector_order": ORDER,
        "lambda_min_clipped": st.sampled_from([-float("inf"), -5.1]),
    },
    "DEISMultistepScheduler": SNR,
    "EDMEulerScheduler": EDM,
    "EDMDPMSolverMultistepScheduler": {
        **EDM,
        **THRESHOLDED,
        "solver_order": ORDER,
        "algorithm_type": st.sampled_from(["dpmsolver++", "sde-dpmsolver++"]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "lower_order_final": FLAG,
        "euler_at_final": FLAG,
    },
}

FLOW_OPTIONS = {
    "FlowMatchEulerDiscreteScheduler": {
        **FLOW,
        "use_dynamic_shifting": FLAG,
        "time_shift_type": st.sampled_from(["exponential", "linear"]),
        "shift_terminal": st.sampled_from([None, 0.1, 0.02]),
        "invert_sigmas": FLAG,
        "stochastic_sampling": FLAG,
        "sigmas": SIGMAS,
    },
    "FlowMatchLCMScheduler": {
        **FLOW,
        "use_dynamic_shifting": FLAG,
        "shift_terminal": st.sampled_from([None, 0.02]),
        "invert_sigmas": FLAG,
        "sigmas": SIGMAS,
    },
    "FlowMatchHeunDiscreteScheduler": FLOW,
    "DPMSolverMultistepScheduler": {
        **VELOCITY,
        "algorithm_type": st.sampled_from(["dpmsolver++", "sde-dpmsolver++"]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "final_sigmas_type": FINAL,
        "euler_at_final": FLAG,
    },
    "DPMSolverSinglestepScheduler": {
        **VELOCITY,
        "algorithm_type": st.sampled_from(["dpmsolver++", "sde-dpmsolver++"]),
        "solver_type": st.sampled_from(["midpoint", "heun"]),
        "final_sigmas_type": FINAL,
    },
    "UniPCMultistepScheduler": {
        **VELOCITY,
        "solver_type": st.sampled_from(["bh1", "bh2"]),
        "final_sigmas_type": FINAL,
        "disable_corrector": st.sampled_from([[], [0], [1, 2]]),
        "time_shift_type": st.sampled_from(["exponential", "linear"]),
        "shift_terminal": st.sampled_from([None, 0.1]),
        "use_karras_sigmas": FLAG,
    },
    "DEISMultistepScheduler": VELOCITY,
}

# What is drawn depends neither on a test's source nor on its name.
SEED = hypothesis.seed(0)

# In diffusers.
SLOW = ("KDPM2AncestralDiscreteScheduler", "KDPM2DiscreteScheduler", "DPMSolverSDEScheduler")


@st.composite
def runs(draw, name, options=OPTIONS):
    """Options (each may be left out), steps, and the share of steps that is left out."""
    config = {key: draw(value) for key, value in options[name].items() if draw(FLAG)}
    sigmas = config.pop("sigmas", None)
    if sigmas:
        config |= {sigmas: True}
    steps = draw(st.integers(1, 25))
    return config, steps, draw(st.integers(0, steps - 1)) if draw(FLAG) else 0


def test_every_sampler_has_its_options_here():
    assert {*OPTIONS, *FLOW_OPTIONS} == {*samplers.SCHEDULERS}


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_configurations_at_random_equal_diffusers(name):
    eta = {"TCDScheduler": {"eta": 0.3}, "DDIMScheduler": {"eta": 0.6}}.get(name, {})
    compared = []

    @SEED
    @hypothesis.settings(
        max_examples=examples(4, 10) if name in SLOW else examples(8, 40),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
    )
    @hypothesis.given(runs(name))
    def check(drawn):
        config, steps, skipped = drawn
        begin = skipped * samplers.SCHEDULERS[name].order
        if name == "PNDMScheduler" and not config.get("skip_prk_steps"):
            # Runge-Kutta's rows at a run's late levels magnify rounding a thousand times.
            begin = 0
        # There diffusers 0.42.1 divides a tensor by all of its thousand alphas.
        odd = config.get("thresholding") and config.get("algorithm_type") == "dpmsolver"
        hypothesis.assume(not (odd and name == "DPMSolverSinglestepScheduler"))
        # Its middle of two levels, of which the last is 0, is NaN or rounding in diffusers.
        hypothesis.assume(steps > 2 or name != "KDPM2AncestralDiscreteScheduler")
        try:
            scheduler = samplers.SCHEDULERS[name].from_config(config)
            schedule = scheduler.schedule(steps, begin=begin, **eta)
        except ValueError as error:
            hypothesis.note(str(error))
            # What no longer run can have may be refused for a short one.
            assert not all(
                diffusers_can(name, config, n, begin, eta) for n in (steps, max(steps, 20))
            )
            return
        expected = build(name, steps, **config)
        hypothesis.assume(not first_by_rounding(config, schedule, expected))
        compare(schedule, expected, begin=begin, **eta)
        compared.append(drawn)

    check()
    assert compared


def first_by_rounding(config, schedule, expected):
    """Whether sigmas of a formula begin where rounding says to which timestep diffusers cuts."""
    formula = config.get("use_exponential_sigmas") or config.get("use_beta_sigmas")
    return formula and abs(schedule.timesteps[0] - float(expected.timesteps[0])) == 1


@pytest.mark.parametrize("name", sorted(FLOW_OPTIONS))
def test_flow_matching_at_random_equals_diffusers(name):
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    always = {} if name.startswith("Flow") else flow
    compared = []

    @SEED
    @hypothesis.settings(
        max_examples=examples(10, 60),
        deadline=None,
        database=None,
        report_multiple_bugs=False,
    )
    @hypothesis.given(runs(name, FLOW_OPTIONS))
    def check(drawn):
        config, steps, skipped = drawn
        config |= always
        begin = skipped * samplers.SCHEDULERS[name].order
        mu = {"mu": 0.8} if config.get("use_dynamic_shifting") else {}
        try:
            schedule = samplers.SCHEDULERS[name].from_config(config)
            schedule = schedule.schedule(steps, begin=begin, **mu)
        except ValueError as error:
            hypothesis.note(str(error))
            assert not diffusers_can(name, config, steps, begin, {}, mu)
            return
        compare(schedule, build(name, steps, more=mu, **config), begin=begin)
        compared.append(drawn)

    check()
    assert compared


def diffusers_can(name, config, steps, begin, eta, mu=None):
    """Whether diffusers gives finite numbers, and no error, for these options."""
    try:
        scheduler = build(name, steps, more=mu, **config)
        noises = itertools.repeat(torch.ones(SHAPE))
        return np.isfinite(
            reference(scheduler, torch.ones(SHAPE).double(), noises, begin=begin, **eta)
        ).all()
    except (ValueError, IndexError, RuntimeError, UnboundLocalError):
        return False
