"""Distils a sampler of N steps into a network that needs N/2, again and again.

T. Salimans and J. Ho, "Progressive Distillation for Fast Sampling of Diffusion Models" (2022),
algorithm 2. The student is trained on samples of the teacher itself.

    python examples/research/progressive_distillation.py --counts 4 2
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro
from few_steps import PROMPTS, ddim, levels, report, sample

import diffusax


def target(teacher, scheduler, x, t, stride, context):
    """Returns the x0 with which one step of DDIM leads to where two of the teacher's lead."""
    y = ddim(teacher, scheduler, x, t, t - stride // 2, context)
    y = ddim(teacher, scheduler, y, t - stride // 2, t - stride, context)
    (alpha, sigma), (alpha_t, sigma_t) = levels(scheduler, t - stride), levels(scheduler, t)
    return (y - sigma / sigma_t * x) / (alpha - sigma / sigma_t * alpha_t)


def loss(student, teacher, scheduler, x0, t, noise, stride, context):
    """Returns the mean of (SNR + 1) ||x0_target - x0_student||^2, which is an error of v."""
    x = scheduler.add_noise(x0, noise, t)
    wanted = target(teacher, scheduler, x, t, stride, context)
    found = scheduler.get_predicted_original_sample(student(x, t, context).sample, t, x)
    return jnp.mean((wanted - found) ** 2 / levels(scheduler, t)[1] ** 2)


def main(
    model: str = "emoji",
    counts: tuple[int, ...] = (4, 2),
    iterations: int = 300,
    batch: int = 24,
    learning_rate: float = 2e-4,
    output: Path = Path("out/progressive_distillation.png"),
):
    """Prints how far samples of few steps are from the teacher's of 64, for both networks."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    scheduler, teacher, optimizer = pipe.scheduler, pipe.unet, optax.adam(learning_rate)
    contexts, _ = pipe.encode_prompt([*PROMPTS])
    shape = pipe.unet.config.in_channels, *[pipe.unet.config.sample_size] * 2

    @jax.jit
    def update(student, teacher, state, x0, stride, key):
        for_data, for_t, for_noise = jax.random.split(key, 3)
        rows = jax.random.randint(for_data, (batch,), 0, len(x0))
        t = stride * jax.random.randint(for_t, (batch,), 1, 1000 // stride + 1) - 1
        noise = jax.random.normal(for_noise, (batch, *shape))
        given = teacher, scheduler, x0[rows], t, noise, stride, contexts[rows % len(contexts)]
        updates, state = optimizer.update(jax.grad(loss)(student, *given), state)
        return optax.apply_updates(student, updates), state

    noise = jax.random.normal(jax.random.key(0), (16 * len(PROMPTS), *shape))
    x0 = jnp.array(sample(pipe, teacher, noise, jnp.tile(contexts, (16, 1, 1)), 64))
    original, networks = teacher, {"teacher, 64": teacher}
    for count in counts:
        student, state = teacher, optimizer.init(teacher)
        for key in jax.random.split(jax.random.key(count), iterations):
            student, state = update(student, teacher, state, x0, 1000 // count, key)
        networks |= {f"teacher, {count}": original, f"student, {count}": student}
        teacher = student
    test = jax.random.normal(jax.random.key(1), (len(PROMPTS), *shape))
    report(pipe, networks, test, contexts, output)


if __name__ == "__main__":
    tyro.cli(main)
