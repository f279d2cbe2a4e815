"""Flow matching against diffusers' schedulers: each intermediate x, parts of runs, and levels."""

import importlib
import warnings

import numpy as np
import pytest
import torch
from support.upstream_samplers import (
    SHAPE,
    build,
    compare,
    config_of,
    noised,
    reference,
    upstream_class,
)

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

STEPS = (1, 2, 4, 7, 20, 50)
EULER, HEUN = "FlowMatchEulerDiscreteScheduler", "FlowMatchHeunDiscreteScheduler"
LCM = "FlowMatchLCMScheduler"
DPM, UNIPC = "DPMSolverMultistepScheduler", "UniPCMultistepScheduler"
SINGLE, DEIS = "DPMSolverSinglestepScheduler", "DEISMultistepScheduler"
FLUX = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
}
QWEN = {
    **FLUX,
    "shift": 1.0,
    "max_shift": 0.9,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
    "time_shift_type": "exponential",
}
LTX = {"shift_terminal": 0.1, "use_dynamic_shifting": True, "base_shift": 0.95, "max_shift": 2.05}
VELOCITY = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
WAN = {**VELOCITY, "flow_shift": 5.0}
SANA = {**VELOCITY, "flow_shift": 3.0}
# (class, options, mu)
CASES = {
    "sd3": (EULER, {"shift": 3.0}, None),
    "aura_flow": (EULER, {"shift": 1.73}, None),
    "defaults": (EULER, {}, None),
    "lumina2": (EULER, {"shift": 6.0}, None),
    "100_timesteps": (EULER, {"shift": 2.0, "num_train_timesteps": 100}, None),
    "flux_512": (EULER, FLUX, 0.63),
    "flux_1024": (EULER, FLUX, 1.15),
    "linear": (EULER, {**FLUX, "time_shift_type": "linear"}, 1.15),
    "qwen": (EULER, QWEN, 0.7),
    "ltx": (EULER, LTX, 1.5),
    "terminal_without_mu": (EULER, {"shift": 3.0, "shift_terminal": 0.1}, None),
    "karras": (EULER, {"shift": 3.0, "use_karras_sigmas": True}, None),
    "exponential": (EULER, {"shift": 3.0, "use_exponential_sigmas": True}, None),
    "beta": (EULER, {"shift": 3.0, "use_beta_sigmas": True}, None),
    "qwen_beta": (EULER, {**QWEN, "use_beta_sigmas": True}, 0.7),
    "stochastic": (EULER, {"shift": 3.0, "stochastic_sampling": True}, None),
    "stochastic_dynamic": (EULER, {**QWEN, "stochastic_sampling": True}, 0.7),
    "mochi": (EULER, {"invert_sigmas": True}, None),
    "mochi_stochastic": (EULER, {"invert_sigmas": True, "stochastic_sampling": True}, None),
    "lcm": (LCM, {"shift": 3.0}, None),
    "lcm_dynamic": (LCM, {**QWEN, "use_beta_sigmas": True}, 0.7),
    "heun": (HEUN, {}, None),
    "heun_sd3": (HEUN, {"shift": 3.0}, None),
    "wan": (UNIPC, WAN, None),
    "wan_order_3": (UNIPC, {**WAN, "solver_order": 3}, None),
    "wan_bh1": (UNIPC, {**WAN, "solver_type": "bh1", "disable_corrector": [0, 2]}, None),
    "wan_sigma_min": (UNIPC, {**WAN, "final_sigmas_type": "sigma_min"}, None),
    "wan_karras": (UNIPC, {**WAN, "use_karras_sigmas": True}, None),
    "unipc_dynamic": (UNIPC, {**VELOCITY, "use_dynamic_shifting": True}, 0.9),
    "unipc_linear": (
        UNIPC,
        {**VELOCITY, "use_dynamic_shifting": True, "time_shift_type": "linear"},
        1.4,
    ),
    "unipc_terminal": (UNIPC, {**WAN, "shift_terminal": 0.05}, None),
    "unipc_thresholding": (UNIPC, {**WAN, "thresholding": True}, None),
    "unipc_epsilon": (
        UNIPC,
        {"use_flow_sigmas": True, "predict_x0": False, "final_sigmas_type": "sigma_min"},
        None,
    ),
    "sana": (DPM, SANA, None),
    "sana_order_3": (DPM, {**SANA, "solver_order": 3}, None),
    "sana_heun": (DPM, {**SANA, "solver_type": "heun", "euler_at_final": True}, None),
    "sana_sde": (DPM, {**SANA, "algorithm_type": "sde-dpmsolver++"}, None),
    "sana_sde_3": (DPM, {**SANA, "algorithm_type": "sde-dpmsolver++", "solver_order": 3}, None),
    "sana_sigma_min": (DPM, {**SANA, "final_sigmas_type": "sigma_min"}, None),
    "sana_thresholding": (DPM, {**SANA, "thresholding": True}, None),
    "dpm_dynamic": (DPM, {**SANA, "use_dynamic_shifting": True}, 0.9),
    "dpm_dynamic_without_mu": (DPM, {**SANA, "use_dynamic_shifting": True}, None),
    "dpm_sample": (DPM, {"use_flow_sigmas": True, "prediction_type": "sample"}, None),
    "dpm_epsilon": (
        DPM,
        {
            "use_flow_sigmas": True,
            "algorithm_type": "dpmsolver",
            "final_sigmas_type": "sigma_min",
            "flow_shift": 2.0,
        },
        None,
    ),
    "singlestep": (SINGLE, SANA, None),
    "singlestep_3": (SINGLE, {**SANA, "solver_order": 3, "lower_order_final": True}, None),
    "singlestep_dynamic": (SINGLE, {**SANA, "use_dynamic_shifting": True}, 0.5),
    "deis": (DEIS, SANA, None),
    "deis_order_3": (DEIS, {**SANA, "solver_order": 3}, None),
    "deis_dynamic": (DEIS, {**SANA, "use_dynamic_shifting": True}, 0.5),
    "deis_epsilon": (DEIS, {"use_flow_sigmas": True, "thresholding": True}, None),
}
SIGMAS = [1.0, 0.94, 0.71, 0.5, 0.5, 0.21, 0.03]


