"""Images that a transformer of text to image learns to look at: clean latents that are tokens, too.

They are modulated as a clean image is. In the layout "blind" they see each other alone, so that
their keys and values are the same in all steps; in "joint" they, the text and the image that is
generated see each other. Source: ai-toolkit, diffusion_models/krea2/src/mmdit.py (`isolate_refs`,
which its option kv_cache turns on), after OminiControl2 (Tan et al. 2025).
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.ops.attention import attention
from diffusax.models.ops.matmul import concatenate

Layout = Literal["blind", "joint"]
"""Which tokens the images to look at see: each other, or all."""
BLIND: Layout = "blind"
JOINT: Layout = "joint"

KeysValues = tuple[jax.Array, jax.Array]
"""Keys, rotated, and values, b n h d."""


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    before: KeysValues | None,
    lengths: jax.Array | None = None,
) -> jax.Array:
    """Returns what tokens read of each other, and of others that were read before, b t h d.

    Args:
        q: b t h d.
        k: b s h d.
        v: b s h d.
        before: the keys and values of the others, which all tokens attend to; None for no others.
        lengths: how many of the first s are attended to, b; None for all.
    """
    if before is not None:
        # Lengths are those of what comes last.
        k, v = (concatenate(pair, axis=1) for pair in zip(before, (k, v)))
        lengths = None if lengths is None else before[0].shape[1] + lengths
    return attention(q, k, v, key_lengths=lengths)


class OfTwoTimes(NamedTuple):
    """What follows from the time, for tokens of two times: of those that change, and clean ones."""

    moving: jax.Array
    """b ..., for the image that is generated and its text."""
    still: jax.Array
    """b ..., for images to look at."""
    is_still: jax.Array
    """Which tokens the latter is for, t."""


Timed = jax.Array | OfTwoTimes
"""What follows from the time, b ...: one for all tokens, or `OfTwoTimes`."""


def between(moving: jax.Array, still: jax.Array, before: int, count: int, after: int) -> OfTwoTimes:
    """Returns what follows from two times, of which the clean one is for tokens amid others.

    Args:
        moving: see `OfTwoTimes`.
        still: see `OfTwoTimes`.
        before: the number of tokens before those of images to look at.
        count: the number of these.
        after: the number of tokens after them.
    """
    return OfTwoTimes(
        moving, still, jnp.asarray(np.repeat([False, True, False], (before, count, after)))
    )


def rows_of(timed: Timed, rows: Callable[[jax.Array], Sequence[Any]]) -> Sequence[Any]:
    """Returns the shifts, scales and gates of tokens, b 1 c each, or b t c for those of two times.

    rows: a function of what follows from one time -> b 1 c each.
    """
    if not isinstance(timed, OfTwoTimes):
        return rows(timed)
    pairs = zip(rows(timed.still), rows(timed.moving), strict=True)
    return [jnp.where(timed.is_still[:, None], still, moving) for still, moving in pairs]
