"""First Block Cache: blocks after the first are left out while the first changes its tokens alike.

Source: ParaAttention's README, "First Block Cache" (Cheng 2025), after TeaCache (Liu et al. 2024);
diffusers hooks/first_block_cache.py.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.models.caches.step_cache import Build, Call, Memory, Session, select, unless_kept


class BlockResiduals(NamedTuple):
    """What blocks have added to tokens when they were last computed, m t c each."""

    first: jax.Array
    """By the first block."""
    rest: jax.Array
    """By all blocks after it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FirstBlockCache:
    """The method with its number; see `StepCache`."""

    threshold: Any
    """The relative change of what the first block adds, above which all blocks are computed."""

    def run(
        self, build: Build, call: Call, memory: Memory | None, active: jax.Array
    ) -> tuple[jax.Array, Memory]:
        """Returns a network's prediction and what is kept; see `StepCache.run`."""
        return Session(self, memory, active).run(build(), call)

    def check(self, network: Any) -> None:
        """Raises nothing: every transformer that has the method has a first block."""


def through_blocks(
    network: Any,
    tokens: tuple[jax.Array, ...],
    blocks: Sequence[Callable[..., tuple[jax.Array, ...]]],
    last: Callable[..., jax.Array],
    seen: Callable[[], jax.Array] | None = None,
) -> jax.Array:
    """Returns the tokens after all blocks of a transformer, m t c.

    Args:
        network: the transformer's module.
        tokens: what the first block is given; first of all the tokens m t c whose change counts.
        blocks: calls of blocks: (*tokens) -> tokens.
        last: what comes after them, which may be further blocks: (*tokens) -> m t c.
        seen: returns how many of the first of these tokens are no padding, m; None for all.

    Raises:
        ValueError: there is a cache, and no block to decide by.
    """

    def rest(*tokens: jax.Array) -> jax.Array:
        for block in blocks[1:]:
            tokens = block(*tokens)
        return last(*tokens)

    session = network.step_cache
    if session is None:
        return rest(*(blocks[0](*tokens) if blocks else tokens))
    if not blocks:
        raise ValueError(
            "FirstBlockCacheConfig needs a block of its own for the image's tokens, which this "
            "transformer lacks; use TaylorSeerCacheConfig"
        )
    x, memory = tokens[0], session.memory
    tokens = blocks[0](*tokens)
    head = tokens[0]
    residual = head - x
    if memory is None:
        y = rest(*tokens)
        session.keep(BlockResiduals(residual, y - head))
        return y
    known: BlockResiduals = memory.values
    counts = None if seen is None else seen()
    changed = _change(residual, known.first, counts) > session.cache.threshold
    wanted = session.active & ((memory.calls == 0) | changed)

    def compute() -> tuple[jax.Array, jax.Array]:
        y = rest(*tokens)
        return y, y - head

    y, added = unless_kept(wanted, compute, (head + known.rest, known.rest))
    session.keep(BlockResiduals(select(wanted, residual, known.first), added))
    return y


def _change(new: jax.Array, old: jax.Array, seen: jax.Array | None) -> jax.Array:
    """Returns the mean absolute change relative to the mean absolute value, m, float32."""
    axes: Sequence[int] = range(1, new.ndim)
    new, old = new.astype(jnp.float32), old.astype(jnp.float32)
    if seen is not None:
        counts = (jnp.arange(new.shape[1]) < seen[:, None])[..., None]
        new, old = new * counts, old * counts
    return jnp.abs(new - old).sum(axes) / jnp.abs(old).sum(axes)
