"""Encodes the texts of calls first, so that text encoder and denoiser never meet in memory."""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from diffusax.models.network import Model
from diffusax.pipelines.arguments import Call, check_call
from diffusax.pipelines.components import Components
from diffusax.pipelines.loading import load_components
from diffusax.pipelines.plan import Prompt
from diffusax.pipelines.prompts import embed_prompts
from diffusax.runtime.mesh import in_mesh

_OF_TEXTS = ("text_encoder", "tokenizer")
_CHANGING = (
    *("clip_skip", "long_prompt", "prompt_weighting"),
    *("max_sequence_length", "text_encoder_out_layers"),
)
"""The arguments of a call that would encode its texts otherwise."""


@dataclasses.dataclass(frozen=True, eq=False)
class EncodedTexts:
    """The embeddings of all texts that calls may have."""

    prompts: Mapping[str, Prompt]
    """The embeddings of each text, 1 ... ."""
    encoders: tuple[str, ...]
    """The names of the text encoders, whose parameters are freed."""
    arguments: Mapping[str, Any]
    """The arguments of a call that the texts were encoded with."""

    def find(self, call: Call, texts: Mapping[str, Sequence[str]]) -> Prompt:
        """Returns the embeddings of n texts, of which those with lengths are filled up to one.

        texts: n texts for each text encoder.

        Raises:
            ValueError: a text is not among the encoded ones, or the call would encode it otherwise.
        """
        for name, value in self.arguments.items():
            if getattr(call, name) != value:
                raise ValueError(
                    f"{name} cannot be given after encode_first, which has encoded the texts "
                    "without it; leave one of the two out"
                )
        rows = [self._one(own) for own in zip(*texts.values(), strict=True)]
        longest = max(row.context.shape[1] for row in rows)
        filled = [_filled(row, longest) for row in rows]
        found: Prompt = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *filled)
        return found

    def _one(self, texts: tuple[str, ...]) -> Prompt:
        unknown = [text for text in texts if text not in self.prompts]
        if unknown:
            raise ValueError(
                f"{unknown[0]!r} is not among the texts of encode_first, and the text encoders are "
                "freed; give it there, or load the pipeline without encode_first"
            )
        if len(set(texts)) > 1:
            raise ValueError(
                "encode_first encodes each text with all text encoders; leave prompt_2 and "
                "negative_prompt_2 out, or load the pipeline without encode_first"
            )
        return self.prompts[texts[0]]


def load_encoding_first(
    target: Any,
    folder: Path,
    texts: Sequence[str] | None,
    given: Mapping[str, Any],
    dtype: Any,
    *,
    variant: str | None = None,
    device: Any = None,
    encoder_mesh: Mesh | None = None,
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
    if texts is None:
        return load_components(target, folder, given, dtype, **options, **places), None
    _check(target, texts, given)
    others = [c.name for c in target.all_components if c.role not in _OF_TEXTS]
    first = load_components(target, folder, [*others, *given], dtype, **places)
    encoders = [name for name in target.family.names("text_encoder") if name in first]
    arguments = _arguments(target)
    prompts = _encode(target.family, first, texts, arguments, device, encoder_mesh)
    encoded = EncodedTexts(prompts, tuple(encoders), arguments)
    for name in encoders:
        for leaf in jax.tree.leaves(first[name].params):
            leaf.delete()
        first[name] = Model(first[name].network, {})
    rest = load_components(target, folder, [*given, *first], dtype, **options, **places)
    return {**first, **rest}, encoded


def _check(target: Any, texts: Sequence[str], given: Mapping[str, Any]) -> None:
    names = target.family.names("text_encoder")
    if isinstance(texts, str) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"encode_first must be a list of texts (got {texts!r:.200})")
    if not names:
        raise ValueError(f"{target.__name__} reads no texts; leave encode_first out")
    if twice := [name for name in names if name in given]:
        raise ValueError(
            f"only one of {twice[0]} and encode_first can be given, which reads the checkpoint's "
            "text encoders"
        )


def _arguments(target: Any) -> dict[str, Any]:
    """Returns the arguments that texts are encoded with: the defaults of a pipeline's call."""
    declared = inspect.signature(target.__call__).parameters
    given = {name: declared[name].default for name in _CHANGING if name in declared}
    call = check_call({"prompt": "", **given})
    return {name: getattr(call, name) for name in _CHANGING}


def _encode(
    family: Any,
    loaded: Mapping[str, Any],
    texts: Sequence[str],
    arguments: Mapping[str, Any],
    device: Any,
    encoder_mesh: Mesh | None,
) -> dict[str, Prompt]:
    """Returns the embeddings of the texts, and of the empty one, which guidance needs."""
    models = {name: model for name, model in loaded.items() if isinstance(model, Model)}
    components = Components.of(
        family,
        {name: model.network for name, model in models.items()},
        {name: model.params for name, model in models.items()},
        tokenizers={n: loaded[n] for n in family.names("tokenizer") if n in loaded},
        scheduler=None,
        options=dict(family.options),
        mesh=device if isinstance(device, Mesh) else None,
        encoder_mesh=encoder_mesh,
    )
    found = {}
    with in_mesh(components.local_mesh):
        for text in dict.fromkeys(["", *texts]):
            prompt = embed_prompts(components, check_call({**arguments, "prompt": text}), 1)
            found[text] = jax.block_until_ready(jax.tree.map(lambda x: x[:, 0], prompt))
    return found


def _filled(prompt: Prompt, length: int) -> Prompt:
    """Returns embeddings with padding up to a length, where they say how many count."""
    more = length - prompt.context.shape[1]
    if prompt.lengths is None or not more:
        return prompt
    return prompt._replace(context=jnp.pad(prompt.context, ((0, 0), (0, more), (0, 0))))
