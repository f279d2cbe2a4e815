"""Encodes the texts of calls first, so that text encoder and denoiser never meet in memory."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffusax.networks import Model
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.loading import load_components
from diffusax.pipelines.plan.arguments import Call, check_call
from diffusax.pipelines.plan.plan import Prompt
from diffusax.pipelines.tasks.prompts import call_texts, count_prompts, embed_prompts
from diffusax.runtime.switches import in_mesh

_OF_TEXTS = ("text_encoder", "tokenizer")
_TEXTS = tuple(f"{p}prompt{n}" for p in ("", "negative_") for n in ("", "_2", "_3"))
_READING = ("max_sequence_length", "text_encoder_out_layers")
_CHANGING = ("clip_skip", "long_prompt", "prompt_weighting", *_READING)
"""The arguments of a call that would encode its texts otherwise; entries may have the last two."""

Entry = str | Mapping[str, Any]
"""A text, or arguments of a call: its texts, max_sequence_length and text_encoder_out_layers."""
Key = tuple[tuple[str, ...], tuple[Any, ...]]
"""A text for each text encoder, and the values of the arguments that they are encoded with."""


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The embeddings of all texts that calls may have."""

    prompts: Mapping[Key, Prompt]
    """The embeddings of each text, 1 ... ."""
    encoders: tuple[str, ...]
    """The names of the text encoders, whose parameters are freed."""

    def find(self, call: Call, texts: Mapping[str, Sequence[str]]) -> Prompt:
        """Returns the embeddings of n texts, of which those with lengths are filled up to one.

        texts: n texts for each text encoder.

        Raises:
            ValueError: a text is not among the encoded ones, or the call would encode it otherwise.
        """
        arguments = _values(call)
        for i, name in enumerate(_CHANGING):
            known = {own[i] for _, own in self.prompts}
            if arguments[i] not in known:
                there = ", or give it in the entries there" if name in _READING else ""
                raise ValueError(
                    f"{name} cannot be given after encode_first, which has encoded the texts "
                    f"without it; leave one of the two out{there}"
                )
        rows = [self._one(own, arguments) for own in zip(*texts.values(), strict=True)]
        longest = max(row.context.shape[1] for row in rows)
        filled = [_filled(row, longest) for row in rows]
        found: Prompt = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *filled)
        return found

    def _one(self, texts: tuple[str, ...], arguments: tuple[Any, ...]) -> Prompt:
        if (texts, arguments) in self.prompts:
            return self.prompts[texts, arguments]
        known = {text for own, _ in self.prompts for text in own}
        unknown = [text for text in texts if text not in known]
        what = f"{unknown[0]!r} is" if unknown else f"{texts} with these arguments are"
        raise ValueError(
            f"{what} not among the texts of encode_first, and the text encoders are freed; give it "
            "there as the call has it, such as {'prompt': ..., 'prompt_2': ...}, or load the "
            "pipeline without encode_first"
        )


def load_encoding_first(
    target: Any,
    folder: Path,
    texts: Sequence[Entry] | None,
    given: Mapping[str, Any],
    dtype: Any,
    *,
    variant: str | None = None,
    device: Any = None,
    encoder_mesh: Mesh | None = None,
    weights: Any = None,
    **options: Any,
) -> tuple[dict[str, Any], EncodedTexts | None]:
    """Reads a checkpoint's components like `load_components`, and the texts' embeddings.

    The text encoders are read, encode the texts and are freed before any other network is read;
    they come back as models without parameters. Without texts nothing is encoded or freed.

    Raises:
        ValueError: for the reasons of `load_components`; or a text encoder is given, or there are
            none.
    """
    places: dict[str, Any] = {"variant": variant, "device": device, "encoder_mesh": encoder_mesh}
    places["weights"] = weights
    if texts is None:
        return load_components(target, folder, given, dtype, **options, **places), None
    _check(target, texts, given)
    others = [c.name for c in target.all_components if c.role not in _OF_TEXTS]
    first = load_components(target, folder, [*others, *given], dtype, **places)
    encoders = [name for name in target.family.names("text_encoder") if name in first]
    prompts = _encode(target, first, _calls(target, texts), device, encoder_mesh)
    encoded = EncodedTexts(prompts, tuple(encoders))
    for name in encoders:
        for leaf in jax.tree.leaves(first[name].params):
            leaf.delete()
        first[name] = Model(first[name].network, {})
    rest = load_components(target, folder, [*given, *first], dtype, **options, **places)
    return {**first, **rest}, encoded


