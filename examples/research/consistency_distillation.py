"""Distils a network into one that jumps from any noise level to the image: one step, or a few.

Y. Song et al., "Consistency Models" (2023), algorithm 2, in latents and with text as in S. Luo et
al., "Latent Consistency Models" (2023). The student is trained on samples of the teacher itself.

    python examples/research/consistency_distillation.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro
from few_steps import PROMPTS, ddim, report, sample

import diffusax


def consistent(unet, scheduler, x, t, context, sigma_data=0.5, scale=10.0):
    """Returns f(x, t) = c_skip x + c_out x0(x, t), which is x at t = 0 (LCM's appendix C)."""
    x0 = scheduler.get_predicted_original_sample(unet(x, t, context).sample, t, x)
    scaled = scale * t[:, None, None, None]
    norm = scaled**2 + sigma_data**2
    return sigma_data**2 / norm * x + scaled / jnp.sqrt(norm) * x0


def loss(student, average, teacher, scheduler, x0, t, noise, stride, context, c=1e-3):
    """Returns the pseudo-Huber distance of f at t and, after the teacher's step, at t - stride."""
    x = scheduler.add_noise(x0, noise, t)
    after = jnp.maximum(t - stride, 0)
    nearer = ddim(teacher, scheduler, x, t, after, context)
    wanted = jax.lax.stop_gradient(consistent(average, scheduler, nearer, after, context))
    difference = consistent(student, scheduler, x, t, context) - wanted
    return jnp.mean(jnp.sqrt(difference**2 + c**2) - c)


def main(
    model: str = "emoji",
    stride: int = 20,
    iterations: int = 600,
    batch: int = 24,
    learning_rate: float = 3e-4,
    decay: float = 0.95,
    output: Path = Path("out/consistency_distillation.png"),
):
    """Prints how far samples of one step are from the teacher's of 64, for both networks."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    scheduler, teacher, optimizer = pipe.scheduler, pipe.unet, optax.adam(learning_rate)
    contexts, _ = pipe.encode_prompt([*PROMPTS])
    shape = pipe.unet.config.in_channels, *[pipe.unet.config.sample_size] * 2

    @jax.jit
    def update(student, average, teacher, state, x0, key):
        for_data, for_t, for_noise = jax.random.split(key, 3)
        rows = jax.random.randint(for_data, (batch,), 0, len(x0))
        t = stride * jax.random.randint(for_t, (batch,), 1, 1000 // stride + 1) - 1
        noise = jax.random.normal(for_noise, (batch, *shape))
        given = average, teacher, scheduler, x0[rows], t, noise, stride
        gradients = jax.grad(loss)(student, *given, contexts[rows % len(contexts)])
        updates, state = optimizer.update(gradients, state)
        student = optax.apply_updates(student, updates)
        return student, optax.incremental_update(student, average, 1 - decay), state

    noise = jax.random.normal(jax.random.key(0), (16 * len(PROMPTS), *shape))
    x0 = jnp.array(sample(pipe, teacher, noise, jnp.tile(contexts, (16, 1, 1)), 64))
    student, average, state = teacher, teacher, optimizer.init(teacher)
    for key in jax.random.split(jax.random.key(1), iterations):
        student, average, state = update(student, average, teacher, state, x0, key)
    networks = {f"teacher, {count}": teacher for count in (64, 2, 1)} | {"student, 1": average}
    test = jax.random.normal(jax.random.key(2), (len(PROMPTS), *shape))
    report(pipe, networks, test, contexts, output)


if __name__ == "__main__":
    tyro.cli(main)
