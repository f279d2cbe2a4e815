"""What schedulers show before and after a run begins, against diffusers': every list and number."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.upstream_samplers import SD, exact_roots, upstream_class

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

OLD = {**SD, "num_train_timesteps": 1000, "trained_betas": None}
"""What the configs of old checkpoints have in common."""
CONFIGS = {
    "stable-diffusion-v1-5": {
        "_class_name": "PNDMScheduler",
        "_diffusers_version": "0.7.0.dev0",
        **OLD,
        "clip_sample": False,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
    },
    "stable-diffusion-2-1": {
        "_class_name": "DDIMScheduler",
        "_diffusers_version": "0.8.0",
        **OLD,
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
    },
    "stable-diffusion-xl-base-1.0": {
        "_class_name": "EulerDiscreteScheduler",
        "_diffusers_version": "0.19.0.dev0",
        **OLD,
        "clip_sample": False,
        "interpolation_type": "linear",
        "prediction_type": "epsilon",
        "sample_max_value": 1.0,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "use_karras_sigmas": False,
    },
    "sdxl-turbo": {
        "_class_name": "EulerAncestralDiscreteScheduler",
        "_diffusers_version": "0.24.0.dev0",
        **OLD,
        "clip_sample": False,
        "prediction_type": "epsilon",
        "sample_max_value": 1.0,
        "set_alpha_to_one": False,
        "skip_prk_steps": True,
        "steps_offset": 1,
        "timestep_spacing": "trailing",
    },
    "ddpm-cifar10-32": {
        "_class_name": "DDPMScheduler",
        "_diffusers_version": "0.1.1",
        "beta_end": 0.02,
        "beta_schedule": "linear",
        "beta_start": 0.0001,
        "clip_sample": True,
        "num_train_timesteps": 1000,
        "trained_betas": None,
        "variance_type": "fixed_large",
    },
    "terminal-snr": {
        "_class_name": "DDIMScheduler",
        **OLD,
        "clip_sample": False,
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "set_alpha_to_one": True,
        "steps_offset": 1,
        "timestep_spacing": "trailing",
    },
    "dpm-karras": {
        "_class_name": "DPMSolverMultistepScheduler",
        **OLD,
        "algorithm_type": "dpmsolver++",
        "dynamic_thresholding_ratio": 0.995,
        "lower_order_final": True,
        "prediction_type": "epsilon",
        "solver_order": 2,
        "solver_type": "midpoint",
        "steps_offset": 1,
        "timestep_spacing": "leading",
        "use_karras_sigmas": True,
    },
    "cosine": {
        "_class_name": "DDPMScheduler",
        "beta_schedule": "squaredcos_cap_v2",
        "clip_sample": False,
        "num_train_timesteps": 1000,
        "prediction_type": "sample",
    },
    "beta-sigmas": {"_class_name": "EulerDiscreteScheduler", **OLD, "use_beta_sigmas": True},
    "exponential": {"_class_name": "HeunDiscreteScheduler", **OLD, "use_exponential_sigmas": True},
    "LCM": {
        "_class_name": "LCMScheduler",
        **OLD,
        "original_inference_steps": 50,
        "rescale_betas_zero_snr": False,
        "set_alpha_to_one": True,
        "steps_offset": 1,
        "timestep_scaling": 10.0,
    },
    "playground-v2.5": {
        "_class_name": "EDMDPMSolverMultistepScheduler",
        "num_train_timesteps": 1000,
        "prediction_type": "epsilon",
        "sigma_data": 0.5,
        "sigma_max": 80.0,
        "sigma_min": 0.002,
        "use_karras_sigmas": True,
    },
    "defaults": {},
}
FLOWS = {
    "FLUX.1-dev": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "base_image_seq_len": 256,
        "base_shift": 0.5,
        "max_image_seq_len": 4096,
        "max_shift": 1.15,
        "num_train_timesteps": 1000,
        "shift": 3.0,
        "use_dynamic_shifting": True,
    },
    "SD3": {
        "_class_name": "FlowMatchEulerDiscreteScheduler",
        "num_train_timesteps": 1000,
        "shift": 3.0,
    },
    "defaults": {},
}
EDMS = {"playground": {"prediction_type": "epsilon", "sigma_max": 80.0}, "defaults": {}}
LISTS = (
    "timesteps",
    "sigmas",
    "sigmas_interpol",
    "sigmas_up",
    "sigmas_down",
    "log_sigmas",
    "betas",
    "alphas",
    "alphas_cumprod",
    "alpha_t",
    "sigma_t",
    "lambda_t",
    "final_alpha_cumprod",
)
NUMBERS = (
    "init_noise_sigma",
    "order",
    "step_index",
    "begin_index",
    "num_inference_steps",
    "sigma_min",
    "sigma_max",
    "shift",
    "predict_x0",
    "state_in_first_order",
    "custom_timesteps",
)


def shown(scheduler, name):
    """An attribute as NumPy has it, or None where there is none."""
    # diffusers answers with options, too, and deprecates it.
    value = None if name in getattr(scheduler, "config", {}) else getattr(scheduler, name, None)
    return value.numpy() if torch.is_tensor(value) else value


def differences(ours, theirs):
    """The attributes that are not diffusers' in length, dtype or value."""
    found = []
    for name in LISTS:
        expected, actual = shown(theirs, name), shown(ours, name)
        if expected is None:
            continue
        if actual is None:
            found.append(f"{name}: missing")
        elif actual.shape != expected.shape or actual.dtype != expected.dtype:
            found.append(
                f"{name}: {actual.dtype}{actual.shape} for {expected.dtype}{expected.shape}"
            )
        elif not close(actual, expected):
            worst = np.nanmax(np.abs(np.float64(actual) - expected))
            found.append(f"{name}: off by {worst:.1e}")
    for name in NUMBERS:
        expected, actual = shown(theirs, name), shown(ours, name)
        if expected is not None and not (actual is not None and close(actual, expected)):
            found.append(f"{name}: {actual!r} for {expected!r}")
    return found