def arguments(mu):
    return {} if mu is None else {"mu": mu}


def pair(case, steps=None, **given):
    """diffusers' scheduler, and ours with the arguments that its `schedule` takes."""
    name, config, mu = CASES[case]
    scheduler = build(name, steps, more=arguments(mu), **given, **config)
    return samplers.scheduler_from_config({**config_of(scheduler), **config}), scheduler


def has_no_single_step(case, steps):
    """The last of one step's sigmas is 1, which cannot be stretched to another."""
    return steps == 1 and CASES[case][1].get("shift_terminal")


@pytest.mark.parametrize("case", CASES)
def test_every_step_of_flow_matching_equals_diffusers(case):
    for steps in STEPS:
        ours, scheduler = pair(case, steps)
        mu = arguments(CASES[case][2])
        if has_no_single_step(case, steps):
            assert not torch.isfinite(scheduler.sigmas).all()
            with pytest.raises(ValueError, match="no finite step"):
                ours.schedule(steps, **mu)
            continue
        compare(ours.schedule(steps, **mu), scheduler)


@pytest.mark.parametrize("case", CASES)
def test_image_to_image_with_flow_matching_equals_diffusers(case):
    for steps, skipped in ((10, 4), (10, 1), (12, 11)):
        ours, scheduler = pair(case, steps)
        begin = skipped * scheduler.order if hasattr(scheduler, "order") else skipped
        schedule = ours.schedule(steps, begin=begin, **arguments(CASES[case][2]))
        compare(schedule, scheduler, begin=begin)


@pytest.mark.parametrize("begin", [0, 3])
@pytest.mark.parametrize("case", CASES)
def test_levels_of_flow_matching_are_those_of_scale_noise(case, begin):
    ours, scheduler = pair(case, 8)
    begin *= scheduler.order
    schedule = ours.schedule(8, begin=begin, **arguments(CASES[case][2]))
    scheduler.set_begin_index(begin)
    one, none = torch.ones(1, 1), torch.zeros(1, 1)
    found = []

    def look(x, after):
        if after is not None:
            found.append(
                [float(noised(scheduler, *x, after[None])) for x in ((one, none), (none, one))]
            )
        return x

    look(None, scheduler.timesteps[begin])
    noises = [torch.randn(SHAPE) for _ in range(20)]
    reference(scheduler, torch.randn(SHAPE).double(), noises, begin=begin, constrain=look)
    np.testing.assert_allclose(schedule.levels[:-1], found, rtol=1e-5, atol=1e-6)
    last = float(scheduler.sigmas[-1])
    np.testing.assert_allclose(schedule.levels[-1], (1 - last, last), rtol=1e-5, atol=1e-6)
    assert np.allclose(schedule.levels.sum(1), 1)


