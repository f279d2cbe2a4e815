"""Which examples learn without their text, without their picture, or without both.

Classifier-free guidance needs predictions without conditions, and InstructPix2Pix's two scales need
those without either and without both.
"""

from typing import Any, NamedTuple

import jax


class Dropped(NamedTuple):
    """What an example goes without. b, bool."""

    text: Any
    image: Any


def drop_conditions(u: jax.Array, probability: float) -> Dropped:
    """Text alone, both, or the picture alone, each with the same probability.

    Brooks et al. 2023, section 3.2.1; the intervals are those of diffusers' examples
    instruct_pix2pix/train_instruct_pix2pix.py: text alone below p, both below 2 p, the picture
    alone below 3 p.

    Args:
        u: b, uniform in [0, 1), one number for each example.
        probability: p, at most a third.
    """
    text = u < 2 * probability
    image = (u >= probability) & (u < 3 * probability)
    return Dropped(text, image)
