"""The norm of all numbers of a tree together."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.runtime.devices.layouts import is_kernel


def global_norm(tree: Any) -> jax.Array:
    """Computes the norm from the sum of squares of each array."""
    return jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)))


def global_norm_by_rows(tree: Any, *, stored: bool) -> jax.Array:
    """Computes the norm from the sums of squares of all rows of all matrices together.

    A GPU takes two kernels to add up a matrix, and a network has hundreds. It is for arrays that
    are whole on each device: parts of them would have to be gathered.

    Args:
        tree: the arrays.
        stored: whether they are in memory, from where all vectors are taken together, too; vectors
            that are being computed are added up on the way.
    """
    leaves = [x.astype(jnp.float32) for x in jax.tree.leaves(tree)]
    vectors = [x.reshape(-1) for x in leaves if x.ndim < 2]
    rows = [_row_sums(jnp.square(x)) for x in leaves if x.ndim >= 2]
    if stored and vectors:
        vectors = [_together(vectors)]
    squares = sum((jnp.sum(jnp.square(x)) for x in vectors), jnp.float32(0))
    return jnp.sqrt(squares + jnp.sum(_together(rows)) if rows else squares)


def _together(vectors: Sequence[jax.Array]) -> jax.Array:
    """Concatenates vectors; without the barrier XLA would add up one by one what comes of them."""
    return jax.lax.optimization_barrier(jnp.concatenate(vectors))


def _row_sums(x: jax.Array) -> jax.Array:
    """Adds up the rows of an array as they lie in a GPU's memory, n."""
    return x.sum((0, 1, 2) if is_kernel(x.shape) else -1).reshape(-1)
