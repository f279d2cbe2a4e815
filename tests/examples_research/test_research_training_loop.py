"""A training loop with optax, beside PyTorch's by hand, and what it saves in diffusers."""

import copy

import diffusers
import jax
import numpy as np
import optax
import torch
from training_loop import train_step

STEPS, BATCH, LR = 4, 2, 1e-2


def drawn(key, shape, total):
    """The numbers that `train_step` draws."""
    for_t, for_noise = jax.random.split(key)
    t = jax.random.randint(for_t, (BATCH,), 0, total)
    noise = jax.random.normal(for_noise, shape)
    return torch.tensor(np.array(t)).long(), torch.tensor(np.array(noise))


def torch_losses(pipe, latents, context, keys):
    unet, scheduler = copy.deepcopy(pipe.unet).requires_grad_(), pipe.scheduler
    optimizer = torch.optim.AdamW(unet.parameters(), lr=LR, weight_decay=1e-4)
    losses = []
    for key in keys:
        t, noise = drawn(key, latents.shape, len(scheduler.alphas_cumprod))
        target = noise
        if scheduler.config.prediction_type == "v_prediction":
            target = scheduler.get_velocity(latents, noise, t)
        raw = unet(scheduler.add_noise(latents, noise, t), t, context).sample
        loss = torch.nn.functional.mse_loss(raw, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, unet


def test_losses_match_pytorch_and_diffusers_opens_what_was_trained(sides, tmp_path):
    pipe, latents, context = sides.jax, sides.noise(BATCH), sides.context(BATCH)
    keys = jax.random.split(jax.random.key(0), STEPS)
    expected, trained = torch_losses(sides.torch, *map(torch.tensor, (latents, context)), keys)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR))
    step = jax.jit(train_step, static_argnames=("optimizer", "scheduler"))
    unet, state, losses = pipe.unet, optimizer.init(pipe.unet), []
    for key in keys:
        unet, state, loss = step(unet, state, optimizer, pipe.scheduler, latents, context, key)
        losses.append(float(loss))
    assert losses[0] != losses[-1]
    np.testing.assert_allclose(losses, expected, rtol=1e-4)

    unet.save_pretrained(tmp_path)
    opened = diffusers.UNet2DConditionModel.from_pretrained(tmp_path)
    inputs = torch.tensor(latents), 10, torch.tensor(context)
    with torch.no_grad():
        np.testing.assert_allclose(opened(*inputs)[0], trained(*inputs)[0], atol=1e-3)
