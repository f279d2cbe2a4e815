"""The table of token embeddings of a CLIP text encoder, with rows for further tokens.

The table grows to a multiple of 256 rows, so that other further tokens compile nothing. A model
without any has the table of its checkpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.encoders.clip import CLIPTextModel
from diffusax.models.network import Network, Params

ROWS = 256
"""The number of rows of a table that has grown is a multiple of this."""
_PATH = ("text_model", "embeddings", "token_embedding", "embedding")


def has_table(model: Any) -> bool:
    """Returns whether a model is a text encoder of diffusax's own, whose table can grow."""
    network = model.network
    return isinstance(network, Network) and issubclass(network.module_class, CLIPTextModel)


def read_rows(model: Any, ids: Mapping[int, int]) -> dict[int, np.ndarray]:
    """Returns rows of a model's table on the host, by the new ids of their tokens.

    ids: the present id of each token by its new id.
    """
    table = np.asarray(_table(model.params))
    return {new: table[old] for new, old in ids.items()}


def write_rows(
    model: Any,
    rows: Mapping[int, np.ndarray],
    count: int,
    place: Callable[[np.ndarray], Any],
) -> None:
    """Changes rows of a model's table, which becomes as large as needed, or as small again.

    The table that the checkpoint had keeps its bits, but for the rows given.

    Args:
        model: a text encoder, which gets another network and other parameters.
        rows: vectors of d numbers, by token.
        count: the number of tokens, for which the table has to have rows.
        place: puts the table where the model's parameters are.
    """
    own = own_rows(model)
    size = own if count <= own else -(-count // ROWS) * ROWS
    before = np.asarray(_table(model.params))
    table = np.zeros((size, before.shape[1]), before.dtype)
    kept = min(size, max(own, min(count, len(before))))
    table[:kept] = before[:kept]
    for token, row in rows.items():
        table[token] = row
    model.network = _with_size(model.network, size)
    model.params = _with_table(model.params, place(table))
    model.switches.own_rows = None if size == own else own


def replace_table(model: Any, table: Any) -> None:
    """Gives a model another table of any number of rows, which are its own from then on."""
    model.network = _with_size(model.network, len(table))
    model.params = _with_table(model.params, table)
    model.switches.own_rows = None


def own_rows(model: Any) -> int:
    """Returns the number of rows that a model's table has without further tokens."""
    size: int = model.config.vocab_size
    return size if model.switches.own_rows is None else model.switches.own_rows


def without_spare_rows(model: Any, count: int) -> Any:
    """Returns a model to save, whose table has no rows beyond its own and those of `count` tokens.

    The model itself is returned where its table has not grown.
    """
    if model.switches.own_rows is None:
        return model
    size = max(count, own_rows(model))
    table = np.asarray(_table(model.params))[:size]
    return type(model)(_with_size(model.network, size), _with_table(model.params, table))


def _table(params: Params) -> Any:
    for name in _PATH:
        params = params[name]
    return params


def _with_table(params: Params, table: Any) -> Params:
    """Returns the parameters with another table; nothing else is copied."""

    def replaced(tree: Any, path: tuple[str, ...]) -> Any:
        if not path:
            return table
        first, *rest = path
        return {**tree, first: replaced(tree[first], tuple(rest))}

    return replaced(params, _PATH)


def _with_size(network: Network, size: int) -> Network:
    config = dataclasses.replace(network.config, vocab_size=size)
    return dataclasses.replace(network, config=config)


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
