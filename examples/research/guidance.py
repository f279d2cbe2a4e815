"""Guides samples by the gradient of a score: classifier guidance and CLIP guidance.

P. Dhariwal and A. Nichol, "Diffusion Models Beat GANs on Image Synthesis" (2021), algorithm 2. The
classifier sees the image that the network predicts at each step: its gradient goes through decoder
and network, and it need not know noise. The one in this file sees the colour of an image's border.

    python examples/research/guidance.py --clip openai/clip-vit-base-patch32 --texts "a blue sky"
"""

from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from jax.tree_util import Partial

import diffusax
from diffusax.utils import labelled_grid

COLOURS = {"red": (0.9, 0.1, 0.1), "green": (0.1, 0.7, 0.2), "blue": (0.1, 0.3, 0.9)}
COLOURS |= {"yellow": (1.0, 0.9, 0.1), "white": (1.0, 1.0, 1.0), "black": (0.0, 0.0, 0.0)}


def colour_score(labels, images, width=6, deviation=0.2):
    """Returns log p(label | image), b, of the border's colours; images: b 3 H W in [-1, 1]."""
    inside = jnp.pad(jnp.zeros([n - 2 * width for n in images.shape[2:]]), width, constant_values=1)
    mean = jnp.einsum("bchw,hw->bc", images / 2 + 0.5, inside / inside.sum())
    distances = ((mean[:, None] - jnp.array([*COLOURS.values()])) ** 2).sum(-1)
    return jax.nn.log_softmax(-distances / (2 * deviation**2))[jnp.arange(len(labels)), labels]


def clip_score(clip, tokens, mean, std, images):
    """Returns CLIP's logit of each image and its text, b; tokens: b t, mean and std: 3 1 1."""
    shape = *images.shape[:2], *[clip.config.vision_config.image_size] * 2
    images = jax.image.resize(images / 2 + 0.5, shape, "bicubic")
    return jnp.diagonal(clip(tokens, (images - mean) / std).logits_per_image)


def guided(unet, vae, scheduler, score, scale, x, t, context):
    """Returns the prediction, b c h w, for noise that is less by scale sigma_t grad (line 3)."""

    def score_of(x):
        prediction = unet(x, t, context).sample
        x0 = scheduler.get_predicted_original_sample(prediction, t, x)
        return score(vae.decode(x0 / vae.config.scaling_factor).sample).sum(), prediction

    gradient, prediction = jax.grad(score_of, has_aux=True)(x)
    alpha_bar = scheduler.alphas_cumprod[t]
    factor = scale * jnp.sqrt(1 - alpha_bar)
    if scheduler.prediction_type == "v_prediction":  # (noise - sigma_t x) / alpha_t
        factor = jnp.where(alpha_bar > 0, factor / jnp.sqrt(alpha_bar), 0)
    return prediction - factor * gradient


@partial(jax.jit, static_argnames=("scheduler", "steps"))
def sample(unet, vae, score, scale, context, noise, *, scheduler, steps):
    """Returns images b 3 H W; models and the score are pytrees, so nothing is a constant."""
    state, table, step = scheduler.functional(steps, noise)

    def body(state, row):
        given = unet, vae, scheduler, score, scale, state[0], row.timestep.astype(int), context
        return step(state, row, guided(*given)), None

    return vae.decode(jax.lax.scan(body, state, table)[0][0] / vae.config.scaling_factor).sample


def main(
    model: str = "emoji",
    prompt: str = "",
    clip: str | None = None,
    texts: tuple[str, ...] = ("a red apple", "the sea"),
    scales: tuple[float, ...] = (0, 0.5, 1, 2),
    steps: int = 50,
    output: Path = Path("out/guidance.png"),
):
    """Draws the same noise with growing scales, towards each colour, or by CLIP to each text."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    names, score = [*COLOURS], Partial(colour_score, jnp.arange(len(COLOURS)))
    if clip:
        names, network = [*texts], diffusax.CLIPModel.from_pretrained(clip)
        tokens = diffusax.CLIPTokenizer.from_pretrained(clip)(names, padding=True).input_ids
        options = diffusax.CLIPImageProcessor.from_pretrained(clip)
        colours = (jnp.array(x)[:, None, None] for x in (options.image_mean, options.image_std))
        score = Partial(clip_score, network, jnp.array(tokens), *colours)
    context, _ = pipe.encode_prompt([prompt] * len(names))
    shape = pipe.unet.config.in_channels, *[pipe.unet.config.sample_size] * 2
    noise = jnp.tile(jax.random.normal(jax.random.key(0), shape), (len(names), 1, 1, 1))
    rows, how = [], {"scheduler": pipe.scheduler, "steps": steps}
    for scale in map(jnp.float32, scales):
        images = sample(pipe.unet, pipe.vae, score, scale, context, noise, **how)
        rows.append(pipe.image_processor.postprocess(images))
        print(f"scale {scale:g}:", *(f"{n} {s:.2f}" for n, s in zip(names, score(images))))
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid(rows, [f"scale {s:g}" for s in scales], names).save(output)


if __name__ == "__main__":
    tyro.cli(main)
