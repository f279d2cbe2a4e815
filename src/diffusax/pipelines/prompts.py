"""From what the user said to the conditions of each branch of guidance."""

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.network import Network, Params
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call, as_list, check_call, match_length
from diffusax.pipelines.components import Components
from diffusax.pipelines.families.family import Encoded, Family
from diffusax.text.prompts import PromptTokens, tokenize_prompts


@functools.partial(jax.jit, static_argnames=("family", "encoders", "groups", "clip_skip"))
def encode_texts(
    family: Family,
    encoders: tuple[Network, ...],
    params: tuple[Params, ...],
    ids: tuple[jax.Array, ...],
    weights: jax.Array | None = None,
    *,
    groups: int = 1,
    clip_skip: int | None = None,
) -> tuple[Encoded, ...]:
    """Texts to embeddings, for each of `groups` equal parts of the texts.

    ids, weights: see the families' `encode`. clip_skip is for the first part, the prompts, alone,
    as in diffusers.
    """
    if not clip_skip:
        encoded = family.encode(encoders, params, ids, weights)
        return tuple(zip(*(jnp.split(leaf, groups) for leaf in encoded)))
    n = ids[0].shape[0] // groups
    first = family.encode(
        encoders, params, tuple(i[:n] for i in ids), _rows(weights, slice(n)), clip_skip
    )
    if groups == 1:
        return (first,)
    rest = family.encode(
        encoders, params, tuple(i[n:] for i in ids), _rows(weights, slice(n, None))
    )
    return (first, *zip(*(jnp.split(leaf, groups - 1) for leaf in rest)))


def count_prompts(call: Call) -> int:
    """How many prompts the call has.

    Raises:
        ValueError: there is none, or prompts and embeddings are both given.
    """
    if call.prompt is None and call.prompt_embeds is None:
        raise ValueError("prompt or prompt_embeds must be given")
    for name in ("prompt", "negative_prompt"):
        embeds = getattr(call, f"{name}_embeds")
        if getattr(call, name) is not None and embeds is not None:
            raise ValueError(f"only one of {name} and {name}_embeds can be given")
    if call.prompt is None:
        return len(check_embeds("prompt_embeds", call.prompt_embeds, 3))
    prompts = as_list(call.prompt)
    if not prompts:
        raise ValueError("prompt is an empty list; give at least one prompt")
    return len(prompts)


def embed_prompts(c: Components, call: Call, *, guided: bool) -> tuple[Encoded, Encoded | None]:
    """The embeddings of the prompts and of the negative prompts, n s d and n p each.

    The second is None where there is no guidance, or where zeros stand for a missing negative
    prompt (`force_zeros_for_empty_prompt`).

    Raises:
        ValueError: prompts are missing, given twice, or not as many as needed.
    """
    n = count_prompts(call)
    positive = _given(c, call, "") if call.prompt is None else None
    negative = _given(c, call, "negative_") if guided else None
    zeros = _zeros_for_empty(c, call)
    texts = [] if positive else [_texts(call, "", n)]
    if guided and negative is None and not zeros:
        texts.append(_texts(call, "negative_", n))
    if texts:
        windows = None if positive is None else _windows(c, positive)
        encoded = _encode(c, call, texts, windows, skip=positive is None)
        if positive is None:
            positive, *encoded = encoded
        negative = encoded[0] if encoded else negative
    assert positive is not None
    if negative is not None and positive[0].shape != negative[0].shape:
        raise ValueError(
            "prompt_embeds and negative_prompt_embeds must have the same shape (got "
            f"{positive[0].shape} and {negative[0].shape})"
        )
    return positive, negative


