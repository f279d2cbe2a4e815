"""Losses against those of diffusers' examples/unconditional_image_generation, same numbers."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.data_sets import write_image_folder
from support.effort import first
from support.tiny_unconditional import UNET, build_unconditional

from diffusax.training import (
    ImageDataConfig,
    OptimizerConfig,
    UnconditionalConfig,
    unconditional,
)
from diffusax.training.optimizers import make_optimizer
from diffusax.training.step.draws import Draws, Dropped
from diffusax.training.step.step import initial_state, make_train_step

STEPS, BATCH, SIDE = 6, 4, UNET["sample_size"]
# The script's optimizer.
ADAMW = {"beta1": 0.95, "weight_decay": 1e-6}
LR = 1e-3


def batches():
    """Pictures and every random number of each step."""
    rng = np.random.default_rng(0)
    shape = (BATCH, SIDE, SIDE, 3)
    return [
        {
            "pixel_values": rng.integers(0, 256, shape, np.uint8),
            "noise": rng.standard_normal(shape, np.float32),
            # At the first timesteps 1 - alpha-bar, of which the script divides by the float32, has
            # three digits.
            "timesteps": rng.integers(100, 1000, BATCH).astype(np.int32),
        }
        for _ in range(STEPS)
    ]


def torch_losses(pipe, run):
    """The inner loop of diffusers' train_unconditional.py."""
    unet, scheduler = pipe.unet.train(), pipe.scheduler
    optimizer = torch.optim.AdamW(
        unet.parameters(), lr=LR, betas=(0.95, 0.999), weight_decay=1e-6, eps=1e-8
    )
    nchw = lambda x: torch.tensor(np.moveaxis(x, -1, 1).copy())  # noqa: E731
    losses = []
    for batch in run:
        clean = nchw(batch["pixel_values"].astype(np.float32) / 127.5 - 1)
        noise, timesteps = nchw(batch["noise"]), torch.tensor(batch["timesteps"]).long()
        output = unet(scheduler.add_noise(clean, noise, timesteps), timesteps).sample
        if scheduler.config.prediction_type == "epsilon":
            loss = torch.nn.functional.mse_loss(output, noise)
        else:
            alpha = scheduler.alphas_cumprod[timesteps].reshape(-1, 1, 1, 1)
            weights = alpha / (1 - alpha)
            loss = weights * torch.nn.functional.mse_loss(output, clean, reduction="none")
            loss = loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def our_losses(recipe, run):
    def with_draws(params, frozen, batch, keys):
        none = jnp.zeros(BATCH, bool)
        draws = Draws(None, batch["noise"], batch["timesteps"], Dropped(none, none))
        return recipe.denoising.with_draws(params, frozen, batch, draws)

    optimizer = make_optimizer(OptimizerConfig(learning_rate=LR, **ADAMW), STEPS)
    step = jax.jit(make_train_step(with_draws, optimizer))
    state = initial_state(recipe.trained(), optimizer, seed=0)
    losses = []
    for batch in run:
        state, metrics = step(state, recipe.frozen(), batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.parametrize("kind", first(["small", "sample"]))
def test_losses_match_the_script_of_diffusers(tmp_path, kind):
    folder = build_unconditional(tmp_path / "model", kind)
    write_image_folder(tmp_path / "pictures", 2)
    config = UnconditionalConfig(
        model=str(folder),
        data=ImageDataConfig(str(tmp_path / "pictures")),
        compute_dtype="float32",
    )
    run = batches()
    ours = our_losses(unconditional(config), run)
    theirs = torch_losses(diffusers.DDPMPipeline.from_pretrained(folder), run)
    assert theirs[-1] != pytest.approx(theirs[0], rel=0.05)
    np.testing.assert_allclose(ours, theirs, rtol=2e-4)
