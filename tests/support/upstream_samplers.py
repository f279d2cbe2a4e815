"""Runs of diffusers' schedulers and of ours on one model, every x of them."""

import contextlib
import json
import sys
import warnings
from unittest import mock

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import torch

from diffusax import samplers
from diffusax.samplers.rows import NOISE, P

diffusers.logging.set_verbosity_error()

SHAPE = (1, 4, 6, 6)
SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
TOLERANCE = 3e-6
# The state is float32: where one step takes a large x to a small one, what the large one was
# rounded to stays, and some steps magnify it.
ROUNDING = 1e-6


def build(name, steps=None, *, timesteps=None, sigmas=None, more=None, **config):
    """diffusers' scheduler, with its timesteps set; `more` are other arguments of that.

    Roots are rounded correctly: the last digit of torch's own depends on the machine.
    diffusers warns of old options, and is warned by NumPy.
    """
    given = {"timesteps": timesteps, "sigmas": sigmas, "num_inference_steps": steps}
    given = {key: value for key, value in given.items() if value is not None}
    with warnings.catch_warnings(), exact_roots():
        warnings.simplefilter("ignore")
        scheduler = upstream_class(name)(**config)
        if given:
            scheduler.set_timesteps(**given, **(more or {}))
    return scheduler


@contextlib.contextmanager
def exact_roots():
    power = torch.Tensor.__pow__

    def root(x):
        return power(x.double(), 0.5).to(x.dtype)

    def raised(x, exponent):
        return root(x) if exponent == 0.5 else power(x, exponent)

    with (
        mock.patch.object(torch.Tensor, "sqrt", root),
        mock.patch.object(torch.Tensor, "__pow__", raised),
    ):
        yield


def upstream_class(name):
    return getattr(diffusers, name)


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
    """What a file would hold of it; functions are in the config alone."""
    given = {key: value for key, value in scheduler.config.items() if not callable(value)}
    named = {"_class_name": type(scheduler).__name__, **given}
    return json.loads(json.dumps(named, default=lambda value: value.tolist()))


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
    # Without it diffusers begins at the second of two equal timesteps, and ends in an IndexError.
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(begin)
    timesteps, following = timesteps[begin:end], [*timesteps[begin + 1 :], None]
    xs, drawn = [x], iter(noises)
    module = sys.modules[type(scheduler).__module__]
    draw = mock.Mock(side_effect=drawn)
    if hasattr(scheduler, "noise_sampler"):
        scheduler.noise_sampler = Increments(drawn)
    with warnings.catch_warnings(), mock.patch.object(module, "randn_tensor", draw, create=True):
        warnings.simplefilter("ignore")
        for t, after in zip(timesteps, following):
            # Those of flow matching have no scale_model_input.
            scaled = getattr(scheduler, "scale_model_input", lambda x, t: x)(x, t)
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


def init_noise_sigma(scheduler):
    """The standard deviation that pipelines give the initial latents."""
    return float(getattr(scheduler, "init_noise_sigma", 1.0))


def noised(scheduler, sample, noise, timestep):
    """diffusers' add_noise, which those of flow matching call scale_noise."""
    if hasattr(scheduler, "scale_noise"):
        return scheduler.scale_noise(sample, timestep, noise)
    return scheduler.add_noise(sample, noise, timestep)


def compare(schedule, scheduler, *, begin=0, end=None, **options):
    """Asserts that the two runs are the same, timesteps, initial deviation and every x."""
    generator = torch.Generator().manual_seed(3)
    noises = [torch.randn(SHAPE, generator=generator) for _ in range(len(schedule))]
    x = torch.randn(SHAPE, generator=generator) * init_noise_sigma(scheduler)
    if begin:
        signal, noise = schedule.levels[0]
        x = signal * torch.randn(SHAPE, generator=generator) + noise * x / x.std()
        x = x.float()
    # In float64, so that the reference does not lose digits where a large x becomes a small one.
    expected = reference(scheduler, x.double(), noises, begin=begin, end=end, **options)
    actual = ours(schedule, x.numpy(), noises)
    np.testing.assert_allclose(
        schedule.timesteps, scheduler.timesteps[begin:end], rtol=1e-5, atol=5e-3
    )
    # A small sigma is the root of one less almost one, in float32 there.
    deviation = init_noise_sigma(scheduler)
    np.testing.assert_allclose(schedule.init_noise_sigma, deviation, rtol=1e-6, atol=1e-5)
    same(actual, expected, magnification(schedule))


def magnification(schedule):
    """How much each row may magnify the rounding of the x, float32, that it is given: n."""
    table = schedule.table()
    update = np.abs(table.update[: len(schedule), 0])
    predicted = np.abs(table.prediction[: len(schedule)]).sum(1)
    return update @ (1 - (P + NOISE).coefficients) + (update @ P.coefficients) * predicted


def same(actual, expected, magnified=None):
    """Asserts that two runs are the same, but for the rounding of float32."""
    largest = rounding = 0.0
    magnified = np.zeros(len(actual)) if magnified is None else np.append(0, magnified)
    for row, (a, b) in enumerate(zip(actual, expected, strict=True)):
        if not np.isfinite(b).all():
            # Where diffusers gives no picture, any will do.
            assert np.isfinite(actual).all()
            return
        largest = max(largest, np.abs(b).max())
        rounding = max(rounding, ROUNDING * max(magnified[row], 1) * largest)
        error, allowed = np.abs(a - b).max(), TOLERANCE * np.abs(b).max() + rounding
        assert error <= allowed, f"after row {row}: {error:.2g} (allowed {allowed:.2g})"
