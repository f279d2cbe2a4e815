"""Work that goes on beside the caller's, a few items ahead."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(pool: Executor, work: Callable[[T], R], items: Iterable[T], depth: int) -> Iterator[R]:
    """What `work` makes of the items, in order, begun up to `depth` items before it is asked for.

    With a depth of 0 each is made in the caller's own thread when it is asked for.
    """
    if depth == 0:
        yield from map(work, items)
        return
    futures: collections.deque[Future[R]] = collections.deque()
    try:
        for item in items:
            futures.append(pool.submit(work, item))
            if len(futures) > depth:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
