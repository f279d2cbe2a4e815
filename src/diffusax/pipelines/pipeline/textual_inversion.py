"""The methods of pipelines that load and unload the embeddings of textual inversion."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from diffusax.checkpoints.embeddings import ENCODERS, Embedding, read_embeddings
from diffusax.checkpoints.keywords import take_keywords
from diffusax.models.encoders.token_table import has_table, read_rows, write_rows
from diffusax.networks import Model
from diffusax.pipelines.components.components import Components, on_host
from diffusax.pipelines.families import Component
from diffusax.pipelines.families.placement import device_of
from diffusax.pipelines.plan.arguments import as_list
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.text.words import names_of, taken_name, token_names

_TRAINED_FOR = {
    768: "Stable Diffusion 1",
    1024: "Stable Diffusion 2",
    1280: "the second text encoder of Stable Diffusion XL",
}
"""The models whose embeddings have as many numbers, for errors."""

Words = dict[str, np.ndarray]
"""Words with their embeddings, n d."""


class TextualInversion:
    """The methods of every pipeline under diffusers' names for textual inversion."""

    parts: Components

    def load_textual_inversion(
        self,
        pretrained_model_name_or_path: Any,
        token: str | list[str] | None = None,
        tokenizer: Any = None,
        text_encoder: Any = None,
        *,
        weight_name: str | None = None,
        subfolder: str | None = None,
        revision: str | None = None,
        hf_token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        **keywords: Any,
    ) -> None:
        """Loads embeddings of textual inversion (Gal et al. 2022), whose words prompts may have.

        A word of n embeddings stands for n tokens; `word_1`, `word_2`, ... name the later ones
        alone. The text encoder's table of embeddings grows to a multiple of 256 rows, so that
        another embedding compiles nothing. Pipelines that are made from this one by `from_pipe`
        afterwards have the words, too.

        Args:
            pretrained_model_name_or_path: a safetensors file, a folder or a Hub repository that has
                one, a dictionary {word: vectors}, an array of vectors n d, or a list of these. A
                file is diffusers' ({word: vectors}), stable-diffusion-webui's (emb_params, whose
                word is the file's name) or SDXL's (clip_l and clip_g, one for each text encoder).
            token: the word to use instead of the one in the file, or one for each entry of a list.
            tokenizer: the tokenizer, for SDXL, of the text encoder that the vectors are for.
            text_encoder: the text encoder that the vectors are for; the first one by default.
            weight_name: the file in a folder or repository; learned_embeds.safetensors by default.
            subfolder: the folder inside a folder or repository.
            revision: the branch, tag or commit of a repository.
            hf_token: the token for a private or gated repository.
            cache_dir: the folder of downloads, instead of the one in HF_HOME.
            local_files_only: whether to use only files that were downloaded before.
            **keywords: force_download, and diffusers' others, which change nothing here.

        Raises:
            ValueError: a file is missing, a pickle or no embedding, its vectors do not fit the text
                encoder, or a word is in the vocabulary already; nothing is loaded then.
            TypeError: there is no such argument.
        """
        hub = {"revision": revision, "token": hf_token, "cache_dir": cache_dir}
        hub |= take_keywords("load_textual_inversion", keywords, strict=True)[1]
        found = read_embeddings(
            pretrained_model_name_or_path,
            token,
            weight_name=weight_name,
            subfolder=subfolder,
            hub={**hub, "local_files_only": local_files_only},
        )
        asked = _chosen(self.parts, tokenizer, text_encoder)
        words = _by_encoder(self.parts, found, asked)
        sources = {embedding.token: embedding.source for embedding in found}
        for component, own in words:
            _check_words(self.parts, component, own, sources)
        for component, own in words:
            _add(self.parts, component, own)

    def unload_textual_inversion(
        self, tokens: str | list[str] | None = None, tokenizer: Any = None, text_encoder: Any = None
    ) -> None:
        """Removes words and their embeddings, with all the embeddings of each word.

        Args:
            tokens: the words; None removes all that were added to the vocabulary.
            tokenizer: the tokenizer of the text encoder that they are removed from.
            text_encoder: the text encoder that they are removed from; all by default.

        Raises:
            ValueError: a word was not added; nothing is removed then.
        """
        asked = _chosen(self.parts, tokenizer, text_encoder)
        vocabularies = [self.parts.tokenizers[component.tokenizer].words for component in asked]
        for word in as_list(tokens or []):
            if not any(word in words for words in vocabularies):
                known = ", ".join(repr(name) for words in vocabularies for name in words) or "none"
                raise ValueError(f"tokens has {word!r}; the words of the text encoder are {known}")
        for component, words in zip(asked, vocabularies):
            gone = words if tokens is None else [w for w in as_list(tokens) if w in words]
            _remove(self.parts, component, [n for w in gone for n in names_of(w, words)])

    def maybe_convert_prompt(self, prompt: str | list[str], tokenizer: Any) -> str | list[str]:
        """Returns prompts in which a word of several embeddings is followed by the later ones.

        So `<cat>` becomes `<cat> <cat>_1` where it has two. Calls do the same by themselves.

        Args:
            prompt: a prompt or a list of prompts.
            tokenizer: a tokenizer of the pipeline.
        """
        if isinstance(prompt, list):
            return [tokenizer.spell_out(text) for text in prompt]
        spelled: str = tokenizer.spell_out(prompt)
        return spelled


