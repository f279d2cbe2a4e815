"""Which of the waiting images join a running batch now."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from diffusax.pipelines.batch_run import Kind

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
    """Lets as many images share the device as end soonest on average.

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
    """Lets one image run at a time."""
    return [] if present else list(waiting[:1])


def whole(
    present: Sequence[Candidate], waiting: Sequence[Candidate], device: Device
) -> list[Candidate]:
    """Lets images with equal settings run together, which wait until all of the last have ended."""
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
    """Returns the first images, `most` at most, whose lanes are free."""
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
