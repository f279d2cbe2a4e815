"""How calls give embeddings in the place of prompts, and what `encode_prompt` returns of them."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.pipelines.families.policies import of_branch
from diffusax.pipelines.plan.arguments import Call, read_numbers
from diffusax.pipelines.plan.plan import Prompt


@dataclasses.dataclass(frozen=True)
class OneLength:
    """All prompts of a call have embeddings of one length: arrays n t d, and n p of pooled ones."""

    def read(self, call: Call, names: Sequence[str], width: int | None) -> Prompt:
        """Returns the embeddings that a call gives.

        Args:
            call: the call.
            names: the arguments that hold them, in the order of `Prompt`'s fields.
            width: the width of the embeddings; None for any.

        Raises:
            ValueError: one is missing, has another shape or is not numbers.
        """
        first, *others = names
        embeds = [check_embeds(first, getattr(call, first), 3, width)]
        for name in others:
            if getattr(call, name) is None:
                raise ValueError(f"{name} must be given with {first}; see encode_prompt")
            embeds.append(check_embeds(name, getattr(call, name), 2))
        return Prompt(*embeds)

    def align(self, found: Mapping[str, Prompt]) -> dict[str, Prompt]:
        """Returns the embeddings of prompts and of negative prompts in one length, if it can be."""
        return dict(found)

    def encoded(self, prompt: Prompt, fields: int, *, guided: bool) -> tuple[Any, ...]:
        """Returns what `encode_prompt` does: prompts, negative prompts, and their pooled outputs.

        prompt: the embeddings of the branches, b k .... fields: how many of its fields are meant.
        """
        leaves: Any = prompt[:fields]
        halves = ((leaf[:, 0], leaf[:, 1] if guided else None) for leaf in leaves)
        return tuple(half for pair in halves for half in pair)


@dataclasses.dataclass(frozen=True)
class OwnLengths(OneLength):
    """Each prompt has embeddings of its own length: lists of arrays t d."""

    pad: Callable[[Sequence[Any]], Prompt]
    """A function (n arrays t d) -> Prompt n t d of one length, with their lengths."""

    def read(self, call: Call, names: Sequence[str], width: int | None) -> Prompt:
        """Returns the embeddings that a call gives, padded; see `OneLength.read`."""
        (name,) = names
        embeds = getattr(call, name)
        if not isinstance(embeds, list | tuple):
            return self.pad(list(check_embeds(name, embeds, 3, width)))
        if not embeds:
            raise ValueError(f"{name} must have at least one array (tokens, width) (got none)")
        axes = "a list of (tokens, width)"
        return self.pad([check_embeds(name, x, 2, width, axes=axes) for x in embeds])

    def align(self, found: Mapping[str, Prompt]) -> dict[str, Prompt]:
        """Returns the embeddings with padding, so that all have the most tokens of any."""
        longest = max(prompt.context.shape[1] for prompt in found.values())

        def padded(prompt: Prompt) -> Prompt:
            more = longest - prompt.context.shape[1]
            if not more:
                return prompt
            return prompt._replace(context=jnp.pad(prompt.context, ((0, 0), (0, more), (0, 0))))

        return {prefix: padded(prompt) for prefix, prompt in found.items()}

    def encoded(self, prompt: Prompt, fields: int, *, guided: bool) -> tuple[Any, ...]:
        """Returns what `encode_prompt` does: lists of prompts and of negative prompts."""
        first = of_branch(prompt.context, prompt.lengths, 0)
        return first, of_branch(prompt.context, prompt.lengths, 1) if guided else []


@dataclasses.dataclass(frozen=True)
class Masked(OwnLengths):
    """Prompts have several embeddings of each token, n t l d, of which a mask n t says which count.

    Here the embeddings of a token stand side by side, and tokens that do not count are left out.
    Lists of arrays t (l d), as callbacks have them, are taken, too, and need no mask.
    """

    def read(self, call: Call, names: Sequence[str], width: int | None) -> Prompt:
        """Returns the embeddings that a call gives, padded; see `OneLength.read`."""
        (name,) = names
        given, axes = getattr(call, name), "(prompts, tokens, layers, width)"
        if isinstance(given, list | tuple) or getattr(given, "ndim", 0) == 3:
            return super().read(call, names, width)
        embeds = check_embeds(name, given, 4, axes=axes)
        joined = embeds.reshape(*embeds.shape[:2], -1)
        if width not in (None, joined.shape[-1]):
            raise ValueError(
                f"{name} must have {width} numbers of each token, in all layers together (got "
                f"{embeds.shape[2]} times {embeds.shape[3]})"
            )
        mask = getattr(call, f"{name}_mask")
        if mask is None:
            raise ValueError(f"{name}_mask must be given with {name}; see encode_prompt")
        read = check_mask(f"{name}_mask", mask, embeds.shape[:2])
        return self.pad([x[own] for x, own in zip(joined, read)])


@dataclasses.dataclass(frozen=True)
class MaskedTokens(OwnLengths):
    """Prompts have embeddings of one length, n t d, of which a mask n t may say which count.

    Here tokens that do not count, which follow the others, are left out.
    """

    def read(self, call: Call, names: Sequence[str], width: int | None) -> Prompt:
        """Returns the embeddings that a call gives, padded; see `OneLength.read`."""
        (name,) = names
        embeds = check_embeds(name, getattr(call, name), 3, width)
        mask = getattr(call, f"{name}_mask")
        if mask is None:
            return self.pad(list(embeds))
        read = check_mask(f"{name}_mask", mask, embeds.shape[:2])
        return self.pad([x[own] for x, own in zip(embeds, read)])


def check_mask(name: str, mask: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns which tokens count, n t booleans.

    Raises:
        ValueError: the mask has another shape, or a row without any.
    """
    read = read_numbers(name, mask).astype(bool)
    if read.shape != shape or not read.any(axis=1).all():
        raise ValueError(
            f"{name} must have shape {shape}, and a one in each row (got shape {read.shape})"
        )
    return read


def padded_embeds(embeds: Sequence[Any], size: Callable[[int], int]) -> Prompt:
    """Returns hidden states of different lengths, t d each, as n s d with their lengths.

    size: a function (the most tokens) -> s.
    """
    lengths = np.array([len(x) for x in embeds], np.int32)
    longest = size(int(lengths.max()))
    rows = [jnp.pad(jnp.asarray(x), ((0, longest - len(x)), (0, 0))) for x in embeds]
    return Prompt(jnp.stack(rows), lengths=lengths)


def check_embeds(
    name: str, embeds: Any, ndim: int, width: int | None = None, *, axes: str | None = None
) -> Any:
    """Checks and returns embeddings, as a NumPy or JAX array. axes: the axes' names for the error.

    Raises:
        ValueError: they have another shape, or are not numbers.
    """
    axes = axes or ("(prompts, tokens, width)" if ndim == 3 else "(prompts, width)")
    shape = getattr(embeds, "shape", None)
    if shape is None or len(shape) != ndim or width not in (None, shape[-1]) or not len(embeds):
        wanted = "" if width is None else f" with a width of {width}"
        got = type(embeds).__name__ if shape is None else tuple(shape)
        raise ValueError(f"{name} must be an array of shape {axes}{wanted} (got {got})")
    return embeds if isinstance(embeds, jax.Array) else read_numbers(name, embeds)
