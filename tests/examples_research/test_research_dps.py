"""Diffusion Posterior Sampling, beside PyTorch by hand."""

import jax
import numpy as np
import pytest
import torch
from conftest import SIDE, torch_parts
from dps import masked, residual, restore, separable
from jax.tree_util import Partial

MASK = np.ones((SIDE, SIDE), np.float32)
MASK[2:6, 3:7] = 0
MEANS = np.kron(np.eye(2), np.full((1, 4), 1 / 4)).astype(np.float32)
OPERATORS = {
    "inpainting": (Partial(masked, MASK), lambda x: x * torch.tensor(MASK)),
    "super-resolution": (Partial(separable, MEANS), lambda x: torch.nn.functional.avg_pool2d(x, 4)),
}


def torch_residual(pipe, operator, measured, x, t, context):
    raw = pipe.unet(x, t, context).sample
    x0, _ = torch_parts(pipe.scheduler, raw, t, x)
    images = pipe.vae.decode(x0 / pipe.vae.config.scaling_factor).sample
    difference = (measured - operator(images)).flatten(1)
    return torch.linalg.norm(difference, dim=1).sum(), raw


def torch_restore(pipe, operator, measured, strength, context, noise):
    scheduler, x = pipe.scheduler, noise[0]
    scheduler.set_timesteps(len(noise) - 1)
    for t, drawn in zip(scheduler.timesteps, noise[1:]):
        x = x.clone().requires_grad_()
        value, raw = torch_residual(pipe, operator, measured, x, t, context)
        (gradient,) = torch.autograd.grad(value, x)
        x0, eps = (part.detach() for part in torch_parts(scheduler, raw, t, x))
        # As diffusers' DDIM at eta=1, whose rounding makes a root of a negative number.
        after = max(int(t) - 1000 // scheduler.num_inference_steps, 0)
        a, b = scheduler.alphas_cumprod[t], scheduler.alphas_cumprod[after]
        variance = (1 - b) / (1 - a) * (1 - a / b)
        x = b**0.5 * x0 + (1 - b - variance).clamp(min=0) ** 0.5 * eps + variance**0.5 * drawn
        x = x - strength * gradient
    return pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample


@pytest.mark.parametrize("name", OPERATORS)
def test_the_residual_its_gradient_and_samples_match_pytorch(sides, name):
    pipe, (ours, theirs) = sides.jax, OPERATORS[name]
    noise, context = sides.noise(4, 2), sides.context(2)
    images = np.random.default_rng(3).uniform(-1, 1, (2, 3, SIDE, SIDE)).astype(np.float32)
    measured, tensors = theirs(torch.tensor(images)), map(torch.tensor, (noise, context))
    of_noise, of_context = tensors

    x = of_noise[0].clone().requires_grad_()
    value, _ = torch_residual(sides.torch, theirs, measured, x, 300, of_context)
    (expected,) = torch.autograd.grad(value, x)
    given = pipe.unet, pipe.vae, pipe.scheduler, ours, measured.numpy()
    residual_of = jax.value_and_grad(residual, argnums=5, has_aux=True)
    (found, _), gradient = residual_of(*given, noise[0], 300, context)
    assert found == pytest.approx(value.item(), rel=1e-4)
    np.testing.assert_allclose(gradient, expected, atol=1e-4)

    expected = torch_restore(sides.torch, theirs, measured, 0.5, of_context, of_noise)
    given = pipe.unet, pipe.vae, ours, measured.numpy(), 0.5, context, noise
    found = restore(*given, scheduler=pipe.scheduler, steps=3)
    np.testing.assert_allclose(found, expected, atol=1e-4)
