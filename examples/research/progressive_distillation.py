"""Distils a sampler of N steps into a network that needs N/2, again and again.

T. Salimans and J. Ho, "Progressive Distillation for Fast Sampling of Diffusion Models" (2022),
algorithm 2. The student is trained on samples of the teacher itself.

    python examples/research/progressive_distillation.py --steps 8 --rounds 2
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import tyro

import diffusax
from diffusax.utils import labelled_grid

PROMPTS = ("a red apple", "a lion", "a pizza", "a fire engine", "a dog face", "a sunflower")


def levels(scheduler, t):
    """Returns (alpha, sigma), n 1 1 1, at timesteps n; a run ends at -1, with the level of 0."""
    alpha_bar = jnp.asarray(scheduler.alphas_cumprod)[jnp.maximum(t, 0)][:, None, None, None]
    return jnp.sqrt(alpha_bar), jnp.sqrt(1 - alpha_bar)


def ddim(unet, scheduler, x, t, after, context):
    """Returns x at the timesteps `after`, n, by one step of DDIM from the timesteps t, n."""
    raw = unet(x, t, context).sample
    alpha, sigma = levels(scheduler, after)
    x0 = scheduler.get_predicted_original_sample(raw, t, x)
    return alpha * x0 + sigma * scheduler.get_predicted_noise(raw, t, x)


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


@partial(jax.jit, static_argnames=("scheduler", "steps"))
def sample(unet, scheduler, noise, context, steps):
    """Returns latents b c h w of the network's own sampler, without noise."""
    state, table, step = scheduler.functional(steps, noise)

    def body(state, row):
        return step(state, row, unet(state[0], row.timestep, context).sample), None

    return jax.lax.scan(body, state, table)[0][0]


def main(
    model: str = "emoji",
    steps: int = 8,
    rounds: int = 2,
    iterations: int = 300,
    batch: int = 24,
    learning_rate: float = 2e-4,
    output: Path = Path("out/progressive_distillation.png"),
):
    """Prints how far samples of few steps are from the teacher's of 64, for both networks."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    scheduler, teacher, optimizer = pipe.scheduler, pipe.unet, optax.adam(learning_rate)
    contexts, _ = pipe.encode_prompt([*PROMPTS])
    side, channels = pipe.unet.config.sample_size, pipe.unet.config.in_channels

    @jax.jit
    def update(student, teacher, state, x0, stride, key):
        for_data, for_t, for_noise = jax.random.split(key, 3)
        rows = jax.random.randint(for_data, (batch,), 0, len(x0))
        t = stride * jax.random.randint(for_t, (batch,), 1, 1000 // stride + 1) - 1
        noise = jax.random.normal(for_noise, (batch, *x0.shape[1:]))
        given = teacher, scheduler, x0[rows], t, noise, stride, contexts[rows % len(contexts)]
        value, gradients = jax.value_and_grad(loss)(student, *given)
        updates, state = optimizer.update(gradients, state)
        return optax.apply_updates(student, updates), state, value

    noise = jax.random.normal(jax.random.key(0), (16 * len(PROMPTS), channels, side, side))
    context = jnp.tile(contexts, (16, 1, 1))
    x0 = sample(pipe.unet, scheduler, noise, context, 64)
    test = jax.random.normal(jax.random.key(1), (len(PROMPTS), channels, side, side))
    latents = {"teacher, 64": sample(pipe.unet, scheduler, test, contexts, 64)}
    for count in (steps >> i for i in range(1, rounds + 1)):
        student, state, stride = teacher, optimizer.init(teacher), 1000 // count
        for key in jax.random.split(jax.random.key(count), iterations):
            student, state, value = update(student, teacher, state, x0, stride, key)
        for name, unet in (("teacher", pipe.unet), ("student", student)):
            found = latents[f"{name}, {count}"] = sample(unet, scheduler, test, contexts, count)
            error = jnp.mean((found - latents["teacher, 64"]) ** 2)
            print(f"{name}, {count} steps: squared distance {error:.4f}")
        teacher = student
    images = [pipe.vae.decode(x / pipe.vae.config.scaling_factor).sample for x in latents.values()]
    output.parent.mkdir(parents=True, exist_ok=True)
    rows = [pipe.image_processor.postprocess(image) for image in images]
    labelled_grid(rows, [*latents]).save(output)


if __name__ == "__main__":
    tyro.cli(main)
