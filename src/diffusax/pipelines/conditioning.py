"""From prompts, or embeddings given in their place, to what the UNet attends to."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.pipelines import checks
from diffusax.text.prompts import tokenize_prompts
from diffusax.text.tokenizer import CLIPTokenizer


@dataclasses.dataclass(frozen=True)
class PromptEncoder:
    """How a call reads its prompts.

    encode: the compiled program, (input_ids, weights, clip_skip=, repeats=) -> (n repeats) t d.
    """

    tokenizer: CLIPTokenizer
    encode: Callable[..., jax.Array]
    repeats: int = 1
    clip_skip: int | None = None
    long_prompt: bool = False
    weighting: bool = False

    def __call__(self, texts: Sequence[str], windows: int | None = None) -> jax.Array:
        """Texts to (texts repeats) t d, each text's copies together."""
        tokens = tokenize_prompts(
            self.tokenizer,
            texts,
            long_prompt=self.long_prompt,
            weighting=self.weighting,
            windows=windows,
        )
        return self.encode(
            tokens.input_ids, tokens.weights, clip_skip=self.clip_skip, repeats=self.repeats
        )


def prompt_context(
    encoder: PromptEncoder,
    prompt: Any,
    negative_prompt: Any,
    prompt_embeds: Any,
    negative_prompt_embeds: Any,
    *,
    guided: bool,
    dim: int,
) -> jax.Array:
    """Embeddings of all images, b t d; with guidance 2b t d, the negative prompts first.

    Raises:
        ValueError: prompts missing, given twice, of the wrong type, or not as many as needed.
    """
    checks.check_prompts(prompt, prompt_embeds, negative_prompt, negative_prompt_embeds)
    if encoder.repeats < 1:
        raise ValueError(f"num_images_per_prompt must be at least 1 (got {encoder.repeats})")
    if prompt is None:
        prompts = None
        prompt_embeds = checks.check_embeds("prompt_embeds", prompt_embeds, dim)
        n = len(prompt_embeds)
    else:
        prompts = checks.as_list("prompt", prompt)
        n = len(prompts)
    negatives = checks.as_list(
        "negative_prompt", "" if negative_prompt is None else negative_prompt
    )
    negatives = checks.match_length("negative_prompt", negatives, n)

    if not guided:
        return encoder(prompts) if prompts is not None else _repeat(prompt_embeds, encoder.repeats)
    if prompts is not None and negative_prompt_embeds is None:
        return encoder([*negatives, *prompts])
    if negative_prompt_embeds is None:
        windows = max(prompt_embeds.shape[1] // encoder.tokenizer.model_max_length, 1)
        positive = _repeat(prompt_embeds, encoder.repeats)
        negative = encoder(negatives, windows)
    else:
        embeds = checks.check_embeds("negative_prompt_embeds", negative_prompt_embeds, dim)
        negative = _repeat(embeds, encoder.repeats)
        positive = (
            encoder(prompts) if prompts is not None else _repeat(prompt_embeds, encoder.repeats)
        )
    if negative.shape != positive.shape:
        raise ValueError(
            "the embeddings of prompt and negative prompt must have the same shape (got "
            f"{positive.shape} and {negative.shape})"
        )
    return jnp.concatenate([negative, positive])


def _repeat(embeds: Any, repeats: int) -> jax.Array:
    return jnp.repeat(jnp.asarray(embeds), repeats, axis=0)