@pytest.mark.parametrize(
    "case",
    ["sd3", "flux_1024", "qwen", "beta", "stochastic", "mochi", "lcm", "wan", "unipc_dynamic"],
)
def test_sigmas_of_flow_matching_equal_diffusers(case):
    """They lack the last, and are shifted as others are."""
    for sigmas in (SIGMAS, np.linspace(1.0, 1 / 7, 7).tolist(), [0.9]):
        if len(sigmas) == 1 and case == "qwen":
            continue
        if CASES[case][0] == UNIPC:
            # Between two equal levels it has no step.
            sigmas = sorted(set(sigmas), reverse=True)
        ours, scheduler = pair(case, sigmas=np.array(sigmas))
        schedule = ours.schedule(sigmas=sigmas, **arguments(CASES[case][2]))
        assert len(schedule) == len(sigmas)
        compare(schedule, scheduler)


@pytest.mark.parametrize("case", ["sd3", "flux_512", "karras", "mochi", "lcm"])
def test_timesteps_of_flow_matching_equal_diffusers(case):
    timesteps = [1000.0, 850.5, 400.0, 125.0]
    mu = arguments(CASES[case][2])
    ours, scheduler = pair(case, timesteps=timesteps)
    compare(ours.schedule(timesteps=timesteps, **mu), scheduler)
    # As CogView 4 has them: the model is told other timesteps than those of the sigmas.
    sigmas = [1.0, 0.7, 0.4, 0.1]
    ours, scheduler = pair(case, timesteps=timesteps, sigmas=sigmas)
    compare(ours.schedule(timesteps=timesteps, sigmas=sigmas, **mu), scheduler)


@pytest.mark.parametrize("module", ["flux.pipeline_flux", "qwenimage.pipeline_qwenimage"])
@pytest.mark.parametrize("options", [FLUX, QWEN])
def test_dynamic_mu_is_that_of_diffusers_pipelines(module, options):
    theirs = importlib.import_module(f"diffusers.pipelines.{module}").calculate_shift
    line = (options[k] for k in ("base_image_seq_len", "max_image_seq_len", "base_shift"))
    line = (*line, options["max_shift"])
    ours = samplers.FlowMatchEulerDiscreteScheduler(**options)
    for length in (256, 1024, 4096, 9000):
        assert ours.dynamic_mu(length) == pytest.approx(theirs(length, *line), rel=1e-12)
    with pytest.raises(ValueError, match="base_shift=None"):
        samplers.FlowMatchEulerDiscreteScheduler(base_shift=None).dynamic_mu(256)


@pytest.mark.parametrize("case", CASES)
def test_configs_of_flow_matching_go_to_diffusers_and_back(case):
    name, config, _ = CASES[case]
    ours = samplers.SCHEDULERS[name].from_config(config)
    with warnings.catch_warnings():
        # diffusers' own, of "dpmsolver".
        warnings.simplefilter("ignore")
        theirs = upstream_class(name).from_config(ours.to_config())
    assert samplers.scheduler_from_config(config_of(theirs)) == ours
    fresh = build(name, **config)
    for key, value in config_of(fresh).items():
        if key[0] != "_" and key not in ("lambda_min_clipped", "solver_p"):
            assert ours.to_config()[key] == value, key
    if name in (EULER, HEUN):
        assert set(ours.to_config()) - {"_class_name"} <= set(fresh.config)


