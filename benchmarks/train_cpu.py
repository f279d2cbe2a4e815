"""Training steps per second against diffusers' text-to-image loop in PyTorch, on the CPU.

The same UNet, weights, latents, noise, timesteps and AdamW, float32. Latents and text embeddings
are given: a step is the UNet's forward and backward pass, clipping and the update. In turns.
    python benchmarks/train_cpu.py
"""

import argparse
import json

import diffusers
import jax.numpy as jnp
import numpy as np
import torch
import training_steps
from machine import describe
from unet_cpu import pytorch_unet

import diffusax
from diffusax.boundary.config import config_from_dict
from diffusax.checkpoints.hub import EMBEDDED
from diffusax.models import (
    AutoencoderKL,
    AutoencoderKLConfig,
    UNet2DConditionConfig,
    UNet2DConditionModel,
)
from diffusax.models.network import Network
from diffusax.networks import initialize
from diffusax.pipelines.families import STABLE_DIFFUSION
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws, Dropped


def embedded_unet() -> dict:
    """The config of the UNet inside the package."""
    config = json.loads((EMBEDDED["emoji"] / "unet" / "config.json").read_text("utf-8"))
    return {key: value for key, value in config.items() if not key.startswith("_")}


MODELS = {
    "emoji": embedded_unet(),
    "quarter of SD 2": {
        "sample_size": 32,
        "block_out_channels": (80, 160, 320, 320),
        "attention_head_dim": (1, 2, 5, 5),
        "cross_attention_dim": 256,
        "norm_num_groups": 16,
        "use_linear_projection": True,
    },
}
TOKENS = {"emoji": 20, "quarter of SD 2": 77}
BATCHES = {"emoji": 64, "quarter of SD 2": 8}


def compare(name: str, repeats: int) -> None:
    """Both trainings of a model, a step at a time."""
    config, b = MODELS[name], BATCHES[name]
    size = config["sample_size"]
    network = initialize(UNet2DConditionModel, config_from_dict(UNet2DConditionConfig, config))
    latents, noise, timesteps, hidden = draw_inputs(config, b, TOKENS[name])
    ours = jax_step(network, latents, noise, timesteps, hidden)
    reference = pytorch_unet(network.params, config)
    theirs = torch_step(reference, latents, noise, timesteps, hidden)
    about = f"{name} ({network.num_params / 1e6:.1f} M parameters, {size}x{size} latents)"
    training_steps.compare(about, b, ours, theirs, repeats)


def draw_inputs(config: dict, b: int, tokens: int) -> tuple[np.ndarray, ...]:
    """Latents, noise, timesteps and text embeddings of a batch."""
    size, channels = config["sample_size"], config.get("in_channels", 4)
    rng = np.random.default_rng(0)
    latents, noise = (rng.standard_normal((b, size, size, channels), np.float32) for _ in range(2))
    hidden = rng.standard_normal((b, tokens, config["cross_attention_dim"]), np.float32)
    return latents, noise, rng.integers(0, 1000, b).astype(np.int32), hidden


def jax_step(network, latents, noise, timesteps, hidden, *, lora=None, adapters=None):
    """A function that takes a step and returns the loss; with LoRA of its adapters."""
    # Only the autoencoder's scale is used where the latents are given.
    vae = Network(AutoencoderKL, AutoencoderKLConfig())
    networks = {"unet": network.network, "vae": vae}
    process = diffusax.DDPMScheduler().forward_process
    loss = DenoisingLoss(STABLE_DIFFUSION, networks, process, "epsilon", lora=lora)
    zeros = jnp.zeros_like(latents)
    moments = np.concatenate([latents / vae.config.scaling_factor, zeros - 60], axis=-1)
    none = jnp.zeros(len(latents), bool)
    draws = Draws(zeros, noise, timesteps, Dropped(none, none))
    batch = {"moments": moments, "encoder_hidden_states": hidden}
    frozen = {"empty": {"encoder_hidden_states": jnp.zeros(hidden.shape[1:])}}
    unet = {"unet": network.params}
    if lora is None:
        return training_steps.jax_steps(loss, unet, frozen, batch, draws)
    return training_steps.jax_steps(loss, adapters, {**frozen, **unet}, batch, draws)


def torch_step(unet, latents, noise, timesteps, hidden):
    """The inner loop of diffusers' train_text_to_image.py."""
    scheduler = diffusers.DDPMScheduler()
    latents, noise = (torch.tensor(np.moveaxis(x, -1, 1).copy()) for x in (latents, noise))
    timesteps, hidden = torch.tensor(timesteps).long(), torch.tensor(hidden)

    def compute():
        noisy = scheduler.add_noise(latents, noise, timesteps)
        return unet(noisy, timesteps, hidden, return_dict=False)[0], noise

    return training_steps.torch_steps(unet, compute)


def main() -> None:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(describe("torch", "diffusers", "optax"))
    for name in MODELS:
        compare(name, args.repeats)


if __name__ == "__main__":
    main()
