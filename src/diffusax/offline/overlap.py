"""Does work in other threads, a few items ahead of the caller."""

import collections
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(pool: Executor, work: Callable[[T], R], items: Iterable[T], depth: int) -> Iterator[R]:
    """Yields the results of `work` in order, begun up to `depth` items before they are asked for.

    With a depth of 0 the work is done in the caller's thread when it asks for a result.
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
