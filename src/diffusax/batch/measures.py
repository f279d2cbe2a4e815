"""What a running batch measures: the seconds of its rows, and how often images come."""

import collections
import threading
import time
from typing import NamedTuple

import jax

from diffusax.batch.image import Kind

_CHANGE = 0.3
"""The weight of a row's latest seconds in their mean."""
_FAR = 2.0
"""A measurement that is so many times the mean says more of something else, such as a program that
is compiled once more: it counts as this much, and the next one well below the mean replaces it."""
_STALE = 10.0
"""Seconds after which a size that has not run says less than another size of its kind that has."""
_KINDS = 32
"""The kinds of batch that are remembered."""
_GROWTH = {"cpu": 0.85}
"""The exponent with which the seconds of a row grow with the lanes, until they are measured."""
_OTHER_GROWTH = 0.4
"""The same on other devices: so little that larger batches are tried."""
_ARRIVALS = 32
"""The arrivals over which their rate is measured."""


class _Mean(NamedTuple):
    """The mean seconds of a row, None where they were measured once, and when that was last."""

    seconds: float | None
    at: float


class RowSeconds:
    """The seconds of a row by the kind of batch and its size.

    Each is a moving mean. The first measurement of a size is left out, which includes compiling it.
    Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._means: collections.OrderedDict[Kind, dict[int, _Mean]] = collections.OrderedDict()
        """The kinds that were measured last are at the end."""
        self._landed, self._late = 0.0, False

    def land(
        self, kind: Kind, size: int, rows: int, began: float, ended: float, *, late: bool
    ) -> None:
        """Notes how long rows took that the device computed after all that landed before.

        They began when they were dispatched, or when those before them ended. Where that was not
        seen, what they took is noted only if nothing else is, as no less than the truth.

        Args:
            kind: the kind of batch.
            size: its size.
            rows: how many rows.
            began: when they were dispatched.
            ended: when it was seen that they are computed, later than before; both in seconds.
            late: whether they were computed before somebody looked.
        """
        is_seen = began > self._landed or not self._late
        if is_seen or self.measured(kind, size) is None:
            start = max(began, self._landed) if is_seen else began
            self.note(kind, size, (ended - start) / rows)
        self._landed, self._late = ended, late

    def note(self, kind: Kind, size: int, seconds: float) -> None:
        """Notes how long a row has taken in a batch of a kind and size."""
        with self._lock:
            means = self._means.setdefault(kind, {})
            self._means.move_to_end(kind)
            if len(self._means) > _KINDS:
                self._means.popitem(last=False)
            mean = _changed(means[size].seconds, seconds) if size in means else None
            means[size] = _Mean(mean, time.monotonic())

    def measured(self, kind: Kind, size: int) -> float | None:
        """Returns the seconds of a row in a batch of a kind and size, if they were measured."""
        with self._lock:
            mean = self._means.get(kind, {}).get(size)
        return None if mean is None else mean.seconds

    def reach(self, kind: Kind, smallest: int) -> int:
        """Returns the next size that should be measured, after those that have been.

        smallest: the fewest lanes of such a batch.
        """
        with self._lock:
            means = self._means.get(kind, {})
            known = [size for size, mean in means.items() if mean.seconds is not None]
        return 2 * max(known) if known else smallest

    def estimate(self, kind: Kind, lanes: int, smallest: int) -> float:
        """Returns the seconds of a row, measured or estimated from other sizes.

        Args:
            kind: the kind of batch.
            lanes: the lanes in use.
            smallest: the fewest lanes of such a batch, whose size doubles from there.
        """
        size = smallest
        while size < lanes:
            size *= 2
        known = self._fresh(kind)
        if size in known:
            # More lanes never take less time, whatever else the machine did when they ran.
            return max(seconds for other, seconds in known.items() if other <= size)
        growth = _GROWTH.get(jax.default_backend(), _OTHER_GROWTH)
        if not known:
            return 0.05 * size**growth
        nearest = min(known, key=lambda other: abs(other.bit_length() - size.bit_length()))
        return known[nearest] * (size / nearest) ** growth

    def _fresh(self, kind: Kind) -> dict[int, float]:
        """Returns the means of a kind by size, without those that are much older than the latest.

        What a size took while the machine did something else would be believed for ever if it
        keeps the size from running again.
        """
        with self._lock:
            means = [(size, *mean) for size, mean in self._means.get(kind, {}).items()]
        latest = max((at for _, _, at in means), default=0.0)
        return {
            size: seconds
            for size, seconds, at in means
            if seconds is not None and at >= latest - _STALE
        }


class Arrivals:
    """Counts how often images come."""

    def __init__(self) -> None:
        self._times: collections.deque[float] = collections.deque(maxlen=_ARRIVALS)

    def note(self, at: float) -> None:
        """Notes that an image has come. at: when (time.time)."""
        self._times.append(at)

    def rate(self) -> float:
        """Returns the images that come each second, 0 before some have."""
        times = self._times
        if len(times) < 3:
            return 0.0
        return (len(times) - 1) / max(time.time() - times[0], 1e-3)


def _changed(mean: float | None, seconds: float) -> float:
    """Returns a mean with one more measurement."""
    if mean is None or _FAR * seconds < mean:
        return seconds
    return mean + _CHANGE * (min(seconds, _FAR * mean) - mean)
