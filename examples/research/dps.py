"""Restores images by Diffusion Posterior Sampling: inpainting and super-resolution.

H. Chung et al., "Diffusion Posterior Sampling for General Noisy Inverse Problems" (2023), algorithm
1, with the measurement in pixels and the diffusion in latents: after each step of the sampler, x
moves along -grad ||y - A(D(x0(x)))||, through network and decoder.

    python examples/research/dps.py --prompt "a lion on a blue background"
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from jax.tree_util import Partial

import diffusax
from diffusax.utils import labelled_grid


def masked(mask, images):
    """Returns b 3 H W without the pixels where the mask, H W, is zero."""
    return images * mask


def separable(matrix, images):
    """Returns the images with the matrix, n side, multiplied to rows and columns, b 3 n n."""
    return jnp.einsum("hi,wj,bcij->bchw", matrix, matrix, images)


def decode(vae, latents):
    """Returns the images of a diffusion model's latents, b 3 H W in [-1, 1]."""
    return vae.decode(latents / vae.config.scaling_factor).sample


def residual(unet, vae, scheduler, operator, measured, x, t, context):
    """Returns (sum of ||y - A(D(x0(x)))|| over images, the network's prediction)."""
    prediction = unet(x, t, context).sample
    x0 = scheduler.get_predicted_original_sample(prediction, t, x)
    difference = measured - operator(decode(vae, x0))
    return jnp.linalg.norm(difference.reshape(len(x), -1), axis=-1).sum(), prediction


@partial(jax.jit, static_argnames=("scheduler", "steps"))
def restore(unet, vae, operator, measured, strength, context, noise, *, scheduler, steps):
    """Returns images b 3 H W that are drawn from the posterior of what was measured.

    noise: 1+steps b c h w, standard normal: the first x, and that of each step (eta=1 is DDPM).
    """
    state, table, step = scheduler.functional(steps, noise[0], eta=1.0)

    def body(state, inputs):
        row, drawn = inputs
        t = row.timestep.astype(int)
        of_x = partial(residual, unet, vae, scheduler, operator, measured, t=t, context=context)
        gradient, prediction = jax.grad(of_x, has_aux=True)(state[0])
        return step(state, row, prediction, drawn).at[0].add(-strength * gradient), None

    return decode(vae, jax.lax.scan(body, state, (table, noise[1:]))[0][0])


def main(
    model: str = "emoji",
    truth: tuple[str, ...] = ("a lion", "a fire engine", "a dog face"),
    prompt: str = "",
    strength: float = 1.0,
    deviation: float = 0.02,
    steps: int = 100,
    output: Path = Path("out/dps.png"),
):
    """Measures generated images in two ways, and restores them by the measurement and a prompt."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    rows = {"truth": pipe([*truth], seed=0).images}
    pixels = pipe.image_processor.preprocess(rows["truth"])
    side, size = pixels.shape[-1], pipe.unet.config.sample_size
    mask = jnp.ones((side, side)).at[side // 4 : -side // 4, side // 4 : -side // 4].set(0)
    means = jnp.kron(jnp.eye(side // 8), jnp.full((1, 8), 1 / 8))
    context, _ = pipe.encode_prompt([prompt] * len(truth))
    shape = 1 + steps, len(truth), pipe.unet.config.in_channels, size, size
    noise = jax.random.normal(jax.random.key(1), shape)
    for name, operator in (("hole", Partial(masked, mask)), ("1/8", Partial(separable, means))):
        measured = operator(pixels)
        measured += deviation * jax.random.normal(jax.random.key(2), measured.shape)
        seen = jax.image.resize(measured, pixels.shape, "nearest").clip(-1, 1)
        rows[name] = pipe.image_processor.postprocess(seen)
        given = pipe.unet, pipe.vae, operator, measured, strength, context, noise
        found = restore(*given, scheduler=pipe.scheduler, steps=steps)
        error = jnp.linalg.norm(measured - operator(found)) / measured.size**0.5
        psnr = 10 * jnp.log10(4 / jnp.mean((found - pixels) ** 2))
        print(f"{name}: residual {error:.3f}, PSNR {psnr:.1f} dB")
        rows[f"{name}, restored"] = pipe.image_processor.postprocess(found)
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([*rows.values()], [*rows]).save(output)


if __name__ == "__main__":
    tyro.cli(main)
