"""Losses of DreamBooth against those of diffusers' examples/dreambooth/train_dreambooth.py.

The reference is that script's inner loop with prior preservation, and that of its kin with LoRA
(train_dreambooth_lora.py, train_dreambooth_lora_sdxl.py), on the same pictures, prompts, noise and
timesteps: what the recipe draws from its keys is handed to both.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import diffusers
import jax
import jax.numpy as jnp
import numpy as np
import peft
import pytest
import torch
from diffusers.training_utils import compute_snr
from diffusers.utils import convert_state_dict_to_diffusers
from peft.utils import get_peft_model_state_dict
from support.data_sets import picture
from support.effort import few
from support.lora import ATTENTION, TEXT_ATTENTION
from support.tiny import (
    LEVELS,
    SMALLEST_UNET,
    SMALLEST_VAE,
    build_stable_diffusion,
    build_stable_diffusion_xl,
)

from diffusax.training import (
    DreamBoothConfig,
    DreamBoothDataConfig,
    LoRAConfig,
    OptimizerConfig,
    dreambooth,
)
from diffusax.training.data.batches import Batches
from diffusax.training.optimizers import make_optimizer
from diffusax.training.recipes.dreambooth import one_by_one
from diffusax.training.step.step import initial_state, make_train_step

STEPS, BATCH, SEED = 20, 2, 3
WEIGHT_DECAY, PRIOR_WEIGHT = 1e-2, 0.7
# AdamW divides by the size of gradients, so that rounding errors grow with the rate.
RATES = {"xl": 2e-4}


class Run(NamedTuple):
    style: str
    prediction: str = "epsilon"
    gamma: float | None = None
    train_text_encoder: bool = False
    lora: bool = False


RUNS = {
    "smallest": Run("smallest"),
    "sd1": Run("sd1"),
    "sd2-min-snr-text-encoder": Run("sd2", "v_prediction", 5.0, True),
    "xl": Run("xl"),
    "sd1-lora": Run("sd1", lora=True),
    "xl-lora-text-encoders": Run("xl", train_text_encoder=True, lora=True),
}


def build(folder, style: str, prediction: str) -> Any:
    scheduler = diffusers.DDIMScheduler(**LEVELS, clip_sample=False, prediction_type=prediction)
    if style == "xl":
        return build_stable_diffusion_xl(folder, scheduler=scheduler)
    if style == "smallest":
        smallest = {"style": "sd1", "unet": SMALLEST_UNET, "vae": SMALLEST_VAE}
        return build_stable_diffusion(folder, scheduler=scheduler, **smallest)
    return build_stable_diffusion(folder, style=style, scheduler=scheduler)


def networks_of(pipe, run: Run) -> dict[str, Any]:
    """What is trained, or gets adapters."""
    names = ["unet", *(("text_encoder", "text_encoder_2") if run.train_text_encoder else ())]
    return {name: getattr(pipe, name) for name in names if hasattr(pipe, name)}


def add_adapters(folder, pipe, run: Run) -> None:
    """Adapters as those scripts begin with, which are saved for ours to go on from."""
    for network in (pipe.unet, pipe.text_encoder, getattr(pipe, "text_encoder_2", None)):
        if network is not None:
            network.requires_grad_(False)
    layers = {}
    for name, network in networks_of(pipe, run).items():
        targets = ATTENTION if name == "unet" else TEXT_ATTENTION
        options = {"init_lora_weights": "gaussian", "target_modules": targets}
        network.add_adapter(peft.LoraConfig(r=4, lora_alpha=4, **options))
        layers[f"{name}_lora_layers"] = convert_state_dict_to_diffusers(
            get_peft_model_state_dict(network)
        )
    pipe.save_lora_weights(folder, **layers)


def make_recipe(folder, run: Run, size: int) -> Any:
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
        snr_gamma=run.gamma,
        train_text_encoder=run.train_text_encoder,
        lora=LoRAConfig(path=str(folder / "lora") if run.lora else None),
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

    # Where the recipe embeds its prompts once, its batches have none.
    prompts = (recipe.config.instance_prompt, recipe.config.class_prompt)
    tokens = [recipe.base.tokenize(prompt) for prompt in prompts]
    ids = {name: np.repeat([own[name] for own in tokens], BATCH, 0) for name in tokens[0]}

    for step, batch in enumerate(run):
        found = {k: np.asarray(x) for k, x in with_numbers(batch, step).items()}
        yield {**ids, **{k: np.concatenate([x[0::2], x[1::2]]) for k, x in found.items()}}


def encoded(pipe, batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids = [torch.tensor(batch[k]).long() for k in ("input_ids", "input_ids_2") if k in batch]
    if len(ids) == 1:
        return pipe.text_encoder(ids[0])[0], None
    outputs = [
        encoder(x, output_hidden_states=True)
        for encoder, x in zip((pipe.text_encoder, pipe.text_encoder_2), ids)
    ]
    return torch.cat([o.hidden_states[-2] for o in outputs], dim=-1), outputs[1][0]


def torch_losses(pipe, steps: list[dict], run: Run, lr: float) -> list[float]:
    scheduler, gamma = diffusers.DDPMScheduler.from_config(pipe.scheduler.config), run.gamma
    networks = networks_of(pipe, run).values()
    parameters = [p for network in networks for p in network.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=lr, weight_decay=WEIGHT_DECAY)
    nchw = lambda x: torch.tensor(np.moveaxis(x, -1, 1).copy())  # noqa: E731
    mse = torch.nn.functional.mse_loss
    losses = []
    for batch in steps:
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
    run = RUNS[name]
    pipe = build(tmp_path / "model", run.style, run.prediction)
    if run.lora:
        add_adapters(tmp_path / "lora", pipe, run)
    recipe = make_recipe(tmp_path, run, 8 if run.style == "smallest" else 32)
    batches = Batches(recipe.source, recipe.example, batch_size=BATCH, seed=0)
    drawn = [next(batches) for _ in range(STEPS)]
    lr = RATES.get(name, 1e-3)
    ours = our_losses(recipe, drawn, lr)
    theirs = torch_losses(pipe, list(as_upstream(recipe, drawn)), run, lr)
    assert np.ptp(theirs) > 0.05
    np.testing.assert_allclose(ours, theirs, rtol=1e-5)
