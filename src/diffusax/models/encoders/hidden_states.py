"""What language models return: the hidden states after all layers, or after chosen ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax


class LanguageOutput(NamedTuple):
    """The outputs of a language model; a compiled program does not compute those nobody uses.

    last_hidden_state: b t c, after the final norm. hidden_states: the embeddings, each layer's
    output, and as the last one last_hidden_state, b t c each. logits: b t n, of the next token
    among n, or None.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    logits: jax.Array | None = None


def chosen_states(
    x: jax.Array,
    blocks: Sequence[Callable[[jax.Array], jax.Array]],
    norm: Callable[[jax.Array], jax.Array],
    layers: Sequence[int] | None,
) -> tuple[jax.Array, ...]:
    """Computes the hidden states that are asked for, and no block after the last of them.

    Args:
        x: the embeddings, b t c.
        blocks: the layers in order.
        norm: the final norm, which the state after the last block goes through.
        layers: indices of transformers' `hidden_states`: 0 for the embeddings, i for the output of
            the i-th layer; negative ones count from the end. None for all.

    Raises:
        ValueError: an index is none of them.
    """
    count = len(blocks)
    layers = range(count + 1) if layers is None else layers
    for index in layers:
        if not -count - 1 <= index <= count:
            raise ValueError(
                f"layers must be from {-count - 1} to {count}, the number of layers (got {index})"
            )
    wanted = [index % (count + 1) for index in layers]
    states = [x]
    for block in blocks[: max(wanted, default=0)]:
        states.append(block(states[-1]))
    if count in wanted:
        states[count] = norm(states[count])
    return tuple(states[index] for index in wanted)
