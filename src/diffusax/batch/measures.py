"""What a running batch measures: the seconds of its rows, and how often images come."""

import collections
import math
import statistics
import threading
import time
from collections.abc import Iterable

import jax

from diffusax.batch.image import Kind

_LATEST = 5
"""The measurements of a size of which the middle one counts. So many in a row that depart from them
to the same side say that the machine has changed; fewer say more of something else, such as a
program that is compiled once more, and are left out."""
_SLACK = 0.25
"""The part of a measurement by which others depart that say something new."""
_SPREADS = 4.0
"""The same in median deviations of the latest measurements from the middle one."""
_LASTING, _WORTH = 1.0, 8.0
"""The least seconds for which a change lasts, also as a multiple of the seconds of a row of each
size, so that measuring again takes a small part of the time."""
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


class _Measured:
    """What was measured of a size of a kind of batch."""

    def __init__(self, at: float) -> None:
        self.at = at
        """When it was measured last, but for those that depart."""
        self._latest: collections.deque[float] = collections.deque(maxlen=_LATEST)
        self._departing: list[tuple[float, float]] = []
        """The measurements in a row that depart from the latest to one side, after their times."""

    @property
    def seconds(self) -> float | None:
        """The seconds of a row; None where they were measured once."""
        return statistics.median_low(self._latest) if self._latest else None

    def add(self, seconds: float, at: float) -> None:
        """Adds a measurement."""
        middle = self.seconds
        if middle is None:
            self.restart([seconds], at)
            return
        spread = statistics.median(abs(one - middle) for one in self._latest)
        if abs(seconds - middle) <= max(_SLACK * middle, _SPREADS * spread):
            self.restart([*self._latest, seconds], at)
        elif seconds < middle and len(self._latest) < _LATEST:
            # Of a few measurements the quickest was held up least.
            self.restart([seconds], at)
        else:
            if self._departing and (self._departing[0][1] < middle) != (seconds < middle):
                self._departing.clear()
            self._departing.append((at, seconds))

    def changed_since(self, least: float) -> float | None:
        """Returns since when the measurements depart, at least for so many seconds; else None."""
        if len(self._departing) < _LATEST:
            return None
        (began, _), (ended, _) = self._departing[0], self._departing[-1]
        if ended - began < least:
            return None
        self.restart([seconds for _, seconds in self._departing], ended)
        return began

    def restart(self, latest: Iterable[float], at: float) -> None:
        """Takes other measurements for those until now."""
        self._latest, self.at = collections.deque(latest, maxlen=_LATEST), at
        self._departing.clear()


class RowSeconds:
    """The seconds of a row by the kind of batch and its size.

    Each is the middle one of the latest. The first measurement of a size is left out, which
    includes compiling it. Once those of one size say that the machine has changed, what was
    measured before of the others, of all kinds, is no longer believed, and is `due` again. Any
    thread may call the methods.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: collections.OrderedDict[Kind, dict[int, _Measured]] = collections.OrderedDict()
        """The kinds that were measured last are at the end."""
        self._landed, self._late = 0.0, False
        self._changed = -math.inf
        """When the machine changed last (time.monotonic)."""

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
        now = time.monotonic()
        with self._lock:
            sizes = self._kinds.setdefault(kind, {})
            self._kinds.move_to_end(kind)
            if len(self._kinds) > _KINDS:
                self._kinds.popitem(last=False)
            if size not in sizes:
                sizes[size] = _Measured(now)
                return
            if sizes[size].at < self._changed:
                sizes[size].restart([], now)
            sizes[size].add(seconds, now)
            rows = sum(one.seconds or 0.0 for one in sizes.values())
            since = sizes[size].changed_since(max(_LASTING, _WORTH * rows))
            self._changed = self._changed if since is None else since

    def due(self, kind: Kind) -> list[int]:
        """Returns the sizes of a kind that are to be measured again."""
        with self._lock:
            sizes = self._kinds.get(kind, {})
            return sorted(size for size, one in sizes.items() if one.at < self._changed)

    def forget(self, kind: Kind, size: int) -> None:
        """Forgets a size that cannot be measured again."""
        with self._lock:
            self._kinds.get(kind, {}).pop(size, None)

    def measured(self, kind: Kind, size: int) -> float | None:
        """Returns the seconds of a row in a batch of a kind and size, if they were measured."""
        with self._lock:
            found = self._kinds.get(kind, {}).get(size)
            return None if found is None else found.seconds

    def reach(self, kind: Kind, smallest: int) -> int:
        """Returns the next size that should be measured, after those that have been.

        smallest: the fewest lanes of such a batch.
        """
        with self._lock:
            sizes = self._kinds.get(kind, {})
            known = [
                size
                for size, one in sizes.items()
                if one.seconds is not None and one.at >= self._changed
            ]
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
        """Returns the seconds of a kind by size, without those that are much older than the latest.

        What a size took while the machine did something else would be believed for ever if it keeps
        the size from running again. Nor does it return those from before the machine changed.
        """
        with self._lock:
            sizes = self._kinds.get(kind, {})
            since = max((one.at for one in sizes.values()), default=0.0) - _STALE
            found = {
                size: one.seconds
                for size, one in sizes.items()
                if one.at >= max(since, self._changed)
            }
        return {size: seconds for size, seconds in found.items() if seconds is not None}


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