def test_a_scheduler_of_flow_matching_is_swapped_for_another_as_in_diffusers():
    options = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    ours = samplers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    theirs = build(EULER, shift=3.0)
    for name in (UNIPC, DPM):
        mine = samplers.SCHEDULERS[name].from_config(ours.config, **options)
        upstream = type(build(name)).from_config(theirs.config, **options)
        for key, value in mine.to_config().items():
            if key not in ("_class_name", "lambda_min_clipped"):
                assert upstream.config[key] == value, key
        assert samplers.FlowMatchEulerDiscreteScheduler.from_config(mine).shift == 3.0


def test_mu_is_refused_without_dynamic_shifting_and_needed_with_it():
    for name in (EULER, HEUN, UNIPC, DPM, DEIS, SINGLE, "DDIMScheduler"):
        with pytest.raises(ValueError, match=f"{name} takes mu only with use_dynamic_shifting"):
            samplers.SCHEDULERS[name]().schedule(4, mu=1.0)
    for name in (EULER, UNIPC):
        with pytest.raises(ValueError, match="mu must be given"):
            samplers.SCHEDULERS[name](use_dynamic_shifting=True).schedule(4)
    euler = samplers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    for mu in (float("nan"), "1", 1e6):
        with pytest.raises(ValueError, match="mu must be"):
            euler.schedule(4, mu=mu)
    linear = samplers.DPMSolverMultistepScheduler(
        **SANA, use_dynamic_shifting=True, time_shift_type="linear"
    )
    with pytest.raises(ValueError, match="time_shift_type='exponential'"):
        linear.schedule(4, mu=1.0)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (UNIPC, {"prediction_type": "flow_prediction"}, "needs use_flow_sigmas=True"),
        (UNIPC, {**WAN, "predict_x0": False}, "needs predict_x0=True"),
        (UNIPC, {**WAN, "use_beta_sigmas": True}, "use_beta_sigmas cannot both"),
        (UNIPC, {"shift_terminal": 0.1}, "shift_terminal needs use_flow_sigmas"),
        (DPM, {**SANA, "use_karras_sigmas": True}, "use_karras_sigmas cannot both"),
        (DPM, {**SANA, "prediction_type": "v_prediction"}, "v_prediction.*not defined"),
        (
            DPM,
            {**SANA, "algorithm_type": "dpmsolver", "final_sigmas_type": "sigma_min"},
            "needs algorithm_type='dpmsolver",
        ),
        (
            SINGLE,
            {
                "use_flow_sigmas": True,
                "thresholding": True,
                "algorithm_type": "dpmsolver",
                "final_sigmas_type": "sigma_min",
            },
            "thresholding",
        ),
        (EULER, {"shift": 0.0}, "shift"),
        (EULER, {"shift_terminal": 1.0}, "shift_terminal"),
        (EULER, {"time_shift_type": "other"}, "time_shift_type"),
        (EULER, {"use_karras_sigmas": True, "use_beta_sigmas": True}, "only one"),
        (HEUN, {"shift": -1.0}, "shift"),
    ],
)
def test_options_that_flow_matching_cannot_have_are_errors(name, options, message):
    with pytest.raises(ValueError, match=message):
        samplers.scheduler_from_config({"_class_name": name, **options})


def test_runs_that_flow_matching_cannot_have_are_errors():
    euler, wan = samplers.FlowMatchEulerDiscreteScheduler(), samplers.UniPCMultistepScheduler(**WAN)
    for scheduler in (euler, wan):
        with pytest.raises(ValueError, match="sigmas must start at 1"):
            scheduler.schedule(sigmas=[1.2, 0.5])
    with pytest.raises(ValueError, match="timesteps must start at 1000"):
        euler.schedule(timesteps=[1001, 3])
    with pytest.raises(ValueError, match="same length"):
        euler.schedule(timesteps=[900, 3], sigmas=[0.9])
    with pytest.raises(ValueError, match="exactly one"):
        euler.schedule(1, sigmas=[0.9])
    with pytest.raises(ValueError, match="use_flow_sigmas=True"):
        samplers.UniPCMultistepScheduler().schedule(sigmas=[1.0, 0.5])
    with pytest.raises(ValueError, match="use_flow_sigmas=True"):
        samplers.DPMSolverMultistepScheduler(**SANA).schedule(timesteps=[900, 5])
    with pytest.raises(AttributeError, match="no discrete noise levels"):
        _ = euler.alphas_cumprod
