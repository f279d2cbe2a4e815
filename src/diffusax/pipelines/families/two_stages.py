"""Two networks of which each predicts the rows of a batch on its side of a boundary.

Wan 2.2 A14B has one transformer for the noisier steps and one for the others. A network that no row
needs is left out. Rows of a running batch may be on both sides.

Shapes in the docstrings: m rows.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.models.caches import Evaluation
from diffusax.models.caches.step_cache import select

Predicted = Callable[..., Any]
"""A function (the network's name, further options of `Network.apply`) -> its prediction, m ..., and
with a cache of steps or hooks the pair of it and of what these keep."""


def predict_in_stages(
    predicted: Predicted, names: Sequence[str], noisier: jax.Array
) -> tuple[jax.Array, ...]:
    """Returns the predictions of both networks, zeros where no row needs one.

    Args:
        predicted: predicts by a network.
        names: the networks' names.
        noisier: the rows that are the first one's, m.
    """
    like = jax.eval_shape(lambda: predicted(names[0]))

    def where(needed: jax.Array, name: str) -> jax.Array:
        y: jax.Array = jax.lax.cond(
            needed, lambda: predicted(name), lambda: jnp.zeros(like.shape, like.dtype)
        )
        return y

    return where(noisier.any(), names[0]), where(~noisier.all(), names[1])


def predict_with_memories(
    predicted: Predicted, names: Sequence[str], noisier: jax.Array, evaluation: Evaluation
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the prediction, and what caches of steps keep by the networks' names.

    Each cache knows the steps of its own network alone. Other arguments as of `predict_in_stages`.

    evaluation: the caches and what they have kept, dictionaries by name, in which networks without
        a cache are missing.
    """
    before: Any = evaluation.memory

    def stage(name: str, rows: jax.Array) -> tuple[jax.Array, Any]:
        cache, known = evaluation.cache.get(name), None if before is None else before.get(name)

        def run() -> tuple[jax.Array, Any]:
            if cache is None:
                return predicted(name), None
            own = Evaluation(cache, known, evaluation.active & rows)
            found: tuple[jax.Array, Any] = predicted(name, step_cache=own)
            return found

        if before is None:
            return run()
        like = jax.eval_shape(run)[0]
        nothing = functools.partial(jnp.zeros, like.shape, like.dtype)
        found: tuple[jax.Array, Any] = jax.lax.cond(rows.any(), run, lambda: (nothing(), known))
        return found

    first, second = stage(names[0], noisier), stage(names[1], ~noisier)
    kept = zip(names, (first[1], second[1]))
    y = select(noisier, first[0], second[0])
    return y, {name: memory for name, memory in kept if memory is not None}


def predict_with_hooks(
    predicted: Predicted, names: Sequence[str], noisier: jax.Array, hooks: Any
) -> tuple[jax.Array, dict[str, Any]]:
    """Returns the prediction, and what hooks keep in the network whose step it is.

    All rows must be on one side. Arguments as of `predict_in_stages`.
    """
    stages = (functools.partial(predicted, name, hooks=hooks) for name in names)
    found: tuple[jax.Array, dict[str, Any]] = jax.lax.cond(noisier.any(), *stages)
    return found
