"""Guides samples by the gradient of a score: classifier guidance and CLIP guidance.

P. Dhariwal and A. Nichol, "Diffusion Models Beat GANs on Image Synthesis" (2021), algorithm 2. The
classifier looks at the image that the network predicts at each step, so that its gradient goes
through the decoder and the network, and it need not know noisy images (CLIP guidance as of K.
Crowson, 2021). The one in this file classifies the colour of an image's border.

    python examples/research/guidance.py --scales 0 1 2
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
    logits = jax.nn.log_softmax(-distances / (2 * deviation**2))
    return jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]


def clip_score(clip, texts, mean, std, images):
    """Returns CLIP's similarities times its scale, b; texts: b d, mean and std: 3 1 1."""
    side = clip.config.vision_config.image_size
    images = jax.image.resize(images / 2 + 0.5, (*images.shape[:2], side, side), "bicubic")
    found = clip.get_image_features((images - mean) / std)
    norms = jnp.linalg.norm(found, axis=-1) * jnp.linalg.norm(texts, axis=-1)
    return jnp.exp(clip.params["logit_scale"]) * (found * texts).sum(-1) / norms


def guided(unet, vae, scheduler, score, scale, x, t, context):
    """Returns the network's prediction, b c h w, moved along the gradient of the score.

    The predicted noise moves by -scale sigma_t grad (the paper's line 3); so v = (noise - sigma_t
    x) / alpha_t moves by 1 / alpha_t times that, unless there is no signal.
    """

    def score_of(x):
        prediction = unet(x, t, context).sample
        x0 = scheduler.get_predicted_original_sample(prediction, t, x)
        return score(vae.decode(x0 / vae.config.scaling_factor).sample).sum(), prediction

    gradient, prediction = jax.grad(score_of, has_aux=True)(x)
    alpha_bar = jnp.asarray(scheduler.alphas_cumprod)[t]
    moved = scale * jnp.sqrt(1 - alpha_bar) * gradient
    if scheduler.prediction_type == "v_prediction":
        moved = jnp.where(alpha_bar > 0, moved / jnp.sqrt(alpha_bar), 0)
    return prediction - moved


@partial(jax.jit, static_argnames=("scheduler", "steps"))
def sample(unet, vae, score, scale, context, noise, *, scheduler, steps):
    """Returns images b 3 H W; the models and the score are pytrees, so nothing is a constant."""
    state, table, step = scheduler.functional(steps, noise)

    def body(state, row):
        t = row.timestep.astype(int)
        prediction = guided(unet, vae, scheduler, score, scale, state[0], t, context)
        return step(state, row, prediction), None

    latents = jax.lax.scan(body, state, table)[0][0]
    return vae.decode(latents / vae.config.scaling_factor).sample


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
        score = Partial(clip_score, network, network.get_text_features(tokens), *colours)
    context, _ = pipe.encode_prompt([prompt] * len(names))
    side = pipe.unet.config.sample_size
    noise = jax.random.normal(jax.random.key(0), (1, pipe.unet.config.in_channels, side, side))
    given, rows = (context, jnp.repeat(noise, len(names), 0)), []
    for scale in scales:
        how = {"scheduler": pipe.scheduler, "steps": steps}
        images = sample(pipe.unet, pipe.vae, score, jnp.float32(scale), *given, **how)
        rows.append(pipe.image_processor.postprocess(images))
        print(f"scale {scale:g}:", *(f"{n} {s:.2f}" for n, s in zip(names, score(images))))
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid(rows, [f"scale {s:g}" for s in scales], names).save(output)


if __name__ == "__main__":
    tyro.cli(main)
