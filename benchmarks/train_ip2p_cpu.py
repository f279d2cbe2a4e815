"""InstructPix2Pix training steps per second against diffusers' script in PyTorch, on the CPU.

    python benchmarks/train_ip2p_cpu.py [--batch 32] [--repeats 7]

The model inside the package with its UNet widened to eight channels, from the same weights, pixels,
noise, timesteps and dropout, float32: both pictures through the autoencoder, the instruction
through the text encoder, the UNet's forward and backward pass, clipping, AdamW. In turns. The
PyTorch step is the inner loop of diffusers' examples/instruct_pix2pix/train_instruct_pix2pix.py.
"""

import argparse
import tempfile

import diffusers
import jax.numpy as jnp
import numpy as np
import torch
import training_steps
from machine import describe

from diffusax.checkpoints.hub import EMBEDDED
from diffusax.pipelines import DiffusionPipeline
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.recipes.editors import to_instruct_pix2pix
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.draws import Draws, Dropped

DROPOUT = 0.05


def inputs(base: BaseModel, size: int, b: int) -> dict[str, np.ndarray]:
    """A batch of noise pictures, and all random numbers of its step, channels last."""
    rng = np.random.default_rng(0)
    side, channels = size // base.factor, base.networks["vae"].config.latent_channels
    shape = (b, side, side, channels)
    ids = base.tokenize("make the background green")["input_ids"]
    return {
        "edited": rng.integers(0, 256, (b, size, size, 3), np.uint8),
        "original": rng.integers(0, 256, (b, size, size, 3), np.uint8),
        "ids": np.tile(ids, (b, 1)),
        "latent_noise": rng.standard_normal(shape, np.float32),
        "noise": rng.standard_normal(shape, np.float32),
        "timesteps": rng.integers(0, 1000, b).astype(np.int32),
        "uniform": rng.random(b, np.float32),
    }


def jax_step(base: BaseModel, data: dict[str, np.ndarray]):
    """A function that takes a step and returns the loss."""
    loss = DenoisingLoss(
        base.family,
        base.networks,
        base.scheduler.forward_process,
        base.scheduler.prediction_type,
        conditioning_dropout=DROPOUT,
    )
    u = data["uniform"]
    dropped = Dropped(u < 2 * DROPOUT, (u >= DROPOUT) & (u < 3 * DROPOUT))
    draws = Draws(data["latent_noise"], data["noise"], data["timesteps"], dropped)
    batch = {
        "pixel_values": data["edited"],
        "original_pixel_values": data["original"],
        "input_ids": data["ids"],
    }
    frozen = {name: base.load(name).params for name in ("vae", *base.text_encoders)}
    empty = {name: jnp.asarray(ids) for name, ids in base.tokenize("").items()}
    params = {"unet": base.load("unet").params}
    return training_steps.jax_steps(loss, params, {**frozen, "empty": empty}, batch, draws)


def torch_step(folder: str, data: dict[str, np.ndarray], empty: np.ndarray):
    """The inner loop of diffusers' train_instruct_pix2pix.py."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder, safety_checker=None)
    unet, vae, encoder = pipe.unet, pipe.vae.requires_grad_(False), pipe.text_encoder
    encoder.requires_grad_(False)
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config)

    def tensor(x: np.ndarray) -> torch.Tensor:
        return torch.tensor(np.moveaxis(x, -1, 1).copy()) if x.ndim == 4 else torch.tensor(x)

    edited, original = (2 * tensor(data[k]).float() / 255 - 1 for k in ("edited", "original"))
    ids, noise, latent_noise = (tensor(data[k]) for k in ("ids", "noise", "latent_noise"))
    timesteps, u = tensor(data["timesteps"]).long(), tensor(data["uniform"])
    null = torch.tensor(empty)[None].long()

    def compute():
        distribution = vae.encode(edited).latent_dist
        latents = (distribution.mean + distribution.std * latent_noise) * vae.config.scaling_factor
        noisy = scheduler.add_noise(latents, noise, timesteps)
        hidden = encoder(ids.long())[0]
        image = vae.encode(original).latent_dist.mode()
        without_text = (u < 2 * DROPOUT).reshape(-1, 1, 1)
        hidden = torch.where(without_text, encoder(null)[0], hidden)
        image = image * (1 - ((u >= DROPOUT) & (u < 3 * DROPOUT)).float()).reshape(-1, 1, 1, 1)
        prediction = unet(torch.cat([noisy, image], 1), timesteps, hidden, return_dict=False)[0]
        kind = scheduler.config.prediction_type
        target = noise if kind == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
        return prediction, target

    return training_steps.torch_steps(unet, compute)


def main() -> None:
    """Prints one line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    print(describe("torch", "diffusers", "optax"))
    with tempfile.TemporaryDirectory() as folder:
        pipe = DiffusionPipeline.from_pretrained(EMBEDDED["emoji"], dtype="float32")
        to_instruct_pix2pix(pipe).save_pretrained(folder)
        base = BaseModel.open(folder, edits=True)
        data = inputs(base, base.default_size, args.batch)
        ours = jax_step(base, data)
        theirs = torch_step(folder, data, base.tokenize("")["input_ids"])
    training_steps.compare("InstructPix2Pix", args.batch, ours, theirs, args.repeats)


if __name__ == "__main__":
    main()
