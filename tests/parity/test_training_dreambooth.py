"""Losses of DreamBooth against those of diffusers' examples/dreambooth/train_dreambooth.py.

The reference is that script's inner loop with prior preservation, on the same pictures, prompts,
noise and timesteps: what the recipe draws from its keys is handed to both.
"""

from collections.abc import Iterator
from typing import Any

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from effort import few
from tiny import (
    LEVELS,
    SMALLEST_UNET,
    SMALLEST_VAE,
    build_stable_diffusion,
    build_stable_diffusion_xl,
)
from training.pictures import picture

from diffusax.training import DreamBoothConfig, DreamBoothDataConfig, OptimizerConfig, dreambooth
from diffusax.training.data.batches import Batches
from diffusax.training.optimizers import make_optimizer
from diffusax.training.recipes.dreambooth import one_by_one
from diffusax.training.step import initial_state, make_train_step

STEPS, BATCH, SEED = 20, 2, 3
WEIGHT_DECAY, PRIOR_WEIGHT = 1e-2, 0.7
# AdamW divides by the size of gradients, so that rounding errors grow with the rate.
RATES = {"xl": 2e-4}
RUNS = {
    "smallest": ("smallest", "epsilon", None, False),
    "sd1": ("sd1", "epsilon", None, False),
    "sd2-min-snr-text-encoder": ("sd2", "v_prediction", 5.0, True),
    "xl": ("xl", "epsilon", None, False),
}


def build(folder, style: str, prediction: str) -> Any:
    scheduler = diffusers.DDIMScheduler(**LEVELS, clip_sample=False, prediction_type=prediction)
    if style == "xl":
        return build_stable_diffusion_xl(folder, scheduler=scheduler)
    if style == "smallest":
        smallest = {"style": "sd1", "unet": SMALLEST_UNET, "vae": SMALLEST_VAE}
        return build_stable_diffusion(folder, scheduler=scheduler, **smallest)
    return build_stable_diffusion(folder, style=style, scheduler=scheduler)


def make_recipe(folder, gamma: float | None, train_text_encoder: bool, size: int) -> Any:
    """A recipe with three pictures of the subject and five of the class."""
    for kind, count in (("subject", 3), ("class", 5)):
        (folder / kind).mkdir()
        for i in range(count):
            picture(10 * count + i).save(folder / kind / f"{i}.png")
    config = DreamBoothConfig(
        model=str(folder / "model"),
        instance_data=str(folder / "subject"),
        instance_prompt="a photo of sks dog",
        class_prompt="a photo of dog",
        class_data=str(folder / "class"),
        class_images=5,
        prior_loss_weight=PRIOR_WEIGHT,
        snr_gamma=gamma,
        train_text_encoder=train_text_encoder,
        compute_dtype="float32",
        data=DreamBoothDataConfig(resolution=size),
    )
    return dreambooth(config)


def our_losses(recipe, run: list[dict], lr: float) -> list[float]:
    options = OptimizerConfig(learning_rate=lr, weight_decay=WEIGHT_DECAY)
    optimizer = make_optimizer(options, STEPS)
    step = jax.jit(make_train_step(recipe.loss, optimizer))
    state, frozen = initial_state(recipe.trained(), optimizer, SEED), recipe.frozen()
    losses = []
    for batch in run:
        state, metrics = step(state, frozen, batch)
        losses.append(float(metrics["loss"]))
    return losses


def as_upstream(recipe, run: list[dict]) -> Iterator[dict[str, np.ndarray]]:
    """The batches with their random numbers, the subject's first and then the class's."""

    @jax.jit
    def with_numbers(batch: dict, step: int) -> dict[str, jax.Array]:
        key = jax.random.fold_in(jax.random.key(SEED), step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(BATCH))
        apart, keys = one_by_one(batch, keys)
        draws = recipe.denoising.draw(apart, keys)._asdict()
        return {**apart, **{k: draws[k] for k in ("latent_noise", "noise", "timesteps")}}

    for step, batch in enumerate(run):
        found = {k: np.asarray(x) for k, x in with_numbers(batch, step).items()}
        yield {k: np.concatenate([x[0::2], x[1::2]]) for k, x in found.items()}