def embeddings(c: Components, given: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `encode_prompt` gives: prompts and negative prompts, then their pooled outputs.

    given: the arguments of `encode_prompt`.

    Raises:
        ValueError: an argument that cannot be.
    """
    unused = ("options", "self", "device", "lora_scale")
    arguments = {k: v for k, v in given.items() if k not in unused}
    guided = bool(arguments.pop("do_classifier_free_guidance"))
    call = check_call({**arguments, **given.get("options", {})})
    positive, negative = embed_prompts(c, call, guided=guided)
    branches = (positive,) if negative is None else (positive, negative)
    order = (0, *([None if negative is None else 1] if guided else []))
    repeats = call.num_images_per_prompt or 1
    leaves = programs.arrange(branches, order=order, repeats=repeats)
    return tuple(half for leaf in leaves for half in (leaf[:, 0], leaf[:, 1] if guided else None))


def tokenize(
    c: Components,
    texts: list[list[str]],
    *,
    long_prompt: bool = False,
    weighting: bool = False,
    windows: int | None = None,
) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """The ids of texts for each text encoder, n w t, and the tokens' weights.

    texts: one list of n texts for each encoder, or one for all.
    """
    per_encoder = texts * len(c.text) if len(texts) == 1 else texts[: len(c.text)]

    def all_tokens(windows: int | None) -> list[PromptTokens]:
        return [
            tokenize_prompts(
                tokenizer, some, long_prompt=long_prompt, weighting=weighting, windows=windows
            )
            for (tokenizer, _, _), some in zip(c.text, per_encoder)
        ]

    tokens = all_tokens(windows)
    if len({t.windows for t in tokens}) > 1:
        tokens = all_tokens(max(t.windows for t in tokens))
    return tuple(t.input_ids for t in tokens), tokens[0].weights


def check_embeds(name: str, embeds: Any, ndim: int, width: int | None = None) -> Any:
    """The embeddings, NumPy or JAX.

    Raises:
        ValueError: they have another shape.
    """
    axes = "(prompts, tokens, width)" if ndim == 3 else "(prompts, width)"
    shape = getattr(embeds, "shape", None)
    if shape is None or len(shape) != ndim or width not in (None, shape[-1]) or not len(embeds):
        wanted = "" if width is None else f" with a width of {width}"
        got = type(embeds).__name__ if shape is None else tuple(shape)
        raise ValueError(f"{name} must be an array of shape {axes}{wanted} (got {got})")
    return embeds if isinstance(embeds, jax.Array) else np.asarray(embeds, np.float32)


def _given(c: Components, call: Call, prefix: str) -> Encoded | None:
    """The embeddings that the call brings; prefix: "" or "negative_"."""
    embeds = getattr(call, f"{prefix}prompt_embeds")
    if embeds is None:
        return None
    encoded = (check_embeds(f"{prefix}prompt_embeds", embeds, 3, c.context_dim),)
    if not c.family.pooled:
        return encoded
    name = f"{prefix}pooled_prompt_embeds"
    pooled = getattr(call, name)
    if pooled is None:
        raise ValueError(f"{name} must be given with {prefix}prompt_embeds; see encode_prompt")
    return (*encoded, check_embeds(name, pooled, 2))


def _texts(call: Call, prefix: str, n: int) -> list[list[str]]:
    """The texts for each of two encoders."""
    first = getattr(call, f"{prefix}prompt") or ""
    second = getattr(call, f"{prefix}prompt_2") or first
    names = (f"{prefix}prompt", f"{prefix}prompt_2")
    return [match_length(name, as_list(t), n) for name, t in zip(names, (first, second))]


def _windows(c: Components, encoded: Encoded) -> int:
    return max(encoded[0].shape[1] // c.text[0][0].model_max_length, 1)


def _encode(
    c: Components, call: Call, texts: list[list[list[str]]], windows: int | None, *, skip: bool
) -> list[Encoded]:
    joined = _side_by_side(texts)
    ids, weights = tokenize(
        c,
        joined[: max(1, len(c.family.text))],
        long_prompt=call.long_prompt,
        weighting=call.prompt_weighting,
        windows=windows,
    )
    return list(
        encode_texts(
            c.family,
            tuple(network for _, network, _ in c.text),
            tuple(params for _, _, params in c.text),
            ids,
            weights,
            groups=len(texts),
            clip_skip=call.clip_skip if skip else None,
        )
    )


def _rows(weights: Any, rows: slice) -> Any:
    return None if weights is None else weights[rows]


def _side_by_side(groups: list[list[list[str]]]) -> list[list[str]]:
    """For each text encoder the texts of all groups, one group after the other."""
    return [list(itertools.chain(*column)) for column in zip(*groups)]


def _zeros_for_empty(c: Components, call: Call) -> bool:
    """Whether zeros stand for a negative prompt that is not given, as SDXL checkpoints may ask."""
    return call.negative_prompt is None and bool(c.options.get("force_zeros_for_empty_prompt"))


def token_groups(c: Components, call: Call, *, guided: bool) -> tuple[np.ndarray, ...]:
    """The tokens for each text encoder, g n w t: of the prompts and, guided, the negative ones."""
    n = count_prompts(call)
    zeros = _zeros_for_empty(c, call)
    texts = [_texts(call, "", n)]
    if guided and not zeros:
        texts.append(_texts(call, "negative_", n))
    joined = _side_by_side(texts)
    ids, _ = tokenize(c, joined[: len(c.family.text)], long_prompt=call.long_prompt)
    return tuple(i.reshape(len(texts), n, *i.shape[1:]) for i in ids)
