"""Prompts for CLIP's text encoders: windows of tokens, token weights, and windows per batch."""

from collections.abc import Sequence
from typing import Any

import jax

from diffusax.boundary.convert import checked_texts
from diffusax.pipelines.plan.plan import Texts, Tokens
from diffusax.text.prompts import tokenize_prompts


def tokenize(
    tokenizers: Sequence[Any], texts: Texts, call: Any, length: int | None = None
) -> Tokens:
    """Returns the ids for each text encoder, n w t: w windows of t tokens, w the same for all.

    Args:
        tokenizers: one for each encoder.
        texts: n texts for each encoder.
        call: the call, of which long_prompt and prompt_weighting are read.
        length: the number of tokens of embeddings in the same batch, which sets the number of
            windows; None where there are none.
    """
    windows = None if length is None else max(length // tokenizers[0].model_max_length, 1)
    options = {"long_prompt": call.long_prompt, "weighting": call.prompt_weighting}
    pairs = list(zip(tokenizers, texts))
    found = [tokenize_prompts(*pair, windows=windows, **options) for pair in pairs]
    counts = [tokens.input_ids.shape[1] for tokens in found]
    if len(set(counts)) > 1:
        found = [tokenize_prompts(*pair, windows=max(counts), **options) for pair in pairs]
    return Tokens(tuple(tokens.input_ids for tokens in found), found[0].weights)


def tokenize_caption(tokenizers: Sequence[Any], caption: str, length: int | None = None) -> Tokens:
    """Returns the ids of a caption for each text encoder, t; a long one is cut unannounced.

    length has no effect, as CLIP reads one window.
    """
    return Tokens(tuple(t.window(t.ids_of(caption)[: t.model_max_length - 2]) for t in tokenizers))


def as_windows(ids: jax.Array) -> jax.Array:
    """Returns ids n t as n w t with one window, and ids that have windows unchanged."""
    return ids if ids.ndim == 3 else ids[:, None]


def count_windows(components: Any, call: Any) -> int:
    """Returns the number of windows of the call's texts, which must be equal within a batch.

    A long prompt would add windows to the short prompts in its batch, and so change their images.
    """
    texts = [call.prompt or "", call.negative_prompt or ""]
    checked_texts(texts)
    if not call.long_prompt and not call.prompt_weighting:
        return 1
    tokenizers = [tokenizer for tokenizer, _, _ in components.text_encoders]
    found = tokenize(tokenizers, [texts] * len(tokenizers), call)
    return int(found.ids[0].shape[1])
