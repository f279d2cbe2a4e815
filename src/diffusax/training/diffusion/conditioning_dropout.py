"""Chooses the examples that learn without their text, without their image, or without both.

Classifier-free guidance needs predictions without conditions, and InstructPix2Pix's two scales need
predictions without either condition and without both.
"""

from typing import Any, NamedTuple

import jax


class Dropped(NamedTuple):
    """Which conditions an example goes without. b, bool."""

    text: Any
    image: Any


def drop_conditions(u: jax.Array, probability: float) -> Dropped:
    """Drops the text alone, both, or the image alone, each with the same probability.

    Brooks et al. 2023, section 3.2.1; the intervals are those of diffusers' examples
    instruct_pix2pix/train_instruct_pix2pix.py: text alone below p, both below 2 p, the image alone
    below 3 p.

    Args:
        u: b, uniform in [0, 1), one number for each example.
        probability: p, at most a third.
    """
    text = u < 2 * probability
    image = (u >= probability) & (u < 3 * probability)
    return Dropped(text, image)