def encoded(pipe, batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = [torch.tensor(batch[k]).long() for k in ("input_ids", "input_ids_2") if k in batch]
    if len(ids) == 1:
        return pipe.text_encoder(ids[0])[0], None
    outputs = [
        encoder(x, output_hidden_states=True)
        for encoder, x in zip((pipe.text_encoder, pipe.text_encoder_2), ids)
    ]
    return torch.cat([o.hidden_states[-2] for o in outputs], dim=-1), outputs[1][0]


def torch_losses(
    pipe, run: list[dict], gamma: float | None, train_text_encoder: bool, lr: float
) -> list[float]:
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)
    parameters = list(pipe.unet.parameters())
    parameters += list(pipe.text_encoder.parameters()) if train_text_encoder else []
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY)
    nchw = lambda x: torch.tensor(np.moveaxis(x, -1, 1).copy())  # noqa: E731
    mse = torch.nn.functional.mse_loss
    losses = []
    for batch in run:
        with torch.no_grad():
            pixels = nchw(batch["pixel_values"].astype(np.float32) / 127.5 - 1)
            latent_dist = pipe.vae.encode(pixels).latent_dist
        latents = latent_dist.mean + latent_dist.std * nchw(batch["latent_noise"])
        latents = latents * pipe.vae.config.scaling_factor
        noise, timesteps = nchw(batch["noise"]), torch.tensor(batch["timesteps"]).long()
        noisy = scheduler.add_noise(latents, noise, timesteps)
        hidden, pooled = encoded(pipe, batch)
        added = None
        if pooled is not None:
            added = {"text_embeds": pooled, "time_ids": torch.tensor(batch["time_ids"])}
        options = {"added_cond_kwargs": added, "return_dict": False}
        prediction = pipe.unet(noisy, timesteps, hidden, **options)[0]
        if scheduler.config.prediction_type == "epsilon":
            target = noise
        else:
            target = scheduler.get_velocity(latents, noise, timesteps)
        prediction, prediction_prior = torch.chunk(prediction, 2, dim=0)
        target, target_prior = torch.chunk(target, 2, dim=0)
        prior_loss = mse(prediction_prior, target_prior)
        if gamma is None:
            loss = mse(prediction, target)
        else:
            timesteps, _ = torch.chunk(timesteps, 2, dim=0)
            snr = compute_snr(scheduler, timesteps)
            divisor = snr + (scheduler.config.prediction_type == "v_prediction")
            weights = torch.stack([snr, gamma * torch.ones_like(timesteps)], dim=1).min(dim=1)[0]
            loss = mse(prediction, target, reduction="none").mean((1, 2, 3))
            loss = (loss * weights / divisor).mean()
        loss = loss + PRIOR_WEIGHT * prior_loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.fixture
def one_thread():
    """PyTorch's threads wait for each other longer than they compute on networks this small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", few(RUNS, "smallest"))
def test_losses_with_prior_preservation_match_diffusers_over_twenty_steps(tmp_path, name):
    style, prediction, gamma, train_text_encoder = RUNS[name]
    pipe = build(tmp_path / "model", style, prediction)
    size = 8 if style == "smallest" else 32
    recipe = make_recipe(tmp_path, gamma, train_text_encoder, size)
    batches = Batches(recipe.source, recipe.example, batch_size=BATCH, seed=0)
    run = [next(batches) for _ in range(STEPS)]
    lr = RATES.get(name, 1e-3)
    ours = our_losses(recipe, run, lr)
    steps = list(as_upstream(recipe, run))
    theirs = torch_losses(pipe, steps, gamma, train_text_encoder, lr)
    assert np.ptp(theirs) > 0.05
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
