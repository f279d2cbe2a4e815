"""Losses against those of diffusers' examples/text_to_image loop, from the same numbers."""

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from support.tiny import build_stable_diffusion

from diffusax.training.optimizers import OptimizerConfig, make_optimizer
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws, Dropped
from diffusax.training.step.step import initial_state, make_train_step

STEPS, BATCH = 20, 4
LR, WEIGHT_DECAY = 1e-3, 1e-2
RUNS = {
    "sd1-epsilon": ("sd1", "epsilon", None, ("unet",)),
    "sd1-flow": ("sd1", "flow_prediction", None, ("unet",)),
    "sd2-v-min-snr-text-encoder": ("sd2", "v_prediction", 5.0, ("unet", "text_encoder")),
}


def batches(pipe, prediction) -> list[dict]:
    """Pictures, captions and every random number of each step."""
    rng = np.random.default_rng(0)
    captions = ["a red apple", "two dogs running", "", "the sea at night"]
    ids = pipe.tokenizer(captions, padding="max_length", max_length=77).input_ids

    def times(rng):
        if prediction == "flow_prediction":
            return rng.random(BATCH).astype(np.float32)
        return rng.integers(0, 1000, BATCH).astype(np.int32)

    return [
        {
            "pixel_values": rng.integers(0, 256, (BATCH, 32, 32, 3), np.uint8),
            "input_ids": np.asarray(ids, np.int32),
            "latent_noise": rng.standard_normal((BATCH, 8, 8, 4), np.float32),
            "noise": rng.standard_normal((BATCH, 8, 8, 4), np.float32),
            "timesteps": times(rng),
        }
        for _ in range(STEPS)
    ]


def torch_losses(pipe, run: list[dict], gamma: float | None, trained: tuple) -> list[float]:
    """The inner loop of diffusers' train_text_to_image.py and train_text_to_image_lora.py, or of
    train_dreambooth_sd3.py.
    """
    flow = isinstance(pipe.scheduler, diffusers.FlowMatchEulerDiscreteScheduler)
    scheduler = None if flow else diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    networks = [getattr(pipe, name) for name in trained]
    parameters = [p for network in networks for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LR, weight_decay=WEIGHT_DECAY)
    nchw = lambda x: torch.tensor(np.moveaxis(x, -1, 1).copy())  # noqa: E731
    losses = []
    for batch in run:
        pixels = nchw(batch["pixel_values"].astype(np.float32) / 127.5 - 1)
        with torch.no_grad():
            latent_dist = pipe.vae.encode(pixels).latent_dist
        latents = latent_dist.mean + latent_dist.std * nchw(batch["latent_noise"])
        latents = latents * pipe.vae.config.scaling_factor
        noise, timesteps = nchw(batch["noise"]), torch.tensor(batch["timesteps"])
        if flow:
            sigmas = timesteps.reshape(-1, 1, 1, 1)
            noisy, timesteps = (1 - sigmas) * latents + sigmas * noise, 1000 * timesteps
        else:
            timesteps = timesteps.long()
            noisy = scheduler.add_noise(latents, noise, timesteps)
        hidden = pipe.text_encoder(torch.tensor(batch["input_ids"]).long())[0]
        if flow:
            target = noise - latents
        elif scheduler.config.prediction_type == "epsilon":
            target = noise
        else:
            target = scheduler.get_velocity(latents, noise, timesteps)
        prediction = pipe.unet(noisy, timesteps, hidden, return_dict=False)[0]
        loss = torch.nn.functional.mse_loss(prediction, target, reduction="none").mean((1, 2, 3))
        if gamma is not None:
            snr = compute_snr(scheduler, timesteps)
            weights = torch.stack([snr, gamma * torch.ones_like(snr)], dim=1).min(dim=1)[0]
            loss = loss * weights / (snr + 1)
        loss = loss.mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def our_losses(folder, run: list[dict], gamma: float | None, trained: tuple) -> list[float]:
    base = BaseModel.open(str(folder))
    params = {name: base.load(name).params for name in base.networks}
    loss = DenoisingLoss(
        base.family,
        base.networks,
        base.scheduler.forward_process,
        base.scheduler.prediction_type,
        snr_gamma=gamma,
    )

    def with_draws(params, frozen, batch, keys):
        none = jnp.zeros(BATCH, bool)
        draws = Draws(
            batch["latent_noise"], batch["noise"], batch["timesteps"], Dropped(none, none)
        )
        return loss.with_draws(params, frozen, batch, draws)

    optimizer = make_optimizer(OptimizerConfig(learning_rate=LR, weight_decay=WEIGHT_DECAY), STEPS)
    step = jax.jit(make_train_step(with_draws, optimizer))
    state = initial_state({name: params[name] for name in trained}, optimizer, seed=0)
    frozen = {**params, "empty": {"input_ids": jnp.zeros(77, jnp.int32)}}
    losses = []
    for batch in run:
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sd1-epsilon", "sd1-flow", "sd2-v-min-snr-text-encoder"])
def test_losses_match_diffusers_over_twenty_steps(tmp_path, name):
    style, prediction, gamma, trained = RUNS[name]
    scheduler = diffusers.DDIMScheduler(
        beta_schedule="scaled_linear",
        clip_sample=False,
        prediction_type=prediction.replace("flow_", "v_"),
    )
    if prediction == "flow_prediction":
        scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    pipe = build_stable_diffusion(tmp_path / "model", style=style, scheduler=scheduler)
    run = batches(pipe, prediction)
    ours = our_losses(tmp_path / "model", run, gamma, trained)
    theirs = torch_losses(pipe, run, gamma, trained)
    assert theirs[-1] != pytest.approx(theirs[0], rel=0.05)
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)
