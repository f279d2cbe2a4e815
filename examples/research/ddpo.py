"""Trains a network by a reward of its pictures, without the reward's gradient.

A run is a decision process whose actions are the samples after each step, with probabilities that
the step itself says: denoising diffusion policy optimization (Black et al. 2023, section 4.3).
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax
from PIL import Image

import diffusax
from diffusax.samplers import init_state, step_distribution
from diffusax.utils import contact_sheet

WORDS, SHARED = ("a red apple", "a grinning face", "a cat face"), 4
CLIP = 0.1
"""How far a ratio of probabilities may be from one, each a mean over an image's numbers."""


def reward(images):
    """Returns how blue pictures are, b H W 3 in [0, 1]: b. Any function of JAX, or none of it."""
    return (images[..., 2] - images[..., :2].mean(-1)).mean((1, 2))


def sample(unet, scheduler, text, key, steps):
    """Returns the latents of a run of DDIM with eta 1, n+1 b h w c, and their log p, n b."""
    size = unet.config["sample_size"]
    key, first = jax.random.split(key)
    noise = jax.random.normal(first, (len(text), size, size, unet.config["in_channels"]))
    state, table, step = scheduler.functional(steps, noise, eta=1.0)

    def body(state, given):
        row, key = given
        prediction = unet.run(state[0], row.timestep[None], text)
        after = step(state, row, prediction, jax.random.normal(key, noise.shape))
        return after, (after[0], log_prob(state, row, prediction, after[0]))

    _, (latents, old) = jax.lax.scan(body, state, (table, jax.random.split(key, steps)))
    return jnp.concatenate([noise[None], latents]), old


def log_prob(state, row, prediction, after):
    """Returns log p of the latents after a step, as a mean over an image's numbers: b."""
    return step_distribution(state, row, prediction).log_prob(after) / after[0].size


def policy_loss(unet, scheduler, text, latents, old, advantages):
    """Returns the clipped loss of the policy (equation 5, clipped as in Schulman et al. 2017)."""
    table = scheduler.functional(len(old), latents[0], eta=1.0).table

    @jax.checkpoint
    def body(total, given):
        row, before, after, old = given
        prediction = unet.run(row.in_scale * before, row.timestep[None], text)
        ratio = jnp.exp(log_prob(init_state(before), row, prediction, after) - old)
        clipped = jnp.clip(ratio, 1 - CLIP, 1 + CLIP)
        return total - jnp.minimum(advantages * ratio, advantages * clipped).mean(), None

    return jax.lax.scan(body, 0.0, (table, latents[:-1], latents[1:], old))[0] / len(old)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", default="ddpo.png")
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    pipe = diffusax.DiffusionPipeline.from_pretrained("emoji")
    text = jnp.repeat(jnp.concatenate([pipe.encode_prompt(words)[0] for words in WORDS]), SHARED, 0)
    policy, adam, drawn = pipe.unet, optax.adam(5e-4), []
    memory, rollout = adam.init(policy), jax.jit(sample, static_argnums=(1, 4))

    @jax.jit
    def improve(policy, memory, *run):
        slope = jax.grad(policy_loss)(policy, pipe.scheduler, text, *run)
        change, memory = adam.update(slope, memory)
        return optax.apply_updates(policy, change), memory

    for i in range(args.iterations + 1):
        latents, old = rollout(policy, pipe.scheduler, text, jax.random.key(i), args.steps)
        found = latents[-1] / pipe.vae.config["scaling_factor"]
        images = jnp.clip(pipe.vae.run(found, method="decode") / 2 + 0.5, 0, 1)
        rewards = reward(images).reshape(len(WORDS), SHARED)
        print(f"iteration {i}: mean reward {rewards.mean():.4f}", flush=True)
        # The advantage over the other images of the prompt (section 4.3, per-prompt statistics).
        scores = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-6)
        drawn.append(images)
        for _ in range(2):
            policy, memory = improve(policy, memory, latents, old, scores.ravel())
    rows = np.asarray(jnp.concatenate([drawn[0], drawn[-1]]) * 255).round().astype(np.uint8)
    contact_sheet([Image.fromarray(row) for row in rows], columns=len(text)).save(args.output)


if __name__ == "__main__":
    main()
