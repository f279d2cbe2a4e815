"""Runs of diffusers as users have them, all in float32, for every noise schedule and spacing."""

import itertools
import sys
import warnings
from unittest import mock

import numpy as np
import pytest
import torch
from support.upstream_samplers import SD, SHAPE, Increments, model, ours, upstream_class

from diffusax import samplers

pytestmark = [
    pytest.mark.filterwarnings("error"),
    # torch's, of NumPy, where diffusers makes an array of a tensor.
    pytest.mark.filterwarnings("ignore:__array_:DeprecationWarning"),
]

BETAS = ("linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace", "exp")
ENDS = [(0.0001, 0.02), (0.00085, 0.012), (0.0015, 0.0195)]


@pytest.mark.parametrize(("start", "end"), ENDS)
@pytest.mark.parametrize("schedule", ["linear", "scaled_linear", "squaredcos_cap_v2"])
def test_betas_are_those_of_diffusers_to_the_last_digit(schedule, start, end):
    options = {"beta_schedule": schedule, "beta_start": start, "beta_end": end}
    mine = samplers.DDPMScheduler(**options)
    theirs = upstream_class("DDPMScheduler")(**options)
    for name in ("betas", "alphas", "alphas_cumprod"):
        np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name).numpy())


def run(config, name, x, noises, steps):
    """The end of diffusers' run in the dtype of x, and of one that begins a little elsewhere."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scheduler = upstream_class(name).from_config(config)
        scheduler.set_timesteps(steps)
        if hasattr(scheduler, "noise_sampler"):
            scheduler.noise_sampler = Increments(iter(noises))
        scheduler.set_begin_index(0) if hasattr(scheduler, "set_begin_index") else None
        x = x * float(getattr(scheduler, "init_noise_sigma", 1.0))
        drawn = iter(noises)
        draw = mock.Mock(side_effect=lambda *_, **__: next(drawn).to(x.dtype))
        module = sys.modules[type(scheduler).__module__]
        eta = {"eta": 0.0} if name == "TCDScheduler" else {}
        with mock.patch.object(module, "randn_tensor", draw, create=True):
            for t in scheduler.timesteps:
                scaled = scheduler.scale_model_input(x, t)
                output = model(scaled, t.float(), torch).to(scaled.dtype)
                x = scheduler.step(output, t, x, **eta).prev_sample
    return x.double().numpy(), float(getattr(scheduler, "init_noise_sigma", 1.0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in samplers.SCHEDULERS if n[:4] not in ("EDME", "EDMD", "Flow")]
)
def test_runs_in_float32_are_as_near_as_float32_lets_them_be(name):
    generator = torch.Generator().manual_seed(3)
    noises = [torch.randn(SHAPE, generator=generator) for _ in range(30)]
    x = torch.randn(SHAPE, generator=generator)
    near = x * (1 + 2e-7 * torch.randn(SHAPE, generator=generator))
    spacings = ("linspace", "leading", "trailing")
    kinds = ("epsilon", "v_prediction", "sample")
    # Its coefficients are differences of float32 numbers there, which cancel for cosine betas.
    cancels = name.startswith(("DEIS", "LMS", "SASolver"))
    compared, wrong = 0, {}
    for betas, spacing, kind in itertools.product(BETAS, spacings, kinds):
        config = {"beta_schedule": betas, "timestep_spacing": spacing, "prediction_type": kind}
        config |= SD | {"beta_schedule": betas} if betas == "scaled_linear" else {}
        config |= {"clip_sample": False} if name in ("DDPMScheduler", "DDIMScheduler") else {}
        config |= {"skip_prk_steps": True} if name == "PNDMScheduler" else {}
        try:
            schedule = samplers.SCHEDULERS[name].from_config(config).schedule(12)
            expected, deviation = run(config, name, x, noises, 12)
        except (ValueError, NotImplementedError):
            continue
        scale = np.abs(expected).max()
        exact, moved = (run(config, name, start, noises, 12)[0] for start in (x.double(), near))
        doubt = max(np.abs(expected - other).max() for other in (exact, moved)) / scale
        found = ours(schedule, (x * deviation).numpy(), noises)[-1]
        error = np.abs(found - expected).max() / scale
        compared += 1
        if not error <= 5e-5 + (12 if cancels else 3) * doubt:
            wrong[betas, spacing, kind] = error, doubt
    assert compared >= 9
    assert not wrong
