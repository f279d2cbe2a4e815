"""From what the user said to the embeddings of each branch of guidance."""

import functools
import inspect
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.models.network import Network, Params
from diffusax.pipelines import programs
from diffusax.pipelines.arguments import Call, as_list, check_call, match_length, read_numbers
from diffusax.pipelines.components import Components
from diffusax.pipelines.families import Family
from diffusax.pipelines.plan import Prompt, Tokens
from diffusax.runtime.program import Program

Found = Mapping[str, Prompt]
"""Of the prompts ("") and, as far as they count, of the negative prompts ("negative_")."""


@functools.partial(Program, static=("family", "encoders", "groups", "clip_skip"), shape_of="tokens")
def encode_texts(
    family: Family,
    encoders: tuple[Network, ...],
    params: tuple[Params, ...],
    tokens: Tokens,
    *,
    groups: int = 1,
    clip_skip: int | None = None,
) -> tuple[Prompt, ...]:
    """Texts to embeddings, for each of `groups` equal parts of the texts.

    tokens: see the families' `encode`. clip_skip is for the first part, the prompts, alone, as in
    diffusers.
    """
    if not clip_skip:
        return split_groups(family.encode(encoders, params, tokens), groups)
    return tuple(
        family.encode(encoders, params, part, None if g else clip_skip)
        for g, part in enumerate(split_groups(tokens, groups))
    )


def split_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """A tree of arrays (g n) ... as a tuple of g trees of arrays n ...."""
    return tuple(jax.tree.map(lambda x, g=g: jnp.split(x, groups)[g], tree) for g in range(groups))


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


def embed_prompts(c: Components, call: Call, branches: int) -> Prompt:
    """The call's prompts as embeddings b k ... of k branches.

    The first branch has the prompts, the others the negative prompts, or zeros where these stand
    for a missing one (`force_zeros_for_empty_prompt`).

    Raises:
        ValueError: prompts are missing, given twice, or not as many as needed.
    """
    found = given_embeds(c, call, guided=branches > 1)
    texts = _texts_to_encode(c, call, found, guided=branches > 1)
    if texts:
        tokens = tokenize(c, call, texts, _length(found))
        _, networks, names = zip(*c.text)
        params = tuple(c.params[name] for name in names)
        options: dict[str, Any] = {"groups": len(texts)}
        options["clip_skip"] = None if "" in found else call.clip_skip
        found |= dict(zip(texts, encode_texts(c.family, networks, params, tokens, **options)))
    shapes = [embeds.context.shape for embeds in found.values()]
    if len(set(shapes)) > 1:
        raise ValueError(
            "prompt_embeds and negative_prompt_embeds must have the same shape (got "
            f"{found[''].context.shape} and {found['negative_'].context.shape})"
        )
    return stack_prompts(found, branches=branches, repeats=call.num_images_per_prompt or 1)


def stack_prompts(found: Found, *, branches: int, repeats: int) -> Prompt:
    """What the prompts became for each branch, b k ...: see `embed_prompts`.

    found: zeros stand for negative prompts that are not among it. repeats: images of a prompt.
    """
    other = 1 if "negative_" in found else None
    stacked: Prompt = programs.stack_branches(
        tuple(found[prefix] for prefix in ("", "negative_") if prefix in found),
        order=(0, *[other] * (branches - 1)),
        repeats=repeats,
    )
    return stacked


def encodes_prompts(method: Any) -> Any:
    """A pipeline's `encode_prompt` of a signature, which is all that the method has to declare.

    It gives prompts and negative prompts, then their pooled outputs.

    Raises:
        ValueError: an argument that cannot be.
    """
    signature = inspect.signature(method)

    @functools.wraps(method)
    def encode(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        return _embeddings(self.parts, bound.arguments)

    return encode


def _embeddings(c: Components, given: Mapping[str, Any]) -> tuple[Any, ...]:
    unused = ("options", "self", "device", "lora_scale")
    arguments = {k: v for k, v in given.items() if k not in unused}
    guided = bool(arguments.pop("do_classifier_free_guidance"))
    call = check_call({**arguments, **given.get("options", {})})
    prompt = embed_prompts(c, call, 1 + guided)
    leaves = prompt[: len(c.family.embeds)]
    return tuple(half for leaf in leaves for half in (leaf[:, 0], leaf[:, 1] if guided else None))


def tokenize(
    c: Components, call: Call, prefixes: Sequence[str], length: int | None = None
) -> Tokens:
    """The tokens of the call's texts, (g n) ....

    prefixes: "" for the prompts and "negative_"; the texts of these g groups follow each other.
    length: of the context of embeddings that they stand beside.
    """
    n, encoders = count_prompts(call), [name for _, _, name in c.text]
    groups = [_texts(c, call, prefix, n) for prefix in prefixes]
    texts = [list(itertools.chain(*(group[name] for group in groups))) for name in encoders]
    return c.family.tokenize([tokenizer for tokenizer, _, _ in c.text], texts, call, length)


def token_groups(c: Components, call: Call, *, guided: bool) -> Tokens:
    """The tokens g n ... of the prompts and, guided, of the negative ones.

    Embeddings that the call brings stand for their prompts; without any texts there is no array.
    """
    found = given_embeds(c, call, guided=guided)
    prefixes = _texts_to_encode(c, call, found, guided=guided)
    if not prefixes:
        return Tokens(())
    tokens = tokenize(c, call, prefixes, _length(found))
    grouped: Tokens = jax.tree.map(lambda x: x.reshape(len(prefixes), -1, *x.shape[1:]), tokens)
    return grouped


def given_embeds(c: Components, call: Call, *, guided: bool) -> dict[str, Prompt]:
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


def _given(c: Components, call: Call, prefix: str) -> Prompt:
    """The embeddings that the call brings, in the denoiser's dtype; prefix: "" or "negative_"."""
    first, *others = (f"{prefix}{name}" for name in c.family.embeds)
    embeds = [check_embeds(first, getattr(call, first), 3, c.denoiser.context_dim)]
    for name in others:
        if getattr(call, name) is None:
            raise ValueError(f"{name} must be given with {first}; see encode_prompt")
        embeds.append(check_embeds(name, getattr(call, name), 2))
    # Another dtype would be another program.
    return Prompt(*(leaf.astype(c.dtype) for leaf in embeds))


def _texts(c: Components, call: Call, prefix: str, n: int) -> dict[str, list[str]]:
    """The texts for each text encoder by name; the first one's serve where none are given."""
    first, texts = getattr(call, f"{prefix}prompt") or "", {}
    for i, encoder in enumerate(c.family.text_encoders):
        name = f"{prefix}prompt" + (f"_{i + 1}" if i else "")
        texts[encoder.name] = match_length(name, as_list(getattr(call, name) or first), n)
    return texts


def _texts_to_encode(c: Components, call: Call, found: Found, *, guided: bool) -> list[str]:
    """Which texts count: "", the prompts; "negative_" in guidance; without embeddings `found`.

    Zeros may stand for a negative prompt that is not given, as SDXL checkpoints ask.
    """
    zeros = call.negative_prompt is None and c.options.get("force_zeros_for_empty_prompt")
    wanted = ("", "negative_") if guided and not zeros else ("",)
    return [prefix for prefix in wanted if prefix not in found]


def _length(found: Found) -> int | None:
    """Of how many tokens negative prompts are, beside embeddings; None: of as many as they need."""
    return found[""].context.shape[1] if "" in found else None