def _chosen(parts: Components, tokenizer: Any, text_encoder: Any) -> list[Component]:
    """Returns the text encoders that are asked for, all those of the pipeline by default.

    Raises:
        ValueError: there is none, or the one that is asked for is not the pipeline's.
    """
    known = [
        component
        for component in parts.family.text_encoders
        if component.name in parts.models and component.tokenizer in parts.tokenizers
    ]
    if not known:
        raise ValueError("this pipeline has no text encoder, which textual inversion needs")
    found = known
    if text_encoder is not None:
        found = [c for c in known if parts.models[c.name] is text_encoder]
    elif tokenizer is not None:
        found = [c for c in known if parts.tokenizers[c.tokenizer] is tokenizer]
    if not found:
        name = "tokenizer" if text_encoder is None else "text_encoder"
        names = [c.tokenizer if text_encoder is None else c.name for c in known]
        raise ValueError(f"{name} must be this pipeline's {' or '.join(names)}, as it is now")
    for component in found:
        known_kind = isinstance(parts.tokenizers[component.tokenizer], CLIPTokenizer)
        if not known_kind or not has_table(parts.models[component.name]):
            raise ValueError(
                f"{component.name} is no CLIP text encoder of diffusax's own; load the embedding "
                "in the PyTorch pipeline, and convert that"
            )
    return found


def _by_encoder(
    parts: Components, embeddings: Sequence[Embedding], asked: list[Component]
) -> list[tuple[Component, Words]]:
    """Returns the words for each text encoder that has some.

    asked: the text encoders that vectors may go to.

    Raises:
        ValueError: an embedding is for other text encoders than those of the pipeline.
    """
    words: dict[str, Words] = {component.name: {} for component in asked}
    for embedding in embeddings:
        if None in embedding.vectors:
            words[asked[0].name][embedding.token] = embedding.vectors[None]
            continue
        if tuple(c.name for c in parts.family.text_encoders) != tuple(ENCODERS.values()):
            raise ValueError(
                f"{embedding.source} is an embedding for Stable Diffusion XL, but this pipeline is "
                f"{parts.family.name}; use one that was trained for this model"
            )
        for name in words:
            if name not in embedding.vectors:
                raise ValueError(
                    f"{embedding.source} has no vectors for {name}; name the text encoder that it "
                    "is for with text_encoder="
                )
            words[name][embedding.token] = embedding.vectors[name]
    return [(component, words[component.name]) for component in asked if words[component.name]]


def _check_words(
    parts: Components, component: Component, words: Words, sources: Mapping[str, str]
) -> None:
    """Raises ValueError where words or their vectors do not fit a text encoder.

    sources: the names of what the words were read from.
    """
    model, tokenizer = parts.models[component.name], parts.tokenizers[component.tokenizer]
    width, room = model.config.hidden_size, tokenizer.model_max_length - 2
    names = {name.lower(): name for name in tokenizer.words}
    vocabulary = tokenizer.tokenizer.get_vocab()
    for word, vectors in words.items():
        if vectors.shape[1] != width:
            raise ValueError(
                f"{sources[word]} has {vectors.shape[1]} numbers in each vector of {word!r}, but "
                f"{component.name} takes {width}; {_mend(parts, vectors.shape[1])}"
            )
        if len(vectors) > room:
            raise ValueError(
                f"{sources[word]} has {len(vectors)} vectors of {word!r}, but {component.name} "
                f"reads at most {room} tokens at once; use an embedding of fewer vectors"
            )
        taken = taken_name(word, len(vectors), names, vocabulary)
        if taken is not None:
            raise ValueError(
                f"token {word!r} of {sources[word]} cannot be added, as {component.tokenizer} has "
                f"{taken!r} already; give another token=, or unload_textual_inversion the other"
            )
        names |= {name.lower(): name for name in token_names(word, len(vectors))}


def _mend(parts: Components, width: int) -> str:
    """Returns what to do with an embedding of this width that does not fit."""
    for component in parts.family.text_encoders:
        model = parts.models.get(component.name)
        if model is not None and getattr(model.config, "hidden_size", None) == width:
            return f"give text_encoder=pipe.{component.name}, which does"
    trained = _TRAINED_FOR.get(width)
    other = "" if trained is None else f", as this one is for {trained}"
    return f"use one that was trained for this model{other}"


def _add(parts: Components, component: Component, words: Words) -> None:
    """Adds words to a tokenizer, and their embeddings to its text encoder."""
    rows = {
        name: vector
        for word, vectors in words.items()
        for name, vector in zip(token_names(word, len(vectors)), vectors)
    }
    tokenizer = parts.tokenizers[component.tokenizer].with_words(list(rows))
    _replace(parts, component, tokenizer, {tokenizer.words[name]: v for name, v in rows.items()})


def _remove(parts: Components, component: Component, words: Sequence[str]) -> None:
    """Removes words from a tokenizer, and their embeddings from its text encoder."""
    before = parts.tokenizers[component.tokenizer]
    if not words:
        return
    after = before.without_words(words)
    ids = before.tokenizer.get_added_tokens_decoder()
    old = {token.content: i for i, token in ids.items()}
    new = {t.content: i for i, t in after.tokenizer.get_added_tokens_decoder().items()}
    moved = {i: old[name] for name, i in new.items() if old[name] != i}
    _replace(parts, component, after, read_rows(parts.models[component.name], moved))


def _replace(
    parts: Components, component: Component, tokenizer: Any, rows: Mapping[int, np.ndarray]
) -> None:
    """Replaces a tokenizer, and the rows of some of its tokens in the text encoder's table."""
    model: Model = parts.models[component.name]
    params = model.params
    apart = parts.mesh is not None or on_host(params)

    def place(table: np.ndarray) -> Any:
        return table if apart else jax.device_put(table, device_of(params))

    parts.tokenizers[component.tokenizer] = tokenizer
    write_rows(model, rows, tokenizer.max_id + 1, place)
    model.params = parts.placed(component.name, model.params)
    parts.forget()
