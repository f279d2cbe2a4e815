"""Rotates channels by the positions of tokens, in the fastest form for the platform."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.runtime.devices.lowering import by_platform, is_plain


class Rotation(NamedTuple):
    """The rotation of each token's pairs of channels, b t d/2 each, or 1 t d/2."""

    cos: jax.Array
    sin: jax.Array


def rotate(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotates neighbouring pairs of channels in float32. x: b t h d -> b t h d, in x's dtype."""
    if is_plain():
        return _rotate_pairs(x, rotation)
    forms = {"tpu": "product", "cuda": "swap"}
    return by_platform(lambda p: forms.get(p, "pairs"), ROTATIONS, x, rotation)


def _rotate_pairs(x: jax.Array, rotation: Rotation) -> jax.Array:
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    real, imaginary = pairs[..., 0], pairs[..., 1]
    cos, sin = rotation.cos[:, :, None], rotation.sin[:, :, None]
    turned = real * cos - imaginary * sin, real * sin + imaginary * cos
    return jnp.stack(turned, axis=-1).reshape(x.shape).astype(x.dtype)


def _rotate_by_product(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Swaps the channels of pairs by a product with a permutation, which rounds nothing.

    An axis of length two would make a TPU copy the array into another layout and back.
    """
    quarter = np.kron(np.eye(x.shape[-1] // 2), [[0, 1], [-1, 0]])
    turned = jnp.matmul(
        x,
        jnp.asarray(quarter, x.dtype),
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    cos, sin = (jnp.repeat(table, 2, axis=-1)[:, :, None] for table in rotation)
    return (x.astype(jnp.float32) * cos + turned * sin).astype(x.dtype)


def _rotate_by_swap(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Reads each channel's neighbour, so that a GPU has no halves to write between each other."""
    pairs = x.astype(jnp.float32).reshape(*x.shape[:-1], -1, 2)
    cos, sin = (table[:, :, None, :, None] for table in rotation)
    turned = pairs * cos + jnp.flip(pairs, -1) * (sin * jnp.array([-1.0, 1.0], jnp.float32))
    return turned.reshape(x.shape).astype(x.dtype)


ROTATIONS = {"pairs": _rotate_pairs, "product": _rotate_by_product, "swap": _rotate_by_swap}
