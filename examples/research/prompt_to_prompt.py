"""Edits an image by its prompt alone: the second prompt is drawn with maps of the first one.

A. Hertz et al., "Prompt-to-Prompt Image Editing with Cross Attention Control" (2022), section 3:
swapped and added words, weights of words, and the self-attention of the first steps.

    python examples/research/prompt_to_prompt.py --source "a frog" --target "a lion"
"""

import difflib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import tyro
from jax.tree_util import Partial
from PIL import Image

import diffusax
from diffusax.utils import labelled_grid


def share_cross(places, shared, weights, rows, probs, at):
    """Puts the first image's cross-attention in the place of the others', in the first rows.

    places: for each token its place in the source; shared: whether it has one; weights: of tokens.
    """
    source, *_ = own = probs[:: at.branches]  # images heads pixels tokens
    edited = jnp.where(shared & (at.row < rows), source[..., places], own) * weights
    return probs.at[:: at.branches].set(edited.at[0].set(source)), None


def share_self(rows, probs, at):
    """Puts the first image's self-attention in the place of the others', in the first rows."""
    own = probs[:: at.branches]  # images heads pixels pixels
    return probs.at[:: at.branches].set(jnp.where(at.row < rows, own[:1], own)), None


def edits(tokenizer, source, target, *, cross_rows, self_rows, weights=None):
    """Returns the hooks that draw `target` as `source` is drawn. weights: of words of the target.

    Tokens that both have share their maps, as do those that are swapped for as many others.
    """
    first, second = (tokenizer([text]).input_ids[0] for text in (source, target))
    length = tokenizer.model_max_length
    places, shared = np.arange(length), np.ones(length, bool)
    shared[: len(second)] = False
    for kind, i, end, j, stop in difflib.SequenceMatcher(None, first, second).get_opcodes():
        if kind == "equal" or (kind == "replace" and end - i == stop - j):
            places[j:stop], shared[j:stop] = np.arange(i, end), True
    factors = np.ones(length, np.float32)
    for word, weight in (weights or {}).items():
        own = tokenizer([word]).input_ids[0][1:-1]
        factors[np.isin(second, own).nonzero()[0]] = weight
    return {
        r".*attn2\.attention_probs": Partial(share_cross, places, shared, factors, cross_rows),
        r".*attn1\.attention_probs": Partial(share_self, self_rows),
    }


def main(
    model: str = "emoji",
    source: str = "a cat face on a purple background",
    target: str = "a lion on a purple background",
    weighted: str = "a red apple on a blue background",
    word: str = "red",
    weights: tuple[float, ...] = (-4, 1, 8),
    steps: int = 25,
    cross: float = 0.4,
    own: float = 1.0,
    guidance: float = 2.0,
    seed: int = 0,
    output: Path = Path("out/prompt_to_prompt.png"),
):
    """Draws the target alone and as the source is drawn, and a prompt with weights of a word."""
    pipe = diffusax.DiffusionPipeline.from_pretrained(model)
    call = {"num_inference_steps": steps, "guidance_scale": guidance, "seed": [seed, seed]}
    rows = {"cross_rows": round(cross * steps), "self_rows": round(own * steps)}

    def edited(first, second, weights=None):
        hooks = edits(pipe.tokenizer, first, second, weights=weights, **rows)
        return pipe([first, second], hooks=hooks, **call).images[1]

    images = [*pipe([source, target], **call).images, edited(source, target)]
    images += [edited(weighted, weighted, {word: weight}) for weight in weights]
    names = [source, target, f"{target}, prompt-to-prompt"]
    names += [f"{weighted}, {word} times {weight:g}" for weight in weights]
    large = [image.resize((128, 128), Image.Resampling.LANCZOS) for image in images]
    output.parent.mkdir(parents=True, exist_ok=True)
    labelled_grid([large], (), names).save(output)


if __name__ == "__main__":
    tyro.cli(main)
