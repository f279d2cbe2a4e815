"""The losses of progressive and of consistency distillation, beside PyTorch by hand."""

import copy

import consistency_distillation
import jax
import numpy as np
import progressive_distillation
import pytest
import torch
from conftest import torch_parts
from support.tiny import randomize
from support.torch_params import params_of

TIMES, STRIDE = [249, 999], 250


@pytest.fixture
def students(sides):
    """Another network of the architecture on each side, the student, and a third, its average."""
    theirs = [randomize(copy.deepcopy(sides.torch.unet), seed) for seed in (7, 8)]
    ours = []
    for module in theirs:
        unet = sides.jax.unet
        params = params_of(unet.network, module.requires_grad_(False))
        ours.append(type(unet)(unet.network, params))
    return [module.requires_grad_() for module in theirs], ours


def torch_levels(scheduler, t):
    alpha_bar = scheduler.alphas_cumprod[t.clamp(min=0)].reshape(-1, 1, 1, 1)
    return alpha_bar.sqrt(), (1 - alpha_bar).sqrt()


def torch_ddim(unet, scheduler, x, t, after, context):
    x0, noise = torch_parts(scheduler, unet(x, t, context).sample, t, x)
    alpha, sigma = torch_levels(scheduler, after)
    return alpha * x0 + sigma * noise


def torch_progressive(student, teacher, scheduler, x0, t, noise, context):
    x = scheduler.add_noise(x0, noise, t)
    with torch.no_grad():
        y = torch_ddim(teacher, scheduler, x, t, t - STRIDE // 2, context)
        y = torch_ddim(teacher, scheduler, y, t - STRIDE // 2, t - STRIDE, context)
        alpha, sigma = torch_levels(scheduler, t - STRIDE)
        alpha_t, sigma_t = torch_levels(scheduler, t)
        wanted = (y - sigma / sigma_t * x) / (alpha - sigma / sigma_t * alpha_t)
    found, _ = torch_parts(scheduler, student(x, t, context).sample, t, x)
    return (((wanted - found) / sigma_t) ** 2).mean()


def torch_consistent(unet, scheduler, x, t, context):
    x0, _ = torch_parts(scheduler, unet(x, t, context).sample, t, x)
    scaled = 10 * t.reshape(-1, 1, 1, 1)
    return 0.25 / (scaled**2 + 0.25) * x + scaled / (scaled**2 + 0.25) ** 0.5 * x0


def torch_consistency(student, average, teacher, scheduler, x0, t, noise, context):
    x, after = scheduler.add_noise(x0, noise, t), (t - STRIDE).clamp(min=0)
    with torch.no_grad():
        nearer = torch_ddim(teacher, scheduler, x, t, after, context)
        wanted = torch_consistent(average, scheduler, nearer, after, context)
    difference = torch_consistent(student, scheduler, x, t, context) - wanted
    return ((difference**2 + 1e-6).sqrt() - 1e-3).mean()


def check(value, gradients, expected, module):
    """Asserts that a loss and its gradients, a model, are those of the module in PyTorch."""
    assert value == pytest.approx(expected.item(), rel=1e-4)
    expected.backward()
    gradient = copy.deepcopy(module)
    for own, theirs in zip(gradient.parameters(), module.parameters()):
        own.data = theirs.grad
    wanted = params_of(gradients.network, gradient.requires_grad_(False))
    scale = max(np.abs(x).max() for x in jax.tree.leaves(wanted))
    assert scale > 1e-3
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, atol=1e-4 * max(1, scale)),
        gradients.params,
        wanted,
    )


def test_progressive_distillation_matches_pytorch(sides, students):
    ((theirs, _), (ours, _)), (x0, noise) = students, sides.noise(2, 2)
    t, context = np.array(TIMES), sides.context(2)
    numbers = [torch.tensor(x) for x in (x0, t, noise, context)]
    pair = sides.torch.unet, sides.torch.scheduler
    expected = torch_progressive(theirs, *pair, *numbers)
    loss = jax.value_and_grad(progressive_distillation.loss)
    given = sides.jax.unet, sides.jax.scheduler, x0, t, noise, STRIDE, context
    check(*loss(ours, *given), expected, theirs)


def test_consistency_distillation_matches_pytorch(sides, students):
    ((theirs, average), (ours, our_average)), (x0, noise) = students, sides.noise(2, 2)
    t, context = np.array(TIMES), sides.context(2)
    numbers = [torch.tensor(x) for x in (x0, t, noise, context)]
    pair = sides.torch.unet, sides.torch.scheduler
    expected = torch_consistency(theirs, average, *pair, *numbers)
    loss = jax.value_and_grad(consistency_distillation.loss)
    given = sides.jax.unet, sides.jax.scheduler, x0, t, noise, STRIDE, context
    check(*loss(ours, our_average, *given), expected, theirs)
