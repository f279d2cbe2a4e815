"""Which images join a running batch now, and in which order requests are prepared."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from diffusax.batch.image import Image, Kind
from diffusax.batch.request import Request

_LOOK = 12
"""The waiting images that are looked at."""
_MORE = (0, 1, 2, 3, 4, 6, 8, 12)
"""How many more images may be together, of the numbers that are tried."""

_GAIN = 0.9
"""Images share the device where that makes the sum of their waits this part, or less, of what it
is otherwise. Where sharing hardly helps on average it lets the last ones wait longer."""

Seconds = Callable[[Kind, int], float]
"""A function (kind, lanes) -> the seconds of a row of such a batch."""


@dataclasses.dataclass(frozen=True)
class Device:
    """What a policy knows of the device."""

    seconds: Seconds
    lanes: Callable[[Kind], int]
    """The most lanes of a batch by its kind."""
    arrivals: float = 0.0
    """The images that come each second."""
    reach: Callable[[Kind], float] = lambda kind: math.inf
    """The most lanes of a batch that are worth a try, by what is measured of smaller ones."""

    def tried(self, kind: Kind) -> float:
        """Returns the most lanes of a batch now: each size is measured before the next is tried."""
        return min(self.lanes(kind), self.reach(kind))


Policy = Callable[[Sequence[Image], Sequence[Image], Device], list[Image]]
"""A function (images that run, images that wait in order, device) -> those that join now."""


def running(present: Sequence[Image], waiting: Sequence[Image], device: Device) -> list[Image]:
    """Admits as many images as make the mean time until an image ends shortest.

    Sharing is worth it as far as a step of more lanes costs less than its share. For each number of
    images that may be together, the times at which all known images would end are computed from the
    measured seconds of rows, and the number with the least sum of them is taken. Those who are yet
    to come count as well: they wait while the present work lasts.
    """
    waiting = waiting[:_LOOK]
    if not waiting:
        return []
    numbers = sorted({max(len(present) + more, 1) for more in _MORE if more <= len(waiting)})
    best = fewest = numbers[0]
    if len(numbers) > 1:
        costs = {n: _cost(present, waiting, n, device) for n in numbers}
        best = min(numbers, key=costs.__getitem__)
        best = fewest if costs[best] > _GAIN * costs[fewest] else best
    return _fitting(present, waiting, best - len(present), device.tried)


def one(present: Sequence[Image], waiting: Sequence[Image], device: Device) -> list[Image]:
    """Runs one image at a time."""
    return [] if present else list(waiting[:1])


def whole(present: Sequence[Image], waiting: Sequence[Image], device: Device) -> list[Image]:
    """Runs images with equal settings together, once all images of the last group have ended."""
    if present or not waiting:
        return []
    equals = [image for image in waiting if image.settings == waiting[0].settings]
    return _fitting((), equals, len(equals), device.lanes)


POLICIES: dict[str, Policy] = {"running": running, "one": one, "whole": whole}
"""The policies by name."""


def finish_times(
    present: Sequence[Image], waiting: Sequence[Image], together: int, device: Device
) -> list[tuple[Image, float]]:
    """Returns when each image ends, in seconds from now, if at most `together` share the device."""
    active, left = {image: image.rows for image in present}, list(waiting)
    now, found = 0.0, []
    while active or left:
        more = _fitting([*active], left, together - len(active), device.lanes)
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
    present: Sequence[Image], waiting: Sequence[Image], together: int, device: Device
) -> float:
    ends = [end for _, end in finish_times(present, waiting, together, device)]
    return sum(ends) + device.arrivals * max(ends) ** 2 / 2


def _cycle(active: Sequence[Image], device: Device) -> float:
    """Returns the seconds of a row of all batches, which take turns."""
    lanes: dict[Kind, int] = {}
    for image in active:
        lanes[image.kind] = lanes.get(image.kind, 0) + image.lanes
    return sum(device.seconds(kind, batch_size(count)) for kind, count in lanes.items())


def _fitting(
    present: Sequence[Image],
    waiting: Sequence[Image],
    most: int,
    most_lanes: Callable[[Kind], float],
) -> list[Image]:
    """Returns up to `most` of the first images for which there are free lanes.

    The first of a kind has them in any case.
    """
    lanes: dict[Kind, int] = {}
    for image in present:
        lanes[image.kind] = lanes.get(image.kind, 0) + image.lanes
    found: list[Image] = []
    for image in waiting:
        if len(found) >= most:
            break
        taken = lanes.get(image.kind, 0) + image.lanes
        if taken <= most_lanes(image.kind) or image.kind not in lanes:
            found.append(image)
        # Who does not fit is not overtaken by those that take fewer lanes.
        lanes[image.kind] = taken
    return found


class FairQueue:
    """The requests that have not ended, in the order in which they may begin.

    Higher priorities come first. Among equal ones each key has a share of the device, however many
    requests it sends: a request's tag is the work of the key's requests up to it, counted from
    where the queue stands when the first of them comes, and the smallest tag begins first
    (self-clocked fair queueing, Golestani 1994). The requests of one key begin in the order in
    which they came. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, float, int, Request]] = []
        """The requests after their priority, tag and number, in order."""
        self._keys: dict[Request, tuple[int, float, int]] = {}
        self._numbers = itertools.count()
        self._clock: dict[int, float] = {}
        """The largest tag that has begun, by priority."""
        self._last: dict[tuple[int, str], float] = {}
        """The tag of each key's last request."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """Yields the requests, the next one first."""
        return (entry[-1] for entry in self._entries)

    def __contains__(self, request: Request) -> bool:
        return request in self._keys

    def ordered(self, requests: Iterable[Request]) -> list[Request]:
        """Returns some of the requests in their order."""
        return sorted(requests, key=self._keys.__getitem__)

    def add(self, request: Request) -> None:
        """Adds a request."""
        flow = request.priority, request.key
        tag = max(self._clock.get(request.priority, 0.0), self._last.get(flow, 0.0)) + request.work
        self._last[flow] = tag
        key = self._keys[request] = -request.priority, tag, next(self._numbers)
        bisect.insort(self._entries, (*key, request))

    def begin(self, request: Request) -> None:
        """Notes that a request begins, which moves the clock on."""
        negative, tag, _ = self._keys[request]
        self._clock[-negative] = max(self._clock.get(-negative, 0.0), tag)

    def remove(self, request: Request) -> None:
        """Removes a request."""
        del self._entries[bisect.bisect(self._entries, self._keys.pop(request))]
        if not self._entries:
            # Nobody waits: all start from the same again.
            self._last.clear()
