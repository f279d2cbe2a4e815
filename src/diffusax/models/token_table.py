"""The table of token embeddings of a CLIP text encoder, with rows for further tokens.

The table grows to a multiple of 256 rows, so that other further tokens compile nothing. A model
without any has the table of its checkpoint.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from diffusax.models.clip import CLIPTextModel
from diffusax.models.network import Model, Network, Params

ROWS = 256
"""The number of rows of a table that has grown is a multiple of this."""
_PATH = ("text_model", "embeddings", "token_embedding", "embedding")


def has_table(model: Model) -> bool:
    """Returns whether a model is a text encoder of diffusax's own, whose table can grow."""
    network = model.network
    return isinstance(network, Network) and issubclass(network.module_class, CLIPTextModel)


def read_rows(model: Model, ids: Mapping[int, int]) -> dict[int, np.ndarray]:
    """Returns rows of a model's table on the host, by the new ids of their tokens.

    ids: the present id of each token by its new id.
    """
    table = np.asarray(_table(model.params))
    return {new: table[old] for new, old in ids.items()}


def write_rows(
    model: Model,
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


def replace_table(model: Model, table: Any) -> None:
    """Gives a model another table of any number of rows, which are its own from then on."""
    model.network = _with_size(model.network, len(table))
    model.params = _with_table(model.params, table)
    model.switches.own_rows = None


def own_rows(model: Model) -> int:
    """Returns the number of rows that a model's table has without further tokens."""
    size: int = model.config.vocab_size
    return size if model.switches.own_rows is None else model.switches.own_rows


def without_spare_rows(model: Model, count: int) -> Model:
    """Returns a model to save, whose table has no rows beyond its own and those of `count` tokens.

    The model itself is returned where its table has not grown.
    """
    if model.switches.own_rows is None:
        return model
    size = max(count, own_rows(model))
    table = np.asarray(_table(model.params))[:size]
    return Model(_with_size(model.network, size), _with_table(model.params, table))


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
