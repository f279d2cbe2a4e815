"""Errors of predictions and of reconstructed images, one for each example."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


def squared_error(
    prediction: jax.Array, target: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Returns the mean squared error of each example, in float32. b ... c -> b.

    weights: what each place of an example counts for, b ...; by default 1.
    """
    difference = prediction.astype(jnp.float32) - target.astype(jnp.float32)
    squares = difference**2 if weights is None else weights[..., None] * difference**2
    return jnp.mean(squares, axis=tuple(range(1, difference.ndim)))


def kl_divergence(mean: jax.Array, logvar: jax.Array) -> jax.Array:
    """Returns the KL divergence of a diagonal normal from the standard normal, summed over latents.

    Kingma and Welling 2014, appendix B. b h w z -> b.
    """
    terms = mean**2 + jnp.exp(logvar) - 1.0 - logvar
    return 0.5 * jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def gradient_difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean difference of image gradients (Mathieu et al. 2016, equation 6, alpha=1).

    It sums vertical and horizontal gradients; a blurred edge costs its lost contrast. b h w c -> b.
    """
    difference = x - y
    vertical = jnp.abs(jnp.diff(difference, axis=1)).mean((1, 2, 3))
    horizontal = jnp.abs(jnp.diff(difference, axis=2)).mean((1, 2, 3))
    return vertical + horizontal


def structural_dissimilarity(x: jax.Array, y: jax.Array, *, window: int = 7) -> jax.Array:
    """Returns (1 - SSIM) / 2 in uniform windows, for images in [-1, 1].

    Wang et al. 2004. b h w c -> b.
    """

    def local_mean(z: jax.Array) -> jax.Array:
        total = jax.lax.reduce_window(
            z, 0.0, jax.lax.add, (1, window, window, 1), (1, 1, 1, 1), "VALID"
        )
        return total / window**2

    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    mean_x, mean_y = local_mean(x), local_mean(y)
    variance_x = local_mean(x * x) - mean_x**2
    variance_y = local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    ssim = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    )
    return (1 - ssim.mean((1, 2, 3))) / 2


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
