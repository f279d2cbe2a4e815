"""The random numbers of a step: noise, times, and which conditions are dropped."""

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


class Draws(NamedTuple):
    """The random numbers of a batch, with one row per example."""

    latent_noise: jax.Array | None
    """The noise that samples the autoencoder's distribution, b ... z; None where its mode is taken,
    and where there is no autoencoder."""
    noise: jax.Array
    """The noise that is added to the latents, with the noise offset, b ... z."""
    timesteps: jax.Array
    """The training times of the process, b."""
    dropped: Dropped
    """Whether the caption is replaced by the empty one, and the image by zeros, b each."""
    adapters: jax.Array | None = None
    """The random keys of the adapters' dropout, b; None without it."""
    first_frame: jax.Array | None = None
    """Which clips are shown their first frame, b; None where all are, or none."""
