"""Policies: they choose the waiting images that join a running batch now."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from diffusax.batch.run import Kind

_LOOK = 12
"""The waiting images that are looked at."""
_MORE = (0, 1, 2, 3, 4, 6, 8, 12)
"""How many more images may be together, of the numbers that are tried."""

_GAIN = 0.9
"""Images share the device where that makes the sum of their waits this part, or less, of what it
is otherwise. Where sharing hardly helps on average it lets the last ones wait longer."""

Seconds = Callable[[Kind, int], float]
"""A function (kind, lanes) -> the seconds of a row of such a batch."""


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """An image that runs, or could."""

    owner: Any
    """What the caller knows it by."""
    kind: Kind
    """The kind of batch that it joins."""
    lanes: int
    """The lanes that it takes."""
    rows: int
    """The rows that it has left."""
    settings: Any = None
    """What images that make a whole batch have in common."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What a policy knows of the device."""

    seconds: Seconds
    lanes: Callable[[Kind], int]
    """The most lanes of a batch by its kind."""
    arrivals: float = 0.0
    """The images that come each second."""


Policy = Callable[[Sequence[Candidate], Sequence[Candidate], Device], list[Candidate]]
"""A function (images that run, images that wait in order, device) -> those that join now."""


def running(
    present: Sequence[Candidate], waiting: Sequence[Candidate], device: Device
) -> list[Candidate]:
    """Admits as many images as make the mean time until an image ends shortest.

    Sharing is worth it as far as a step of more lanes costs less than its share. For each number of
    images that may be together, the times at which all known images would end are computed from the
    measured seconds of rows, and the number with the least sum of them is taken. Those who are yet
    to come count as well: they wait while the present work lasts.
    """
    waiting = waiting[:_LOOK]
    if not waiting:
        return []
    numbers = {max(len(present) + more, 1) for more in _MORE if more <= len(waiting)}
    costs = {n: _cost(present, waiting, n, device) for n in sorted(numbers)}
    fewest, best = min(costs), min(costs, key=lambda n: costs[n])
    if costs[best] > _GAIN * costs[fewest]:
        best = fewest
    return _fitting(present, waiting, best - len(present), device)


def one(
    present: Sequence[Candidate], waiting: Sequence[Candidate], device: Device
) -> list[Candidate]:
    """Runs one image at a time."""
    return [] if present else list(waiting[:1])


def whole(
    present: Sequence[Candidate], waiting: Sequence[Candidate], device: Device
) -> list[Candidate]:
    """Runs images with equal settings together, once all images of the last group have ended."""
    if present or not waiting:
        return []
    equals = [image for image in waiting if image.settings == waiting[0].settings]
    return _fitting((), equals, len(equals), device)


POLICIES: dict[str, Policy] = {"running": running, "one": one, "whole": whole}
"""The policies by name."""


def finish_times(
    present: Sequence[Candidate], waiting: Sequence[Candidate], together: int, device: Device
) -> list[tuple[Candidate, float]]:
    """Returns when each image ends, in seconds from now, if at most `together` share the device."""
    active, left = {image: image.rows for image in present}, list(waiting)
    now, found = 0.0, []
    while active or left:
        more = _fitting([*active], left, together - len(active), device)
        if not active and not more:
            # It fits nowhere at the moment; whatever comes, it is the next.
            more = left[:1]
        active |= {image: image.rows for image in more}
        left = [image for image in left if image not in more]
        rows = max(min(active.values()), 0)
        now += rows * _cycle([*active], device)
        found += [(image, now) for image, left_rows in active.items() if left_rows <= rows]
        active = {image: n - rows for image, n in active.items() if n > rows}
    return found


def batch_size(lanes: int) -> int:
    """Returns the size of the batch that holds so many lanes."""
    return 1 << (lanes - 1).bit_length() if lanes > 1 else 1


def _cost(
    present: Sequence[Candidate], waiting: Sequence[Candidate], together: int, device: Device
) -> float:
    ends = [end for _, end in finish_times(present, waiting, together, device)]
    return sum(ends) + device.arrivals * max(ends) ** 2 / 2


def _cycle(active: Sequence[Candidate], device: Device) -> float:
    """Returns the seconds of a row of all batches, which take turns."""
    lanes: dict[Kind, int] = {}
    for image in active:
        lanes[image.kind] = lanes.get(image.kind, 0) + image.lanes
    return sum(device.seconds(kind, batch_size(count)) for kind, count in lanes.items())


def _fitting(
    present: Sequence[Candidate], waiting: Sequence[Candidate], most: int, device: Device
) -> list[Candidate]:
    """Returns up to `most` of the first images for which there are free lanes."""
    lanes: dict[Kind, int] = {}
    for image in present:
        lanes[image.kind] = lanes.get(image.kind, 0) + image.lanes
    found: list[Candidate] = []
    for image in waiting:
        if len(found) >= most:
            break
        taken = lanes.get(image.kind, 0) + image.lanes
        if taken <= device.lanes(image.kind):
            found.append(image)
        # Who does not fit is not overtaken by those that take fewer lanes.
        lanes[image.kind] = taken
    return found


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
        """Notes that an image has come. at: when (time.monotonic)."""
        self._times.append(at)

    def rate(self) -> float:
        """Returns the images that come each second, 0 before some have."""
        times = self._times
        if len(times) < 3:
            return 0.0
        return (len(times) - 1) / max(time.monotonic() - times[0], 1e-3)


def _changed(mean: float | None, seconds: float) -> float:
    """Returns a mean with one more measurement."""
    if mean is None or _FAR * seconds < mean:
        return seconds
    return mean + _CHANGE * (min(seconds, _FAR * mean) - mean)
