"""Trains a network with optax in a loop of its own, and saves it as diffusers opens it.

J. Ho et al., "Denoising Diffusion Probabilistic Models" (2020), algorithm 1, on latents. A model is
a pytree: the gradient of a loss in `pipe.unet` is a model, and so is what optax makes of both.

    python examples/research/training_loop.py --save out/striped
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

import diffusax
from diffusax.utils import labelled_grid

COLOURS = {"red": (220, 40, 40), "yellow": (250, 210, 40), "green": (60, 170, 70)}
COLOURS |= {"blue": (50, 100, 210), "black": (20, 20, 20), "pink": (250, 150, 190)}


def stripes(rng, side):
    """Returns (pixels, caption) of oblique stripes, side side 3 in [0, 1]."""
    first, second = rng.choice([*COLOURS], 2, replace=False)
    y, x = np.mgrid[:side, :side] / side
    wave = np.sin(2 * np.pi * (rng.uniform(1.5, 2.5) * (x + y) + rng.uniform()))
    share = (0.5 + np.clip(wave * 3, -0.5, 0.5))[..., None]
    pixels = share * np.array(COLOURS[first]) + (1 - share) * np.array(COLOURS[second])
    return pixels / 255, f"{first} and {second} stripes"


def loss(unet, scheduler, latents, context, t, noise):
    """Returns the mean squared error of the network's prediction at timesteps t, n."""
    x = scheduler.add_noise(latents, noise, t)
    target = noise
    if scheduler.prediction_type == "v_prediction":
        target = scheduler.get_velocity(latents, noise, t)
    return jnp.mean((unet(x, t, context).sample - target) ** 2)


def train_step(unet, state, optimizer, scheduler, latents, context, key):
    """Returns the network and the optimizer's state after a batch, and the batch's loss."""
    for_t, for_noise = jax.random.split(key)
    t = jax.random.randint(for_t, (len(latents),), 0, scheduler.num_train_timesteps)
    noise = jax.random.normal(for_noise, latents.shape)
    value, gradients = jax.value_and_grad(loss)(unet, scheduler, latents, context, t, noise)
    updates, state = optimizer.update(gradients, state, unet)
    return optax.apply_updates(unet, updates), state, value


def main(
    model: str = "emoji",
    images: int = 256,
    iterations: int = 400,
    batch: int = 16,
    learning_rate: float = 2e-4,
    save: Path | None = None,
    output: Path = Path("out/training_loop.png"),
):
    """Teaches the model stripes, and draws some before and after."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    rng = np.random.default_rng(0)
    examples = [stripes(rng, pipe.vae.config.sample_size) for _ in range(images)]
    pixels = pipe.image_processor.preprocess(np.stack([pixels for pixels, _ in examples]))
    latents = pipe.vae.encode(pixels).latent_dist.mean * pipe.vae.config.scaling_factor
    contexts, _ = pipe.encode_prompt([caption for _, caption in examples])
    prompts = ["red and yellow stripes", "blue and black stripes", "a lion"]
    rows = {"before": pipe(prompts, seed=0).images}

    warm = optax.warmup_cosine_decay_schedule(0, learning_rate, iterations // 10, iterations)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm))
    step = jax.jit(train_step, static_argnames=("optimizer", "scheduler"), donate_argnums=(0, 1))
    unet, state, losses = jax.tree.map(jnp.copy, pipe.unet), optimizer.init(pipe.unet), []
    for key in jax.random.split(jax.random.key(0), iterations):
        chosen = rng.choice(images, batch)
        given = optimizer, pipe.scheduler, latents[chosen], contexts[chosen], key
        unet, state, value = step(unet, state, *given)
        losses.append(float(value))
        if len(losses) % max(1, iterations // 8) == 0:
            print(f"{len(losses)}: loss {np.mean(losses[-iterations // 8 :]):.4f}")
    pipe.unet = unet
    rows["after"] = pipe(prompts, seed=0).images
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([*rows.values()], [*rows], prompts).save(output)
    if save:
        pipe.save_pretrained(save)


if __name__ == "__main__":
    tyro.cli(main)
