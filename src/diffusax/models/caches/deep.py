"""DeepCache: the deep levels of a UNet are left out in most steps (Ma et al. 2023).

The high-level features change little from step to step. A step that leaves them out computes the
layers on the way down to a skip connection, and those on the way up from there, which read the map
that came from the deeper levels when they were last computed.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from diffusax.models.caches.step_cache import Build, Call, Memory, Session, unless_kept


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeepCache:
    """The method with its numbers; see `StepCache`."""

    interval: Any
    """All levels are computed at every so many evaluations, first of all at the first."""
    branch: int = dataclasses.field(metadata={"static": True})
    """The skip connection, counted from 0 for that of the largest maps, below which all is left
    out."""

    def run(
        self, build: Build, call: Call, memory: Memory | None, active: jax.Array
    ) -> tuple[jax.Array, Memory]:
        """Returns a network's prediction and what is kept; see `StepCache.run`."""
        return Session(self, memory, active).run(build(), call)

    def check(self, network: Any) -> None:
        """Raises ValueError where a UNet has no such skip connection."""
        last = network.module_class.last_skip(network.config)
        if self.branch > last:
            raise ValueError(
                f"cache_branch_id must be at most {last}, the last skip connection of this UNet "
                f"(got {self.branch})"
            )


def deep_map(session: Session, compute: Callable[[], jax.Array]) -> jax.Array:
    """Returns the map that the deep levels give to the shallow ones, m h w c.

    compute: computes it.
    """
    memory = session.memory
    if memory is None:
        x = compute()
    else:
        wanted = session.active & (memory.calls % session.cache.interval == 0)
        x = unless_kept(wanted, compute, memory.values)
    session.keep(x)
    return x
