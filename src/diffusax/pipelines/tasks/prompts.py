"""Turns the texts of a call into the embeddings of each branch of guidance."""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.boundary.tensors import as_tensors, wants_tensors
from diffusax.models.adapters.low_rank import Layers, adapted_networks
from diffusax.models.network import Network, Params
from diffusax.pipelines.components.adapters import (
    CallAdapters,
    call_adapters,
    resolve_adapters,
)
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families import Family
from diffusax.pipelines.families.embeddings import check_embeds
from diffusax.pipelines.plan.arguments import (
    Call,
    as_list,
    check_call,
    match_length,
)
from diffusax.pipelines.plan.plan import Encoders, Prompt, Tokens
from diffusax.pipelines.run import programs
from diffusax.runtime.programs.program import Program
from diffusax.runtime.switches import in_mesh, under_own_switches

Found = Mapping[str, Prompt]
"""Embeddings by the prefix of the arguments they are for: "" for the prompts and, where guidance
needs them, "negative_" for the negative prompts."""


def count_prompts(call: Call) -> int:
    """Returns the number of prompts of a call.

    Raises:
        ValueError: there is none, or prompts and embeddings are both given.
    """
    if call.prompt is None and call.prompt_embeds is None:
        raise ValueError("prompt or prompt_embeds must be given")
    for prefix in ("", "negative_"):
        embeds = f"{prefix}prompt_embeds"
        for name in (f"{prefix}prompt", f"{prefix}prompt_2", f"{prefix}prompt_3"):
            if getattr(call, name) is not None and getattr(call, embeds) is not None:
                raise ValueError(f"only one of {name} and {embeds} can be given")
    if call.prompt is None:
        if isinstance(call.prompt_embeds, list | tuple):
            return len(call.prompt_embeds)
        layers = np.ndim(call.prompt_embeds) == 4
        axes = "(prompts, tokens, layers, width)" if layers else None
        return len(check_embeds("prompt_embeds", call.prompt_embeds, 3 + layers, axes=axes))
    if isinstance(call.prompt, str):
        return 1
    if not call.prompt:
        raise ValueError("prompt is an empty list; give at least one prompt")
    return len(call.prompt)


def embed_prompts(
    c: Components,
    call: Call,
    prompts: int,
    *,
    branches: int,
    adapters: CallAdapters | None = None,
    length: int | None = None,
) -> Prompt:
    """Returns the embeddings of the call's prompts, b k ... with k branches.

    The first branch has the prompts, and the others have the negative prompts, or zeros where a
    checkpoint asks for these instead of a missing one (`force_zeros_for_empty_prompt`).

    prompts: their number. adapters: those of the call, if any. length: the number of tokens to pad
    these to, that of other embeddings of the same run.

    Raises:
        ValueError: prompts are missing, given twice, or not as many as needed.
    """
    guided, found = branches > 1, dict[str, Prompt]()
    if call.prompt_embeds is not None or call.negative_prompt_embeds is not None:
        found = given_embeds(c, call, guided=guided)
    if texts := _texts_to_encode(c, call, found, guided=guided):
        length = found[""].context.shape[1] if "" in found else length
        found |= _encode_call_texts(c, call, prompts, texts, adapters, length)
    shape, other = (found.get(p, found[""]).context.shape for p in ("", "negative_"))
    if shape != other:
        found = c.family.lengths.align(found)
        shape, other = (found[p].context.shape for p in ("", "negative_"))
    if shape != other:
        length = found["" if "" not in texts else "negative_"].context.shape[1]
        more = f"; max_sequence_length={length} reads texts of as many tokens" if texts else ""
        raise ValueError(
            "prompt_embeds and negative_prompt_embeds must have the same shape (got "
            f"{shape} and {other}){more}"
        )
    if texts and c.context_dim not in (None, shape[-1]):
        raise ValueError(
            f"the text encoders give embeddings of a width of {shape[-1]}, and the "
            f"{c.denoiser.components[0]} attends to {c.context_dim}; load the pipeline with all "
            "its text encoders, or give prompt_embeds"
        )
    return stack_prompts(found, branches=branches, repeats=call.num_images_per_prompt or 1)


def given_embeds(c: Components, call: Call, *, guided: bool) -> dict[str, Prompt]:
    """Returns the call's own embeddings, under "" and, where guided, under "negative_"."""
    prefixes = ("", "negative_") if guided else ("",)
    given = (p for p in prefixes if getattr(call, f"{p}prompt_embeds") is not None)
    return {prefix: _given_prompt(c, call, prefix) for prefix in given}


def _given_prompt(c: Components, call: Call, prefix: str) -> Prompt:
    """Returns the call's embeddings in the denoiser's dtype. prefix: "" or "negative_"."""
    names = [f"{prefix}{name}" for name in c.family.embeds]
    prompt = c.family.lengths.read(call, names, c.context_dim)
    # Another dtype would compile another program.
    cast = {name: getattr(prompt, name).astype(c.dtype) for name in prompt._fields[: len(names)]}
    return prompt._replace(**cast)


