"""Runs of diffusers' schedulers and of ours on one model, every x of them."""

import importlib
import json
import sys
import types
import warnings
from unittest import mock

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax import samplers

SHAPE = (1, 4, 6, 6)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TOLERANCE = 1e-5
# The state is float32: where one step takes a large x to a small one, what the large one was
# rounded to stays.
ROUNDING = 1e-6


def build(name, **config):
    """diffusers' scheduler; some options only work with a warning that they are old."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return upstream_class(name)(**config)


def upstream_class(name):
    if name != "DPMSolverSDEScheduler":
        return getattr(diffusers, name)
    # It would draw from a library that does no more than what `Increments` does.
    sys.modules.setdefault("torchsde", types.ModuleType("torchsde"))
    return importlib.import_module("diffusers.schedulers.scheduling_dpmsolver_sde").__dict__[name]


class Increments:
    """A Brownian motion over steps of two halves, for DPMSolverSDE, from given draws."""

    def __init__(self, draws):
        self.draws, self.half = draws, None

    def __call__(self, start, end):
        draw = next(self.draws)
        if self.half is None:
            self.half = (end, draw)
            return draw
        (middle, first), self.half = self.half, None
        whole = (start - middle).sqrt() * first + (middle - end).sqrt() * draw
        return whole / (start - end).sqrt()


def config_of(scheduler):
    return json.loads(scheduler.to_json_string())


def model(x, t, xp):
    """Some function of x and t that is bounded, and linear in neither."""
    mixed = x + 0.5 * xp.flip(x, (2,)) + 0.25 * xp.flip(x, (3,))
    return xp.tanh(mixed) + 0.1 * xp.cos(3 * x + t / 100.0)


def widen(scheduler):
    """Has diffusers compute its coefficients in float64, from what it keeps in float32."""
    for name, value in vars(scheduler).items():
        if name.startswith(("sigmas", "alphas_cumprod", "final_alpha")) and torch.is_tensor(value):
            setattr(scheduler, name, value.double())


def reference(scheduler, x, noises, *, begin=0, end=None, constrain=None, **options):
    """Every x of a diffusers run, the initial one included; the noise comes from `noises`.

    begin, end: rows. constrain: (x, next timestep or None) -> x, after each row.
    """
    widen(scheduler)
    timesteps = scheduler.timesteps
    if begin and hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    timesteps, following = timesteps[begin:end], [*timesteps[begin + 1 :], None]
    xs, drawn = [x], iter(noises)
    module = sys.modules[type(scheduler).__module__]
    draw = mock.Mock(side_effect=drawn)
    if hasattr(scheduler, "noise_sampler"):
        scheduler.noise_sampler = Increments(drawn)
    with mock.patch.object(module, "randn_tensor", draw, create=True):
        for t, after in zip(timesteps, following):
            scaled = scheduler.scale_model_input(x, t)
            x = scheduler.step(model(scaled, t.float(), torch), t, x, **options).prev_sample
            if constrain is not None:
                x = constrain(x, after)
            xs.append(x)
    return np.stack([x.numpy() for x in xs])


@jax.jit
def one_row(state, table, i, noise):
    def apply(x, t, i):
        return model(x, t, jnp)

    return samplers.run(apply, state, table, i, i + 1, lambda _: noise)


def ours(schedule, x, noises):
    state, table, drawn = samplers.init_state(jnp.asarray(x)), schedule.table(), iter(noises)
    table, nothing = jax.device_put(table), jnp.zeros(x.shape)
    xs = [x]
    for i, draws in enumerate(schedule.draws_noise):
        noise = jnp.asarray(next(drawn).numpy()) if draws else nothing
        state = one_row(state, table, i, noise)
        xs.append(np.asarray(state[0]))
    return np.stack(xs)


def compare(schedule, scheduler, *, begin=0, end=None, rounding=ROUNDING, **options):
    """Asserts that the two runs are the same, timesteps, initial deviation and every x."""
    generator = torch.Generator().manual_seed(3)
    noises = [torch.randn(SHAPE, generator=generator) for _ in range(len(schedule))]
    x = torch.randn(SHAPE, generator=generator) * float(scheduler.init_noise_sigma)
    if begin:
        signal, noise = schedule.levels[0]
        x = signal * torch.randn(SHAPE, generator=generator) + noise * x / x.std()
        x = x.float()
    # In float64, so that the reference does not lose digits where a large x becomes a small one.
    expected = reference(scheduler, x.double(), noises, begin=begin, end=end, **options)
    actual = ours(schedule, x.numpy(), noises)
    np.testing.assert_allclose(
        schedule.timesteps, scheduler.timesteps[begin:end], rtol=1e-5, atol=1e-3
    )
    np.testing.assert_allclose(
        schedule.init_noise_sigma, float(scheduler.init_noise_sigma), rtol=1e-6
    )
    same(actual, expected, rounding)


def same(actual, expected, rounding=ROUNDING):
    largest = 0.0
    for a, b in zip(actual, expected, strict=True):
        largest = max(largest, np.abs(b).max())
        assert np.abs(a - b).max() <= TOLERANCE * np.abs(b).max() + rounding * largest
