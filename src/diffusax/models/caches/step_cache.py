"""What caches of steps have in common: the memory of lanes, and computation that may be left out.

A lane is an entry of the network's batch: one branch of guidance of one image. Each lane has its
own memory and decides by itself whether to compute. XLA cannot leave out a part of a batch, so that
a batch computes where any lane wants to; the others then go on with what they have kept, as they
would alone.

Shapes in the docstrings: m lanes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from diffusax.models.streaming import reordered

Build = Callable[[], Any]
"""A function () -> the Flax module of a network, with its parameters and all that is attached."""
Call = Callable[[Any], jax.Array]
"""A function (module) -> its prediction, m ...."""


class Memory(NamedTuple):
    """What lanes have kept of the evaluations of a run so far."""

    calls: jax.Array
    """The evaluations of each lane so far, m, int32. Nothing is kept where it is zero."""
    values: Any
    """What the cache keeps, a tree of arrays m ...."""


class StepCache(Protocol):
    """A method with its numbers, which are data: a tree whose leaves are scalars or m."""

    def run(
        self, build: Build, call: Call, memory: Memory | None, active: jax.Array
    ) -> tuple[jax.Array, Memory]:
        """Returns a network's prediction, m ..., and what is kept for the next evaluation.

        Args:
            build: makes the network's module.
            call: calls a module.
            memory: what is kept of earlier evaluations; None computes all, for its shapes.
            active: the lanes whose prediction is of use, m. Others keep what they have, and never
                make the batch compute.
        """
        ...

    def check(self, network: Any) -> None:
        """Raises ValueError where a network cannot run with it."""
        ...


class Evaluation(NamedTuple):
    """What one evaluation of a network with a cache is given; see `StepCache.run`."""

    cache: Any
    memory: Memory | None
    active: jax.Array


def select(mask: jax.Array, new: Any, old: Any) -> Any:
    """Returns the lanes of a tree of arrays m ... that a mask, m, takes from the first of two."""

    def one(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *[1] * (x.ndim - 1)), x, y)

    return jax.tree.map(one, new, old)


def unless_kept(wanted: jax.Array, compute: Callable[[], Any], kept: Any) -> Any:
    """Returns what is computed for the lanes that want it, and what is kept for the others.

    Nothing is computed where no lane wants it.

    Args:
        wanted: the lanes that want it, m.
        compute: computes it for all lanes, a tree of arrays m ....
        kept: a tree like it.
    """

    def some() -> Any:
        return select(wanted, reordered(compute), kept)

    return jax.lax.cond(wanted.any(), some, lambda: kept)


def zero_memory(shapes: Any) -> Any:
    """Returns the memory before a run. shapes: the memory, or its shapes."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def counted(memory: Memory | None, active: jax.Array) -> jax.Array:
    """Returns the evaluations of each lane after this one, m, int32."""
    before = jnp.zeros(active.shape, jnp.int32) if memory is None else memory.calls
    return before + active


class Session:
    """A cache during one evaluation of a network, as the network's module asks it.

    The module's attribute `step_cache` is one in an evaluation with a cache, and None in others.
    """

    def __init__(self, cache: Any, memory: Memory | None, active: jax.Array):
        self.cache, self.memory, self.active = cache, memory, active
        self.after: Memory | None = None
        """What is kept for the next evaluation, once the network was called."""

    def run(self, module: Any, call: Call) -> tuple[jax.Array, Memory]:
        """Returns the prediction of a module, and what is kept."""
        # An attribute of this trace's module alone, which is no part of Flax's state.
        object.__setattr__(module, "step_cache", self)
        y = call(module)
        assert self.after is not None
        return y, self.after

    def keep(self, values: Any) -> None:
        """Notes what is kept for the next evaluation."""
        self.after = Memory(counted(self.memory, self.active), values)
