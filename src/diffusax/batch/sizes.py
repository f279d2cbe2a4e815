"""The sizes that each kind of batch may have: what is compiled, and what the memory holds."""

import dataclasses
import logging
import weakref
from pathlib import Path

import jax

from diffusax.batch.image import Image, Kind
from diffusax.batch.policies import batch_size
from diffusax.runtime.devices.memory import device_memory, is_out_of_memory

log = logging.getLogger(__name__)

_USABLE = 0.95
"""The part of a device's memory that batches may fill."""


@dataclasses.dataclass
class Sizes:
    """The sizes of running batches, which may be bounded further by their kinds (`kind_of`).

    Each is compiled when a batch first grows to it.
    """

    largest: int
    """The most lanes on each device."""
    smallest: int
    """The lanes on each device while little is to do."""
    rank: int
    """The least total rank of adapters, where images have some."""

    def smallest_of(self, kind: Kind) -> int:
        """Returns how many lanes a batch of a kind has while there is little to do."""
        return self.smallest * kind.devices

    def largest_of(self, kind: Kind) -> int:
        """Returns the most lanes of a batch of a kind."""
        return self.largest * kind.devices

    def least_of(self, image: Image) -> int:
        """Returns the size of the smallest batch that an image fits."""
        return image.kind.devices * max(self.smallest, batch_size(image.prepared.branches))

    def size_for(self, image: Image) -> int:
        """Returns the lanes of a new batch for an image."""
        return max(self.least_of(image), self.smallest_of(image.kind))

    def is_ready(self, image: Image) -> bool:
        """Returns whether the programs of a batch that an image fits can be called."""
        return True

    def has_room(self, kind: Kind, size: int) -> bool:
        """Returns whether the memory holds another batch of a kind."""
        return True

    def begins_again(self, kind: Kind, size: int, error: Exception) -> bool:
        """Returns whether the images of a batch of this size that failed with an error begin again.

        Otherwise their requests end with it.
        """
        return False

    def give_up(self, kind: Kind, size: int, error: Exception) -> bool:
        """Does without a size that does not compile; returns whether there is another."""
        return False


@dataclasses.dataclass
class _Kind:
    """What is known of a kind of batch."""

    ready: set[int] = dataclasses.field(default_factory=set)
    """The sizes whose programs are compiled, with those that lead from one to the next."""
    needs: dict[int, tuple[float, float]] = dataclasses.field(default_factory=dict)
    """The bytes of the arrays of each size, and of a step's temporaries."""
    refused: set[int] = dataclasses.field(default_factory=set)
    """The sizes that could not be compiled and that others do without."""
    limit: int | None = None
    """The most lanes for which the memory was enough."""


class KindSizes(Sizes):
    """Sizes that are compiled ahead, and that the memory of the devices bounds."""

    def __init__(self, largest: int, smallest: int, rank: int, memory: int | None = None):
        """Starts with no kind.

        Args:
            largest: the most lanes on each device.
            smallest: the fewest lanes of a batch on each device.
            rank: the least total rank of adapters.
            memory: the bytes of a device that the process may use; by default most of them.
        """
        super().__init__(largest, smallest, rank)
        whole = device_memory(jax.local_devices()[0])
        self._memory = memory or (whole and int(whole * _USABLE))
        self._kinds: weakref.WeakKeyDictionary[Kind, _Kind] = weakref.WeakKeyDictionary()

    def smallest_of(self, kind: Kind) -> int:
        """Returns the fewest lanes that are compiled."""
        ready = self._kind(kind).ready
        return min(ready, default=super().smallest_of(kind))

    def largest_of(self, kind: Kind) -> int:
        """Returns the most lanes that are compiled and that the memory holds."""
        known = self._kind(kind)
        size = self.smallest_of(kind)
        while (
            2 * size in known.ready and 2 * size <= self.cap(kind) and self.has_room(kind, 2 * size)
        ):
            size *= 2
        return size

    def cap(self, kind: Kind) -> int:
        """Returns the most lanes that a batch may have once they are compiled."""
        most = super().largest_of(kind)
        return min(most, self._kind(kind).limit or most)

    def is_ready(self, image: Image) -> bool:
        """Returns whether the programs of a batch that an image fits are compiled."""
        return bool(self.ready(image.kind)) and self.largest_of(image.kind) >= self.least_of(image)

    def ready(self, kind: Kind) -> set[int]:
        """Returns the sizes that are compiled."""
        return set(self._kind(kind).ready)

    def set_ready(
        self, kind: Kind, size: int, arrays: float = 0.0, temporaries: float = 0.0
    ) -> None:
        """Notes that a size is compiled, and the bytes that it takes according to the compiler."""
        known = self._kind(kind)
        known.needs[size] = arrays, temporaries
        known.ready = known.ready | {size}

    def give_up(self, kind: Kind, size: int, error: Exception) -> bool:
        """Does without a size that does not compile; returns whether there is another."""
        ready = self.ready(kind)
        if not ready:
            return False
        log.warning("batches of %d lanes cannot be compiled: %s", size, error)
        if size < min(ready):
            self._kind(kind).refused.add(size)
        else:
            self.bound(kind, size // 2)
        return True

    def is_refused(self, kind: Kind, size: int) -> bool:
        """Returns whether a size was found not to compile."""
        return size in self._kind(kind).refused

    def bound(self, kind: Kind, size: int) -> None:
        """Limits the lanes of the batches of a kind."""
        self._kind(kind).limit = size

    def has_room(self, kind: Kind, size: int) -> bool:
        """Returns whether the memory holds another batch, by the compiler's figures."""
        arrays, temporaries = self._kind(kind).needs.get(size, (0.0, 0.0))
        return self._memory is None or arrays + temporaries <= self._memory - memory_in_use()

    def forget(self, kind: Kind) -> None:
        """Forgets which sizes of a kind are compiled, and which cannot be."""
        known = self._kind(kind)
        known.ready, known.refused = set(), set()

    def begins_again(self, kind: Kind, size: int, error: Exception) -> bool:
        """Remembers half the size where the memory was used up, if an image still fits it."""
        if not is_out_of_memory(error) or size <= max(self.smallest_of(kind), 1):
            return False
        self.bound(kind, size // 2)
        log.warning("a batch of %d lanes has too little memory; %d from now on", size, size // 2)
        return True

    def _kind(self, kind: Kind) -> _Kind:
        return self._kinds.setdefault(kind, _Kind())


def memory_in_use() -> int:
    """Returns the bytes in use: of the first device, or on CPUs of this process."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_in_use", 0)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * 4096
