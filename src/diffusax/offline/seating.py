"""Which seat each image of a shard has in a running batch, and which files are written together.

An image's bits depend on its place and its lanes and not on what is beside it or on the time. Both
follow here from the lines of the shard alone, so a run that was killed, or that is spread over
processes, writes equal files.
"""

import collections
import dataclasses
import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from diffusax.batch.run import Lanes, Seat
from diffusax.offline.requests import Request


@dataclasses.dataclass(frozen=True, eq=False)
class Seated:
    """A request with its seat. turn: its number in the order in which the images begin."""

    request: Request
    seat: Seat
    turn: int


def seat_requests(
    requests: Sequence[Request], size: int, lanes: Callable[[], Lanes]
) -> list[list[Seated]]:
    """Gives requests seats, and returns them in pieces that are written together.

    Images with the most rows begin first, so that short ones fill the gaps at the end. The images
    of a piece end about the same time.

    Args:
        requests: the requests of a shard.
        size: the most images of a piece.
        lanes: returns the free lanes of a batch.
    """
    kinds = collections.defaultdict(list)
    for request in requests:
        kinds[request.image.kind].append(request)
    pieces: list[list[Seated]] = []
    for alike in kinds.values():
        seated = _seat(alike, lanes())
        pieces += [seated[i : i + size] for i in range(0, len(seated), size)]
    return pieces


def _seat(requests: Iterable[Request], lanes: Lanes) -> list[Seated]:
    """Returns requests of one kind with seats, in the order in which their images end."""
    queues: dict[int, collections.deque[Request]] = collections.defaultdict(collections.deque)
    for request in sorted(requests, key=lambda request: -request.image.rows):
        queues[request.image.branches].append(request)
    begun = 0
    ended: list[Seated] = []
    # The row at which an image ends or gives lanes back, and its turn, so that no two are equal.
    events: list[tuple[int, int, bool, Any]] = []
    now = 0
    while any(queues.values()) or events:
        while (queue := _longest_that_fits(queues, lanes)) is not None:
            request = queue.popleft()
            image = request.image
            seat = lanes.find(image.branches)
            assert seat is not None
            lanes.take(seat)
            one = Seated(request, seat, begun)
            if image.branches > 1 and image.guided_until < image.rows:
                heapq.heappush(events, (now + image.guided_until, begun, False, one))
            heapq.heappush(events, (now + image.rows, begun, True, one))
            begun += 1
        now, _, ends, one = heapq.heappop(events)
        if ends:
            lanes.leave(one.seat.place)
            ended.append(one)
        else:
            lanes.keep_first(one.seat.place)
    return ended


def _longest_that_fits(
    queues: dict[int, collections.deque[Request]], lanes: Lanes
) -> collections.deque[Request] | None:
    """Returns the queue whose first image has the most rows of those that find a seat."""
    fitting = [queue for count, queue in queues.items() if queue and lanes.find(count) is not None]
    return max(fitting, key=lambda queue: queue[0].image.rows, default=None)