def close(actual, expected):
    actual, expected = np.float64(actual), np.float64(expected)
    return np.allclose(actual, expected, rtol=2e-6, atol=1e-6, equal_nan=True)


def refuses(name, config):
    """Whether diffusers raises an error for a config, at the latest in a step."""
    x = torch.zeros(1, 4, 4, 4)
    with quiet():
        try:
            scheduler = upstream_class(name).from_config(config)
            scheduler.set_timesteps(4)
            for t in scheduler.timesteps:
                scheduler.step(x, t, scheduler.scale_model_input(x, t))
        except (NotImplementedError, ValueError):
            return True
    return False


def pair(name, config):
    """Ours and diffusers' of a config, or skips what both refuse, or diffusers alone."""
    try:
        ours = samplers.SCHEDULERS[name].from_config(config)
    except ValueError:
        assert refuses(name, config)
        pytest.skip("both refuse it")
    with quiet():
        try:
            return ours, upstream_class(name).from_config(config)
        except NotImplementedError:
            pytest.skip("SA-Solver refuses the algorithms of DPM-Solver's configs there")


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings(), exact_roots():
        warnings.simplefilter("ignore")
        yield


KEPT = {
    "KDPM2DiscreteScheduler-stable-diffusion-v1-5",
    "KDPM2AncestralDiscreteScheduler-dpm-karras",
    "HeunDiscreteScheduler-playground-v2.5",
    "LMSDiscreteScheduler-playground-v2.5",
    "EulerDiscreteScheduler-beta-sigmas",
    "EulerAncestralDiscreteScheduler-sdxl-turbo",
    "DPMSolverMultistepScheduler-terminal-snr",
    "DPMSolverSDEScheduler-dpm-karras",
    "LCMScheduler-LCM",
    "EDMEulerScheduler-defaults",
    "FlowMatchEulerDiscreteScheduler-FLUX.1-dev",
}


def cases():
    """Each class with configs that its checkpoints have; everybody runs those kept."""
    for name in samplers.SCHEDULERS:
        kinds = FLOWS if name.startswith("Flow") else EDMS if name.startswith("EDM") else CONFIGS
        for config, values in kinds.items():
            case = f"{name}-{config}"
            marks = () if case in KEPT else pytest.mark.slow
            yield pytest.param(name, values, id=case, marks=marks)


@pytest.mark.parametrize(("name", "config"), [*cases()])
def test_what_a_scheduler_shows_is_diffusers(name, config):
    ours, theirs = pair(name, config)
    found = {}
    if ours.given_ends == (None, None) or not ours.begins_whole:
        # diffusers makes the first lists of these before it keeps the options of other classes.
        found[None] = differences(ours, theirs)
    mu = {"mu": 0.8} if config.get("use_dynamic_shifting") else {}
    for steps in (20, 7, 1):
        with quiet():
            try:
                theirs.set_timesteps(steps, **mu)
            except (TypeError, ValueError):
                # PNDM takes no single step, FlowMatchHeun no mu.
                continue
        ours.set_timesteps(steps, **mu)
        found[steps] = differences(ours, theirs)
    found = {key: value for key, value in found.items() if value}
    assert not found, found


@pytest.mark.parametrize("name", sorted(samplers.SCHEDULERS))
def test_traced_indices_choose_entries_of_every_list(name):
    scheduler = getattr(samplers, name)()
    scheduler.set_timesteps(5)
    for attribute in LISTS:
        whole = getattr(scheduler, attribute, None)
        if not isinstance(whole, np.ndarray):
            continue
        places = jnp.arange(min(3, whole.size)) if whole.ndim else ()

        def entries(places, whole=whole):
            return whole[places] if whole.ndim else jnp.asarray(whole)

        with quiet():
            expected = np.asarray(whole)[np.asarray(places, int)] if whole.ndim else whole
        np.testing.assert_allclose(jax.jit(entries)(places), expected, rtol=1e-6)
        if whole.ndim:
            np.testing.assert_allclose(jax.vmap(entries)(places), expected, rtol=1e-6)
            # Slices of a list are such lists, too.
            last = jax.jit(lambda i, whole=whole: whole[::-1][i, None])(0)
            np.testing.assert_allclose(last, np.asarray(whole)[-1:], rtol=1e-6)
