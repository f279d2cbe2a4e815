"""Means, deviations and log probabilities of stochastic steps, beside diffusers' and PyTorch's."""

import copy
import sys
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.upstream_samplers import SD, SHAPE, build, config_of, model

from diffusax import samplers

STEPS = 4
CASES = [
    ("DDIMScheduler", {**SD, "clip_sample": False, "set_alpha_to_one": False}, {"eta": 1.0}),
    ("DDIMScheduler", {"prediction_type": "v_prediction"}, {"eta": 0.4}),
    ("DDPMScheduler", {**SD, "clip_sample_range": 1.5}, {}),
    ("EulerAncestralDiscreteScheduler", SD, {}),
    ("KDPM2AncestralDiscreteScheduler", SD, {}),
    ("DPMSolverSDEScheduler", SD, {}),
    ("DPMSolverMultistepScheduler", {**SD, "algorithm_type": "sde-dpmsolver++"}, {}),
    ("TCDScheduler", SD, {"eta": 0.3}),
    ("LCMScheduler", SD, {}),
]


class Motion:
    """DPMSolverSDEScheduler's Brownian motion, whose next draw is `value`."""

    def __init__(self):
        self.value = self.half = None

    def __call__(self, start, end):
        if self.half is None:
            self.half = end, self.value
            return self.value
        (middle, first), self.half = self.half, None
        whole = (start - middle).sqrt() * first + (middle - end).sqrt() * self.value
        return whole / (start - end).sqrt()


def stepped(scheduler, prediction, t, x, noise, **options):
    """diffusers' sample after a step with this noise."""
    module = sys.modules[type(scheduler).__module__]
    if hasattr(scheduler, "noise_sampler"):
        scheduler.noise_sampler.value = noise
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with mock.patch.object(module, "randn_tensor", return_value=noise, create=True):
            return scheduler.step(prediction, t, x, **options).prev_sample


@pytest.mark.parametrize(("name", "config", "options"), CASES)
def test_log_probabilities_and_their_gradients_equal_pytorch(name, config, options):
    theirs = build(name, STEPS, **config)
    if hasattr(theirs, "noise_sampler"):
        theirs.noise_sampler = Motion()
    ours = samplers.scheduler_from_config({**config_of(theirs), **config})
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(SHAPE, generator=generator) * float(theirs.init_noise_sigma)
    state, table, step = ours.functional(STEPS, x.numpy(), **options)
    stochastic = 0
    for i, t in enumerate(theirs.timesteps):
        row = jax.tree.map(lambda column, i=i: column[i], table)
        drawn = torch.randn(SHAPE, generator=generator)
        scaled = theirs.scale_model_input(x, t)
        raw = model(scaled, t.float(), torch).requires_grad_()
        nothing, one = torch.zeros(SHAPE), torch.ones(SHAPE)
        mean = stepped(copy.deepcopy(theirs), raw, t, x, nothing, **options)
        above = stepped(copy.deepcopy(theirs), raw, t, x, one, **options)
        std = (above - mean).detach().double().mean().float()
        after = stepped(theirs, raw.detach(), t, x, drawn, **options)

        prediction, sample = jnp.asarray(raw.detach().numpy()), jnp.asarray(after.numpy())
        found = samplers.step_distribution(state, row, prediction)
        np.testing.assert_allclose(found.mean, mean.detach(), rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(found.std, std, rtol=1e-4, atol=1e-5)

        def log_prob(prediction, state=state, row=row, sample=sample):
            return samplers.step_distribution(state, row, prediction).log_prob(sample).sum()

        value, gradient = jax.jit(jax.value_and_grad(log_prob))(prediction)
        if std > 1e-4:
            stochastic += 1
            expected = torch.distributions.Normal(mean, std).log_prob(after).sum()
            expected.backward()
            np.testing.assert_allclose(value, expected.item(), rtol=1e-4)
            scale = float(raw.grad.abs().max())
            # Of samples far larger than the noise, float32 leaves few digits of it to both.
            rounding = 1e-6 * float(x.abs().max() / std)
            np.testing.assert_allclose(gradient / scale, raw.grad / scale, atol=1e-4 + rounding)
            np.testing.assert_allclose(found.noise_of(sample), drawn, atol=1e-3)
        else:
            assert value == 0
            assert not gradient.any()
        # The run goes on from its samples alone, with what the sampler keeps of the noise.
        state = step(state, row, prediction, found.noise_of(sample))
        x = after
        np.testing.assert_allclose(state[0], x, rtol=1e-4, atol=1e-4)
    assert stochastic >= STEPS - 1


def test_images_with_rows_of_their_own_have_their_own_deviations():
    tables = [samplers.DDIMScheduler(**SD).schedule(n, eta=1.0).table() for n in (4, 7)]
    row = jax.tree.map(lambda column: column[1], samplers.stack_tables(tables))
    rng = np.random.default_rng(0)
    x, raw, sample = (rng.standard_normal((2, 3, 3, 1)).astype(np.float32) for _ in range(3))
    found = samplers.step_distribution(samplers.init_state(jnp.asarray(x)), row, jnp.asarray(raw))
    assert found.std.shape == (2,)
    for i, table in enumerate(tables):
        alone = jax.tree.map(lambda column: column[1], table)
        one = samplers.init_state(jnp.asarray(x[i : i + 1]))
        single = samplers.step_distribution(one, alone, jnp.asarray(raw[i : i + 1]))
        log_prob = found.log_prob(sample)[i]
        np.testing.assert_allclose(log_prob, single.log_prob(sample[i : i + 1])[0], rtol=1e-5)
