"""Shows where in an image each word of its prompt is: heat maps of cross-attention.

R. Tang et al., "What the DAAM: Interpreting Stable Diffusion Using Cross Attention" (2023), section
2.2: the maps of all steps, layers and heads, enlarged to one size and added up.

    python examples/research/daam.py --prompt "a cat face on a purple background"
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from PIL import Image

import diffusax
from diffusax.utils import labelled_grid


@dataclasses.dataclass(frozen=True)
class Heat:
    """A hook that keeps the prompts' maps, averaged over heads: images side side tokens."""

    side: int

    def __call__(self, probs, at):
        maps = probs[:: at.branches].mean(1)
        images, pixels, tokens = maps.shape
        maps = maps.reshape(images, int(pixels**0.5), -1, tokens)
        return probs, jax.image.resize(maps, (images, self.side, self.side, tokens), "linear")


def heat_maps(pipe, prompt, **call):
    """Returns the images of square calls, and for each the heat of its tokens, side side tokens."""
    hooks = {r".*attn2\.attention_probs": Heat(pipe.unet.config.sample_size)}
    result = pipe(prompt, hooks=hooks, **call)
    return result.images, sum(rows.sum(0) for rows in result.kept.values())


def places(tokenizer, prompt, word):
    """Returns the places of a word's tokens in a prompt."""
    tokens, own = (tokenizer([text]).input_ids[0] for text in (prompt, word))
    own = own[1:-1]
    starts = (i for i in range(len(tokens)) if tokens[i : i + len(own)] == own)
    start = next(starts, None)
    if start is None:
        raise ValueError(f"words has {word!r}, which is not in the prompt {prompt!r}")
    return [*range(start, start + len(own))]


def overlay(image, heat):
    """Returns an image, darkened where there is little heat, side side."""
    heat = (heat - heat.min()) / (heat.max() - heat.min() + 1e-8)
    mask = Image.fromarray(np.uint8(255 * np.asarray(heat))).resize(
        image.size, Image.Resampling.BICUBIC
    )
    return Image.composite(image, Image.new("RGB", image.size), mask)


def main(
    model: str = "emoji",
    prompt: str = "a cat face on a purple background",
    words: tuple[str, ...] = ("cat", "face", "purple", "background"),
    steps: int = 25,
    guidance: float = 2.0,
    seed: int = 0,
    output: Path = Path("out/daam.png"),
):
    """Writes a row of pictures: the image, and where each word is in it."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    call = {"num_inference_steps": steps, "guidance_scale": guidance, "seed": seed}
    (image,), (heat,) = heat_maps(pipe, prompt, **call)
    cells = [image]
    for word in words:
        own = heat[..., jnp.array(places(pipe.tokenizer, prompt, word))].mean(-1)
        cells.append(overlay(image, own))
        row, column = np.unravel_index(own.argmax(), own.shape)
        print(f"{word}: hottest in row {row}, column {column} of {len(own)}")
    large = [cell.resize((160, 160), Image.Resampling.LANCZOS) for cell in cells]
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([large], (), [prompt, *words]).save(output)


if __name__ == "__main__":
    tyro.cli(main)
