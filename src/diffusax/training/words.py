"""Adds a word to a checkpoint, whose embeddings are then trained."""

import dataclasses

from diffusax.models.encoders.clip import CLIPTextModel
from diffusax.models.encoders.token_table import EncoderWithWords
from diffusax.models.network import Network
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.text.words import taken_name, token_names
from diffusax.training.base_model import BaseModel


def with_word(base: BaseModel, word: str, count: int, initializer: str) -> BaseModel:
    """Returns the checkpoint with a word of `count` embeddings, which its parameters have as rows.

    All tokenizers know the word, and all text encoders have rows for it (`EncoderWithWords`). They
    begin as those of the initializer's tokens, which are repeated in turn until there are enough.

    Args:
        base: the checkpoint.
        word: the word, such as "<cat-toy>".
        count: the number of its embeddings in each text encoder.
        initializer: a text of at least one and at most `count` tokens.

    Raises:
        ValueError: the word or the initializer cannot be used, or a text encoder is not CLIP's;
            says why.
    """
    if word != " ".join(word.split()):
        raise ValueError(
            f"placeholder_token must have no spaces around it and none in a row (got {word!r})"
        )
    tokenizers, networks = dict(base.tokenizers), dict(base.networks)
    for encoder in base.family.text_encoders:
        tokenizer, network = base.tokenizers[encoder.tokenizer], base.networks[encoder.name]
        _check_encoder(base, encoder.name, tokenizer, network)
        _check_word(encoder.tokenizer, tokenizer, word, count)
        initial = _initial_tokens(tokenizer, count, initializer)
        known = tokenizer.with_words(token_names(word, count))
        tokenizers[encoder.tokenizer] = known
        first = known.words[word]
        networks[encoder.name] = EncoderWithWords.of(network, first=first, initial=initial)
    return dataclasses.replace(base, tokenizers=tokenizers, networks=networks)


def _check_encoder(base: BaseModel, name: str, tokenizer: object, network: Network) -> None:
    if not isinstance(tokenizer, CLIPTokenizer) or not issubclass(
        network.module_class, CLIPTextModel
    ):
        raise ValueError(
            f"{base.folder} has the {name} {network.class_name}, and words can be taught to CLIP's "
            "text encoders alone; use a checkpoint of Stable Diffusion 1, 2 or XL"
        )


def _check_word(name: str, tokenizer: CLIPTokenizer, word: str, count: int) -> None:
    """Raises ValueError where a tokenizer has the word already or texts have no room for it."""
    room = tokenizer.model_max_length - 2
    if count > room:
        raise ValueError(
            f"num_vectors={count} is more than the {room} tokens that a text has; use fewer"
        )
    added = {name.lower(): name for name in tokenizer.words}
    taken = taken_name(word, count, added, tokenizer.tokenizer.get_vocab())
    if taken is not None:
        raise ValueError(
            f"placeholder_token={word!r} cannot be added, as {name} has {taken!r} already; use "
            "another word"
        )


def _initial_tokens(tokenizer: CLIPTokenizer, count: int, initializer: str) -> tuple[int, ...]:
    ids = tokenizer.ids_of(initializer)
    if not 1 <= len(ids) <= count:
        raise ValueError(
            f"initializer_token={initializer!r} has {len(ids)} tokens for num_vectors={count}; use "
            "a text of at least one token and at most as many as there are vectors"
        )
    return tuple(ids[i % len(ids)] for i in range(count))
