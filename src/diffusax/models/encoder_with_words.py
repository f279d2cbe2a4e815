"""A CLIP text encoder in which some words have rows of their own, beside the table of embeddings.

Textual inversion (Gal et al. 2022) trains these rows alone. The table is not part of what is
trained, so no gradient of its size is computed and no row of it changes.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.network import Network, Params

WORDS = "words"
"""The name of the words' rows in the parameter tree: {"embedding": n d}."""


@dataclasses.dataclass(frozen=True)
class EncoderWithWords(Network):
    """A CLIP text encoder with rows for n words whose tokens follow each other.

    It is called as the encoder is. Its parameters are those of the encoder, and under `WORDS` the
    rows of the words. `config` is the encoder's with a `vocab_size` that counts the words.
    """

    table_rows: int
    """The number of rows of the encoder's own table."""
    first: int
    """The token of the first word."""
    initial: tuple[int, ...]
    """The token whose row each of the words begins with, n."""

    @classmethod
    def of(cls, network: Network, *, first: int, initial: tuple[int, ...]) -> "EncoderWithWords":
        """Returns a text encoder with words.

        Args:
            network: the text encoder, a CLIPTextModel.
            first: see the attribute.
            initial: see the attribute.
        """
        rows = network.config.vocab_size
        config = dataclasses.replace(network.config, vocab_size=max(rows, first + len(initial)))
        return cls(network.module_class, config, rows, first, initial)

    @property
    def encoder(self) -> Network:
        """The text encoder without the words."""
        config = dataclasses.replace(self.config, vocab_size=self.table_rows)
        return Network(self.module_class, config)

    @property
    def shapes(self) -> Params:
        """The parameter tree as shapes; computes nothing."""
        shape = (len(self.initial), self.config.hidden_size)
        rows = {"embedding": jax.ShapeDtypeStruct(shape, np.float32)}
        return {**self.encoder.shapes, WORDS: rows}

    def with_initial_rows(self, params: Params) -> Params:
        """Returns the encoder's parameters with the words' first rows, which the table gives."""
        table = params["text_model"]["embeddings"]["token_embedding"]["embedding"]
        return {**params, WORDS: {"embedding": table[jnp.array(self.initial)]}}

    def module(self, params: Params) -> Any:
        """Returns the Flax module with these parameters; it looks the words up in their rows."""
        params = self.fitted(params)
        module = self.encoder.module({k: v for k, v in params.items() if k != WORDS})
        embeddings = module.text_model.embeddings
        lookup = _Lookup(embeddings.token_embedding, params[WORDS]["embedding"], self.first)
        # An attribute of this trace's module alone, which is no part of Flax's state.
        object.__setattr__(embeddings, "token_embedding", lookup)
        return module


class _Lookup(NamedTuple):
    """A lookup in a table, and for n tokens from `first` on in rows n d. ids: b t -> b t d."""

    table: Any
    rows: jax.Array
    first: int

    def __call__(self, ids: jax.Array) -> jax.Array:
        word = ids - self.first
        is_word = (word >= 0) & (word < len(self.rows))
        row = self.rows[jnp.where(is_word, word, 0)]
        return jnp.where(is_word[..., None], row, self.table(jnp.where(is_word, 0, ids)))
