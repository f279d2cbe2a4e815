"""Guidance as weights over branches: predictions of one network under different conditions.

Branch 0 has every condition. The guided prediction is y0 + sum_j w_j (y0 - y_j): k branches have k
- 1 weights, and weights of zero mean no guidance.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np


def classifier_free(scale: float) -> tuple[float, ...]:
    """Returns the weight of classifier-free guidance (Ho and Salimans 2022).

    The scale is Imagen's, where 1 is no guidance.
    """
    return (scale - 1.0,)


def instruct(text_scale: float, image_scale: float) -> tuple[float, ...]:
    """Returns the weights of InstructPix2Pix's guidance (Brooks et al. 2023, equation 3).

    The branches are (text, image), (none, image) and (none, none).
    """
    return (text_scale - image_scale, image_scale - 1.0)


def per_row(
    weights: Sequence[float], rows: int, height: int, interval: tuple[float, float] = (0.0, 1.0)
) -> np.ndarray:
    """Returns the weights of each row, height k-1, zero outside the interval and in padding rows.

    rows: the rows of the run. height: the rows of the table with its padding. interval: the start
    and end of guidance, in fractions of the rows (Kynkäänniemi et al. 2024).
    """
    table = np.zeros((height, len(weights)), np.float32)
    start, stop = (round(fraction * rows) for fraction in interval)
    table[start:stop] = weights
    return table


def last_guided_row(weights: np.ndarray) -> int:
    """Returns the row after the last one with guidance, 0 without any. weights: n k-1."""
    guided = np.flatnonzero(np.any(weights, axis=1))
    return int(guided[-1]) + 1 if len(guided) else 0


def apply_guidance(y: jax.Array, weights: jax.Array, rescale: jax.Array) -> jax.Array:
    """Returns the guided prediction.

    Args:
        y: b k ..., float32, with every condition in branch 0.
        weights: k-1, or b k-1 where each image has its own.
        rescale: a scalar or b; phi of Lin et al. 2024, section 3.4, zero for none.

    Returns:
        b ...
    """
    first = y[:, 0]
    if y.shape[1] == 1:
        return first
    ones = (1,) * (first.ndim - 1)
    w = jnp.broadcast_to(weights, (y.shape[0], weights.shape[-1]))
    guided = first + sum(
        w[:, j - 1].reshape(-1, *ones) * (first - y[:, j]) for j in range(1, y.shape[1])
    )
    axes = tuple(range(1, guided.ndim))
    ratio = first.std(axes, keepdims=True, ddof=1) / guided.std(axes, keepdims=True, ddof=1)
    phi = jnp.broadcast_to(rescale, (y.shape[0],)).reshape(-1, *ones)
    return jnp.where(phi > 0, guided * (phi * ratio + 1 - phi), guided)