def _texts_to_encode(c: Components, call: Call, found: Found, *, guided: bool) -> list[str]:
    """Returns the prefixes of the texts to encode: "" and, where guided, "negative_".

    Those whose embeddings are in `found` are left out. So is a missing negative prompt where the
    checkpoint asks for zeros, as SDXL's do.
    """
    zeros = call.negative_prompt is None and c.options.get("force_zeros_for_empty_prompt")
    wanted = ("", "negative_") if guided and not zeros else ("",)
    return [prefix for prefix in wanted if prefix not in found]


def _encode_call_texts(
    c: Components,
    call: Call,
    prompts: int,
    prefixes: Sequence[str],
    adapters: CallAdapters | None,
    length: int | None,
) -> dict[str, Prompt]:
    """Returns the embeddings of the call's texts by prefix, such as "negative_"; see `tokenize`."""
    if c.encoded is not None:
        return {p: c.encoded.find(call, call_texts(c, call, p, prompts)) for p in prefixes}
    encoders = c.text_encoders
    tokens = tokenize(c, call, encoders, prompts, prefixes, length)
    _, networks, names = zip(*encoders)
    layers: tuple[Any, ...] = ()
    if (
        adapters is not None
        and adapters.loras
        and (stacked := c.adapters.stacked(c, adapters.loras, components=names))
    ):
        layers = tuple(map(stacked.get, names))
        tokens = tokens._replace(adapters=np.tile(adapters.weights, (len(prefixes), 1)))
    options: dict[str, Any] = {"groups": len(prefixes)}
    options["clip_skip"] = call.clip_skip if "" in prefixes else None
    own_devices = c.encoder_mesh is not None
    with in_mesh(c.encoder_mesh) if own_devices else contextlib.nullcontext():
        if c.text_cache is None:
            ready = tuple(map(c.ready, names))
            encoded = encode_texts(c.family, networks, ready, tokens, layers, **options)
        else:
            params = tuple(c.params[name] for name in names)
            options["ready"] = lambda: tuple(map(c.ready, names))
            encoded = c.text_cache.encode(c.family, networks, params, tokens, layers, **options)
    # From the host they go wherever the denoiser is.
    return dict(zip(prefixes, jax.device_get(encoded) if own_devices else encoded))


def call_texts(c: Components, call: Call, prefix: str, n: int) -> dict[str, list[str]]:
    """Returns the texts for each text encoder by name; the first encoder's are the default."""
    first, texts = getattr(call, f"{prefix}prompt") or "", {}
    for i, encoder in enumerate(c.family.text_encoders):
        name = f"{prefix}prompt" + (f"_{i + 1}" if i else "")
        given = getattr(call, name) or first
        several = isinstance(given, list | tuple)
        texts[encoder.name] = match_length(name, given, n) if several else [given] * n
    return texts


def tokenize(
    c: Components,
    call: Call,
    encoders: Sequence[tuple[Any, Network, str]],
    prompts: int,
    prefixes: Sequence[str],
    length: int | None = None,
) -> Tokens:
    """Returns the tokens of the call's texts, (g n) ....

    encoders: those of `Components.text_encoders`. prompts: n, the number of texts. prefixes: "" for
    the prompts and "negative_" for the negative prompts, g groups of n texts that follow each
    other. length: the number of tokens of embeddings in the same batch, if any.

    Raises:
        ValueError: a text encoder lacks a word, whose embedding would be NaN.
    """
    groups = [call_texts(c, call, prefix, prompts) for prefix in prefixes]
    texts = [[text for group in groups for text in group[name]] for _, _, name in encoders]
    tokens = c.family.tokenize([tokenizer for tokenizer, _, _ in encoders], texts, call, length)
    if (layers := c.family.hidden_layers(c)) is not None:
        tokens = tokens._replace(layers=layers)
    for (tokenizer, network, name), ids in zip(encoders, tokens.ids):
        size = getattr(getattr(network, "config", None), "vocab_size", None)
        if size is not None and (largest := np.max(ids)) >= size:
            word = tokenizer.decode([largest])
            raise ValueError(
                f"prompt has the word {word!r}, for which {name} has no embedding; load it again "
                "with load_textual_inversion, after the text encoder was assigned"
            )
    return tokens


@functools.partial(Program, static=("family", "encoders", "groups", "clip_skip"), shape_of="tokens")
def encode_texts(
    family: Family,
    encoders: Encoders,
    params: tuple[Params, ...],
    tokens: Tokens,
    adapters: tuple[Layers | None, ...] = (),
    *,
    groups: int = 1,
    clip_skip: int | None = None,
) -> tuple[Prompt, ...]:
    """Encodes texts to embeddings, for each of `groups` equal parts of the texts.

    tokens: see the families' `encode`. adapters: the layers of each encoder's adapters, whose
    weights are in the tokens; empty for none at all. clip_skip: the number of the encoder's last
    layers to leave out; it applies to the first part alone, the prompts, as in diffusers.
    """
    if not clip_skip:
        return split_groups(encode_adapted(family, encoders, params, tokens, adapters), groups)
    return tuple(
        encode_adapted(family, encoders, params, part, adapters, None if g else clip_skip)
        for g, part in enumerate(split_groups(tokens, groups))
    )


