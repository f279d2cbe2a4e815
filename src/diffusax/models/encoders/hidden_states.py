"""What language models return: the hidden states after all layers, or after chosen ones."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.models.layers.inputs import check_ids, check_token_ids
from diffusax.models.streaming import streamed


class LanguageOutput(NamedTuple):
    """The outputs of a language model; a compiled program does not compute those nobody uses.

    last_hidden_state: b t c, after the final norm. hidden_states: the embeddings, each layer's
    output, and as the last one last_hidden_state, b t c each. logits: b t n, of the next token
    among n, or None.
    """

    last_hidden_state: jax.Array
    hidden_states: tuple[jax.Array, ...]
    logits: jax.Array | None = None


class ImageTokens(NamedTuple):
    """What a language model reads in the place of the tokens that stand for images.

    mask: b t, whether a token, which must be one that is read, stands for a part of an image.
    embeds: n c, the parts of all images in the order of these n tokens. deepstack: n c each, what
    is added to the states of these tokens after the first layer, the second and so on (Meng et al.
    2024).
    """

    mask: jax.Array
    embeds: jax.Array
    deepstack: tuple[jax.Array, ...] = ()

    def put_into(
        self, x: jax.Array, steps: Sequence[Callable[[jax.Array], jax.Array]]
    ) -> tuple[jax.Array, list[Callable[[jax.Array], jax.Array]]]:
        """Returns a text's embeddings, b t c, with those of images, and steps that add the rest.

        What is added after a layer is added as the next step begins: states after layers are
        without it, as transformers' are.

        steps: the layers in order, and what follows the last one.
        """
        here = self.mask.astype(bool)[..., None]
        rows = jnp.cumsum(here.reshape(-1)).reshape(x.shape[:2]) - 1
        embeds = self.embeds.astype(x.dtype)[rows]

        def adding(
            own: jax.Array, step: Callable[[jax.Array], jax.Array]
        ) -> Callable[[jax.Array], jax.Array]:
            return lambda x: step(x + jnp.where(here, own.astype(x.dtype)[rows], 0))

        first, *rest = steps
        added = [adding(own, step) for own, step in zip(self.deepstack, rest)]
        return jnp.where(here, embeds, x), [first, *added, *rest[len(added) :]]


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
        states.append(streamed(block)(states[-1]))
    if count in wanted:
        states[count] = norm(states[count])
    return tuple(states[index] for index in wanted)


class LanguageModel(nnx.Module):
    """A language model: tokens to the hidden states after its layers."""

    config: Any
    run_layers: Callable[..., tuple[jax.Array, ...]]
    """A method (tokens b t that are known to be right, key_lengths, layers) -> what `hidden_states`
    returns."""

    def __call__(
        self, input_ids: jax.Array, key_lengths: jax.Array | None = None
    ) -> LanguageOutput:
        """Computes the hidden states after every layer; see `hidden_states`."""
        states = self.hidden_states(input_ids, key_lengths)
        return LanguageOutput(states[-1], states)

    def hidden_states(
        self,
        input_ids: jax.Array,
        key_lengths: jax.Array | None = None,
        *,
        layers: Sequence[int] | None = None,
    ) -> tuple[jax.Array, ...]:
        """Computes the hidden states after chosen layers, b t c each, and no layer after those.

        Args:
            input_ids: the tokens, b t.
            key_lengths: b, int32: the tokens of each text that are read, at least one; pads follow.
                None reads all of them, also pads, as FLUX.1 and Stable Diffusion 3 do.
            layers: indices of transformers' `hidden_states`, such as (-2,) for Z-Image and
                (9, 18, 27) for FLUX.2 klein; 0 is for the embeddings, and the last one, -1, is
                after the final norm. None for all.

        Raises:
            ValueError: input_ids are not integers, or have another shape or, in a NumPy array, an
                id that the embedding does not have; or layers has an index that there is not.
        """
        self.check_tokens(input_ids)
        return self.run_layers(input_ids, key_lengths, layers)

    def check_tokens(self, input_ids: jax.Array) -> None:
        """Raises ValueError for tokens that are no integers b t or, in a NumPy array, have no
        embedding.
        """
        check_ids("input_ids", input_ids)
        if isinstance(input_ids, np.ndarray):
            check_token_ids(self.config, input_ids)
