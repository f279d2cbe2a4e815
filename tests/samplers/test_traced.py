"""Gradients of runs to their sigmas and timesteps, beside PyTorch's autograd through diffusers."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.upstream_samplers import SD, SHAPE, model

from diffusax import samplers

SIGMAS = np.array([11.0, 4.0, 1.2, 0.3, 0.0], np.float32)
FLOWS = np.array([1.0, 0.7, 0.35, 0.1], np.float32)
X = np.random.default_rng(0).standard_normal(SHAPE).astype(np.float32)


def loss_of(scheduler, x, **lists):
    """A loss of the last sample, by our pure steps, each one computed again for the gradient."""
    state, table, step = scheduler.functional(None, x, **lists)

    @jax.checkpoint
    def body(state, row):
        prediction = model(row.in_scale * state[0], row.timestep, jnp)
        return step(state, row, prediction, None), None

    return (jax.lax.scan(body, state, table)[0][0] ** 2).sum()


def test_gradients_to_sigmas_equal_pytorch():
    theirs = torch.tensor(SIGMAS, requires_grad=True)
    scheduler = diffusers.EulerDiscreteScheduler(**SD)
    scheduler.set_timesteps(sigmas=SIGMAS.tolist())
    every = torch.tensor(samplers.EulerDiscreteScheduler(**SD).diffusion.sigmas).log()
    x = torch.tensor(X)
    for i in range(len(SIGMAS) - 1):
        # _sigma_to_t, which is NumPy's in diffusers.
        low = int((every <= theirs[i].log()).sum()) - 1
        t = low + (theirs[i].log() - every[low]) / (every[low + 1] - every[low])
        scheduler.sigmas, scheduler._step_index = theirs, i
        scheduler.is_scale_input_called = True
        scaled = x / (theirs[i] ** 2 + 1) ** 0.5
        x = scheduler.step(model(scaled, t.float(), torch), scheduler.timesteps[i], x).prev_sample
    (x**2).sum().backward()

    ours = samplers.EulerDiscreteScheduler(**SD)
    value, found = jax.jit(jax.value_and_grad(lambda s: loss_of(ours, X, sigmas=s)))(SIGMAS)
    np.testing.assert_allclose(value, (x**2).sum().item(), rtol=1e-4)
    expected = theirs.grad.numpy()
    np.testing.assert_allclose(
        found[:-1], expected[:-1], rtol=1e-3, atol=1e-4 * abs(expected).max()
    )
    # A run that ends elsewhere than at 0 is another.
    assert found[-1] == 0


def test_gradients_to_flow_matching_equal_pytorch():
    theirs = torch.tensor(FLOWS, requires_grad=True)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    shifted = 3 * theirs / (1 + 2 * theirs)
    levels = torch.cat([shifted, torch.zeros(1)])
    scheduler.set_timesteps(sigmas=FLOWS.tolist())
    x = torch.tensor(X)
    for i, level in enumerate(shifted):
        scheduler.sigmas, scheduler._step_index = levels, i
        t = scheduler.timesteps[i]
        x = scheduler.step(model(x, level * 1000, torch), t, x).prev_sample
    (x**2).sum().backward()

    ours = samplers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    value, found = jax.value_and_grad(lambda s: loss_of(ours, X, sigmas=s))(FLOWS)
    np.testing.assert_allclose(value, (x**2).sum().item(), rtol=1e-4)
    expected = theirs.grad.numpy()
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4 * abs(expected).max())


LISTS = [
    ("EulerDiscreteScheduler", "sigmas", SIGMAS),
    ("EulerDiscreteScheduler", "timesteps", np.array([900.3, 500.4, 123.7], np.float32)),
    ("HeunDiscreteScheduler", "timesteps", np.array([900.3, 500.4, 123.7], np.float32)),
    ("EDMEulerScheduler", "sigmas", SIGMAS),
    ("EDMDPMSolverMultistepScheduler", "sigmas", SIGMAS),
    ("FlowMatchEulerDiscreteScheduler", "sigmas", FLOWS),
    ("FlowMatchEulerDiscreteScheduler", "timesteps", 1000 * FLOWS),
    ("UniPCMultistepScheduler", "sigmas", 0.9 * FLOWS),
]


@pytest.mark.parametrize(("name", "kind", "values"), LISTS)
def test_traced_lists_have_the_table_of_numbers_and_its_derivatives(name, kind, values):
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
    scheduler = getattr(samplers, name)(**flow if name.startswith("UniPC") else {})
    if kind not in scheduler.custom:
        pytest.skip(f"{name} takes no {kind}")

    def columns(values):
        return scheduler.functional(None, X, **{kind: values}).table

    traced = jax.jit(columns)(values)
    plain = scheduler.functional(None, X, **{kind: [float(v) for v in values]}).table
    assert jax.tree.structure(traced) == jax.tree.structure(plain)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), traced, plain)

    many = jax.vmap(lambda v: columns(v).update)(np.stack([values, values]))
    np.testing.assert_allclose(many[1], plain.update, rtol=1e-6)
    # Differences of a wider step, of the tables themselves.
    direction = np.random.default_rng(1).uniform(-1, 0, len(values)).astype(np.float32)
    direction *= values
    _, slopes = jax.jvp(columns, (values,), (direction,))
    step = 2e-3
    start, end = (
        scheduler.functional(
            None, X, **{kind: (values.astype(float) + s * direction).tolist()}
        ).table
        for s in (0, 2 * step)
    )
    middle = jax.jvp(columns, (values + step * direction,), (direction,))[1]
    assert any(np.abs(x).max() > 1e-2 for x in jax.tree.leaves(slopes))
    # UniPC cuts timesteps to whole numbers, whose derivatives are 0.
    times = () if scheduler.whole_timesteps else ("timestep",)
    for field in ("update", "in_scale", "prediction", "level", *times):
        a, b = (np.asarray(getattr(one, field)) for one in (start, end))
        np.testing.assert_allclose(
            getattr(middle, field), (b - a) / (2 * step), rtol=2e-2, atol=3e-3 * np.abs(a).max()
        )


def test_errors_of_traced_lists_say_what_to_do():
    def table(scheduler, steps=None, **lists):
        return jax.jit(lambda **lists: scheduler.functional(steps, X, **lists).table)(**lists)

    euler = samplers.EulerDiscreteScheduler()
    with pytest.raises(ValueError, match="num_inference_steps must be None"):
        table(euler, 4, sigmas=SIGMAS)
    with pytest.raises(ValueError, match="only one of timesteps and sigmas"):
        table(euler, sigmas=SIGMAS, timesteps=SIGMAS)
    with pytest.raises(ValueError, match="DDIMScheduler does not take custom sigmas"):
        table(samplers.DDIMScheduler(), sigmas=SIGMAS)
    with pytest.raises(ValueError, match=r"whole numbers.*table.timestep"):
        table(samplers.DDPMScheduler(), timesteps=SIGMAS)
    with pytest.raises(ValueError, match="must be a list of numbers"):
        table(euler, sigmas=SIGMAS[None])
    with pytest.raises(Exception, match="descending list"):
        jax.block_until_ready(table(euler, sigmas=SIGMAS[::-1].copy()))