def _check(target: Any, texts: Sequence[Entry], given: Mapping[str, Any]) -> None:
    names = target.family.names("text_encoder")
    if isinstance(texts, str) or not all(isinstance(text, str | Mapping) for text in texts):
        raise ValueError(
            "encode_first must be a list of texts, or of dictionaries of a call's arguments (got "
            f"{texts!r:.200})"
        )
    allowed = (*_TEXTS, *_READING)
    unknown = [name for own in texts if not isinstance(own, str) for name in set(own) - {*allowed}]
    if unknown:
        raise ValueError(
            f"encode_first may hold {', '.join(allowed)} in its entries (got {unknown[0]!r})"
        )
    if not names:
        raise ValueError(f"{target.__name__} reads no texts; leave encode_first out")
    if twice := [name for name in names if name in given]:
        raise ValueError(
            f"only one of {twice[0]} and encode_first can be given, which reads the checkpoint's "
            "text encoders"
        )


def _calls(target: Any, texts: Sequence[Entry]) -> list[Call]:
    """Returns the entries as calls, with the defaults of a pipeline's call."""
    declared = inspect.signature(target.__call__).parameters
    defaults = {name: declared[name].default for name in _CHANGING if name in declared}
    entries = [{"prompt": own} if isinstance(own, str) else own for own in texts or [""]]
    return [check_call({**defaults, "prompt": "", **own}) for own in entries]


def _values(call: Call) -> tuple[Any, ...]:
    return tuple(getattr(call, name) for name in _CHANGING)


def _encode(
    target: Any,
    loaded: Mapping[str, Any],
    calls: Sequence[Call],
    device: Any,
    encoder_mesh: Mesh | None,
) -> dict[Key, Prompt]:
    """Returns the embeddings of the texts, and of the empty one, which guidance needs."""
    family = target.family
    models = {name: model for name, model in loaded.items() if isinstance(model, Model)}
    components = Components.of(
        family,
        {name: model.network for name, model in models.items()},
        {name: model.params for name, model in models.items()},
        tokenizers={n: loaded[n] for n in family.names("tokenizer") if n in loaded},
        scheduler=None,
        options={name: loaded.get(name, usual) for name, usual in family.options},
        mesh=device if isinstance(device, Mesh) else None,
        encoder_mesh=encoder_mesh,
    )
    found: dict[Key, Prompt] = {}
    with in_mesh(components.local_mesh):
        for call in calls:
            for texts in _texts_of(components, call):
                key = texts, _values(call)
                if key not in found:
                    prompt = embed_prompts(components, _one_call(call, texts), 1, branches=1)
                    found[key] = jax.block_until_ready(jax.tree.map(lambda x: x[:, 0], prompt))
    return found


def _texts_of(c: Components, call: Call) -> list[tuple[str, ...]]:
    """Returns the texts of a call for the text encoders: prompts, negative ones, and the empty."""
    n = count_prompts(call)
    given = (call_texts(c, call, prefix, n).values() for prefix in ("", "negative_"))
    empty = ("",) * len(c.family.text_encoders)
    return [*(texts for groups in given for texts in zip(*groups, strict=True)), empty]


def _one_call(call: Call, texts: tuple[str, ...]) -> Call:
    names = ("prompt", "prompt_2", "prompt_3")
    arguments = dict(zip(_CHANGING, _values(call)))
    return check_call({**arguments, **dict(zip(names, texts))})


def _filled(prompt: Prompt, length: int) -> Prompt:
    """Returns embeddings with padding up to a length, where they say how many count."""
    more = length - prompt.context.shape[1]
    if prompt.lengths is None or not more:
        return prompt
    return prompt._replace(context=jnp.pad(prompt.context, ((0, 0), (0, more), (0, 0))))