def encode_adapted(
    family: Family,
    encoders: Encoders,
    params: tuple[Params, ...],
    tokens: Tokens,
    adapters: tuple[Layers | None, ...],
    clip_skip: int | None = None,
) -> Prompt:
    """Encodes tokens by the family's function, with encoders that have adapters.

    adapters: see `encode_texts`.
    """
    networks = adapted_networks(encoders, adapters, tokens.adapters)
    return family.encode(networks, params, tokens._replace(adapters=None), clip_skip)


def split_groups(tree: Any, groups: int) -> tuple[Any, ...]:
    """Splits a tree of arrays (g n) ... into a tuple of g trees of arrays n ... ."""
    return tuple(jax.tree.map(lambda x, g=g: jnp.split(x, groups)[g], tree) for g in range(groups))


def stack_prompts(found: Found, *, branches: int, repeats: int) -> Prompt:
    """Stacks the embeddings of the branches, b k ...; see `embed_prompts`.

    found: the embeddings; zeros replace missing negative prompts. repeats: the images per prompt.
    """
    other = 1 if "negative_" in found else None
    stacked: Prompt = programs.stack_branches(
        tuple(found[prefix] for prefix in ("", "negative_") if prefix in found),
        order=(0, *[other] * (branches - 1)),
        repeats=repeats,
    )
    return stacked


def prompt_for_each_image(call: Call) -> Call:
    """Returns a call that starts from several images with its one prompt for each of them."""
    listed = isinstance(call.image, list | tuple) or getattr(call.image, "ndim", 0) == 4
    count = len(call.image) if listed else 1
    texts = [] if call.prompt is None else as_list(call.prompt)
    if count < 2 or len(texts) != 1 or (call.num_images_per_prompt or 1) > 1:
        return call
    names = ("prompt", "prompt_2", "prompt_3")
    given = {n: getattr(call, n) for n in (*names, *(f"negative_{name}" for name in names))}
    repeated: dict[str, Any] = {
        n: as_list(text) * count for n, text in given.items() if text is not None
    }
    return dataclasses.replace(call, **repeated)


def count_tokens(c: Components, call: Call, prompts: int) -> int:
    """Returns the number of tokens of the embeddings of a call's texts, with their padding."""
    prefixes = [""] if call.negative_prompt is None else ["", "negative_"]
    shape = tokenize(c, call, c.text_encoders, prompts, prefixes).ids[0].shape
    return int(np.prod(shape[1:]))


def token_groups(c: Components, call: Call, *, guided: bool) -> Tokens:
    """Returns the tokens g n ... of the prompts and, where guided, of the negative prompts.

    Prompts that the call gives as embeddings are left out; without any texts there is no array.
    """
    found = given_embeds(c, call, guided=guided)
    prefixes = _texts_to_encode(c, call, found, guided=guided)
    if not prefixes or not c.family.text_encoders:
        return Tokens(())
    if c.encoded is not None:
        raise ValueError(
            "generate_fn needs the text encoders, which encode_first has freed; load the pipeline "
            "without it"
        )
    if c.encoder_mesh is not None:
        raise ValueError(
            "generate_fn needs all networks on the same devices; load the pipeline without "
            "encoder_device"
        )
    length = found[""].context.shape[1] if "" in found else None
    tokens = tokenize(c, call, c.text_encoders, count_prompts(call), prefixes, length)
    grouped: Tokens = jax.tree.map(lambda x: x.reshape(len(prefixes), -1, *x.shape[1:]), tokens)
    return grouped


def encodes_prompts(method: Any) -> Any:
    """Makes the `encode_prompt` method of a pipeline from a declaration of its arguments.

    The method returns the embeddings of the prompts and of the negative prompts, then their pooled
    outputs, as tensors of PyTorch where the caller works with them. It raises ValueError for an
    argument that is not valid.
    """
    signature = inspect.signature(method)

    @under_own_switches
    @functools.wraps(method)
    def encode(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        found = _embeddings(self.parts, bound.arguments)
        wanted = wants_tensors(self.tensors, *bound.arguments.values())
        return as_tensors(found) if wanted else found

    return encode


def _embeddings(c: Components, given: Mapping[str, Any]) -> tuple[Any, ...]:
    unused = ("options", "self", "device")
    arguments = {k: v for k, v in given.items() if k not in unused}
    guided = bool(arguments.pop("do_classifier_free_guidance", False))
    call = check_call({**arguments, **given.get("options", {})})
    c, call = resolve_adapters(c, call)
    prompts = count_prompts(call)
    adapters = call_adapters(c, call, prompts)
    prompt = embed_prompts(c, call, prompts, branches=1 + guided, adapters=adapters)
    return c.family.lengths.encoded(prompt, len(c.family.embeds), guided=guided)
