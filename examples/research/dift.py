"""Finds points of one image in others by the features of a diffusion model.

L. Tang et al., "Emergent Correspondence from Image Diffusion" (2023), section 4: the output of a
block on the way up for the image with noise at one timestep, averaged over draws of the noise.

    python examples/research/dift.py --images "a cat face" "a lion"
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image, ImageDraw

import diffusax
from diffusax.utils import labelled_grid

COLOURS = ("red", "blue", "lime", "orange", "magenta")


def keep(features, at):
    return features, features


def dift(pipe, pixels, prompt="", *, block, t, draws, key):
    """Returns features of images b 3 H W in [-1, 1], b h w c: averages over draws of the noise."""
    vae, context = pipe.vae, pipe.encode_prompt([prompt] * len(pixels))[0]
    x0 = vae.encode(pixels).latent_dist.mode() * vae.config.scaling_factor
    total = 0
    for own in jax.random.split(key, draws):
        noise = jax.random.normal(own, x0.shape)
        x = pipe.scheduler.add_noise(x0, noise, jnp.full(len(x0), t))
        total += pipe.unet(x, t, context, hooks={block: keep}).kept[block]
    return total / draws


def matches(features, points, side):
    """Returns where points n 2 (x, y) of the first image are in each, b n 2, by cosines.

    features: b h w c, which are enlarged to side side.
    """
    b, *_, c = features.shape
    large = jax.image.resize(features, (b, side, side, c), "linear")
    large /= jnp.linalg.norm(large, axis=-1, keepdims=True)
    wanted = large[0, points[:, 1], points[:, 0]]
    best = jnp.einsum("nc,bhwc->bnhw", wanted, large).reshape(b, len(points), -1).argmax(-1)
    return jnp.stack([best % side, best // side], axis=-1)


def marked(image, points, scale):
    """Returns an image, enlarged, with points n 2 in colours."""
    large = image.resize((image.width * scale, image.height * scale), Image.Resampling.LANCZOS)
    draw = ImageDraw.Draw(large)
    for (x, y), colour in zip(np.asarray(points), COLOURS):
        draw.circle(((x + 0.5) * scale, (y + 0.5) * scale), 7, fill=colour, outline="white")
    return large


def main(
    model: str = "emoji",
    images: tuple[str, ...] = ("a cat face", "a cat face on a blue background", "a bear"),
    points: tuple[tuple[int, int], ...] = ((22, 30), (42, 30), (32, 46), (14, 10)),
    prompt: str = "",
    block: str = "up_blocks.1.resnets.0",
    timestep: int = 201,
    draws: int = 16,
    steps: int = 25,
    output: Path = Path("out/dift.png"),
):
    """Marks points of a generated image, and their matches in a moved copy and in other images."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    drawn = pipe([*images], seed=0, guidance_scale=2.0, num_inference_steps=steps).images
    moved, side = Image.new("RGB", drawn[0].size, "white"), drawn[0].width
    moved.paste(drawn[0].resize((11 * side // 16,) * 2), (side // 4, side // 16))
    drawn, names = [drawn[0], moved, *drawn[1:]], [images[0], "moved", *images[1:]]
    pixels = pipe.image_processor.preprocess(drawn)
    how = {"block": block, "t": timestep, "draws": draws, "key": jax.random.key(0)}
    found = matches(dift(pipe, pixels, prompt, **how), np.array(points), pixels.shape[-1])
    for name, own in zip(names, found):
        print(f"{name}: {own.tolist()}")
    cells = [marked(image, own, 3) for image, own in zip(drawn, found)]
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([cells], (), names).save(output)


if __name__ == "__main__":
    tyro.cli(main)
