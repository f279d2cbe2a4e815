"""From what the user said to the conditions of each branch of guidance."""

import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.network import Network, Params
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call, as_list, check_call, match_length, read_numbers
from diffusax.pipelines.components import Components
from diffusax.pipelines.families.family import Encoded, Family
from diffusax.runtime.program import Program
from diffusax.text.prompts import PromptTokens, tokenize_prompts


@functools.partial(Program, static=("family", "encoders", "groups", "clip_skip"), shape_of="ids")
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
    parts = zip(*(jnp.split(leaf, groups) for leaf in ids))
    weighed = [None] * groups if weights is None else jnp.split(weights, groups)
    return tuple(
        family.encode(encoders, params, part, w, None if g else clip_skip)
        for g, (part, w) in enumerate(zip(parts, weighed))
    )


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


def embed_prompts(c: Components, call: Call, branches: int) -> tuple[jax.Array, ...]:
    """The context b k s d and, where the family has one, the pooled output b k p, for k branches.

    The first branch has the prompts, the others the negative prompts, or zeros where these stand
    for a missing one (`force_zeros_for_empty_prompt`).

    Raises:
        ValueError: prompts are missing, given twice, or not as many as needed.
    """
    found = given_embeds(c, call, guided=branches > 1)
    texts = _texts_to_encode(c, call, found, guided=branches > 1)
    if texts:
        ids, weights = tokenize(c, call, texts, _windows(c, found))
        _, networks, names = zip(*c.text)
        params = tuple(c.params[name] for name in names)
        options: dict[str, Any] = {"groups": len(texts)}
        options["clip_skip"] = None if "" in found else call.clip_skip
        encoded = encode_texts(c.family, networks, params, ids, weights, **options)
        found |= dict(zip(texts, encoded))
    shapes = [embeds[0].shape for embeds in found.values()]
    if len(set(shapes)) > 1:
        raise ValueError(
            "prompt_embeds and negative_prompt_embeds must have the same shape (got "
            f"{found[''][0].shape} and {found['negative_'][0].shape})"
        )
    return arrange_embeds(found, branches=branches, repeats=call.num_images_per_prompt or 1)


def arrange_embeds(
    found: Mapping[str, Encoded], *, branches: int, repeats: int
) -> tuple[jax.Array, ...]:
    """What the prompts became for each branch, b k ...: see `embed_prompts`.

    found: of the prompts ("") and, unless zeros stand for them, of the negative prompts
    ("negative_"). repeats: images of a prompt.
    """
    other = 1 if "negative_" in found else None
    return programs.arrange(
        tuple(found[prefix] for prefix in ("", "negative_") if prefix in found),
        order=(0, *[other] * (branches - 1)),
        repeats=repeats,
    )


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
    leaves = embed_prompts(c, call, 1 + guided)
    return tuple(half for leaf in leaves for half in (leaf[:, 0], leaf[:, 1] if guided else None))


def tokenize(
    c: Components, call: Call, prefixes: Sequence[str], windows: int | None = None
) -> tuple[tuple[np.ndarray, ...], np.ndarray | None]:
    """The ids for each text encoder, (g n) w t, and the tokens' weights.

    prefixes: "" for the prompts and "negative_"; the texts of these g groups follow each other.
    """
    n = count_prompts(call)
    groups = [_texts(call, prefix, n) for prefix in prefixes]
    per_encoder = [list(itertools.chain(*column)) for column in zip(*groups)]

    def all_tokens(windows: int | None) -> list[PromptTokens]:
        options: dict[str, Any] = {"long_prompt": call.long_prompt, "windows": windows}
        return [
            tokenize_prompts(tokenizer, texts, weighting=call.prompt_weighting, **options)
            for (tokenizer, _, _), texts in zip(c.text, per_encoder)
        ]

    tokens = all_tokens(windows)
    counts = {t.windows for t in tokens}
    if len(counts) > 1:
        tokens = all_tokens(max(counts))
    return tuple(t.input_ids for t in tokens), tokens[0].weights


def token_groups(c: Components, call: Call, *, guided: bool) -> tuple[np.ndarray, ...]:
    """The tokens for each text encoder, g n w t: of the prompts and, guided, the negative ones.

    Embeddings that the call brings stand for their prompts; without any texts there is no array.
    """
    found = given_embeds(c, call, guided=guided)
    prefixes = _texts_to_encode(c, call, found, guided=guided)
    if not prefixes:
        return ()
    ids, _ = tokenize(c, call, prefixes, _windows(c, found))
    return tuple(i.reshape(len(prefixes), -1, *i.shape[1:]) for i in ids)


def given_embeds(c: Components, call: Call, *, guided: bool) -> dict[str, Encoded]:
    """The embeddings that the call brings, of the prompts ("") and, guided, "negative_" ones."""
    prefixes = ("", "negative_") if guided else ("",)
    given = (p for p in prefixes if getattr(call, f"{p}prompt_embeds") is not None)
    return {prefix: _given(c, call, prefix) for prefix in given}


def check_embeds(name: str, embeds: Any, ndim: int, width: int | None = None) -> Any:
    """The embeddings, NumPy or JAX.

    Raises:
        ValueError: they have another shape, or are not numbers.
    """
    axes = "(prompts, tokens, width)" if ndim == 3 else "(prompts, width)"
    shape = getattr(embeds, "shape", None)
    if shape is None or len(shape) != ndim or width not in (None, shape[-1]) or not len(embeds):
        wanted = "" if width is None else f" with a width of {width}"
        got = type(embeds).__name__ if shape is None else tuple(shape)
        raise ValueError(f"{name} must be an array of shape {axes}{wanted} (got {got})")
    return embeds if isinstance(embeds, jax.Array) else read_numbers(name, embeds)


def _given(c: Components, call: Call, prefix: str) -> Encoded:
    """The embeddings that the call brings, in the UNet's dtype; prefix: "" or "negative_"."""
    name, pooled = f"{prefix}prompt_embeds", f"{prefix}pooled_prompt_embeds"
    encoded: Encoded = (check_embeds(name, getattr(call, name), 3, c.context_dim),)
    if c.family.pooled:
        if getattr(call, pooled) is None:
            raise ValueError(f"{pooled} must be given with {name}; see encode_prompt")
        encoded = (*encoded, check_embeds(pooled, getattr(call, pooled), 2))
    # Another dtype would be another program.
    return tuple(leaf.astype(c.dtype) for leaf in encoded)


def _texts(call: Call, prefix: str, n: int) -> list[list[str]]:
    """The texts for each of two encoders."""
    first = getattr(call, f"{prefix}prompt") or ""
    second = getattr(call, f"{prefix}prompt_2") or first
    names = (f"{prefix}prompt", f"{prefix}prompt_2")
    return [match_length(name, as_list(t), n) for name, t in zip(names, (first, second))]


def _texts_to_encode(
    c: Components, call: Call, found: Mapping[str, Encoded], *, guided: bool
) -> list[str]:
    """Which texts count: "", the prompts; "negative_" in guidance; without embeddings `found`.

    Zeros may stand for a negative prompt that is not given, as SDXL checkpoints ask.
    """
    zeros = call.negative_prompt is None and c.options.get("force_zeros_for_empty_prompt")
    wanted = ("", "negative_") if guided and not zeros else ("",)
    return [prefix for prefix in wanted if prefix not in found]


def _windows(c: Components, found: Mapping[str, Encoded]) -> int | None:
    """Of how many windows negative prompts are, beside embeddings; None as many as they need."""
    if "" not in found:
        return None
    return max(found[""][0].shape[1] // c.text[0][0].model_max_length, 1)
