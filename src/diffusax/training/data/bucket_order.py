"""The order of examples where batches are of images of one size."""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.training.data.buckets import Buckets


class BucketOrder:
    """An endless order of batches, each of one size, made of an endless order of rows.

    The rows are gone through in their order. Each waits with the others of its size until there are
    as many as make a batch, which then is the next one. Rows that still wait at the end of an epoch
    are carried to the next, ahead of its rows, so that none is left out. With one size the order of
    the examples is that of the rows.

    Everything follows from the order of the rows and the size of a batch: there is no state, and
    any batch is found without those before it.
    """

    _batches: dict[int, np.ndarray]
    _waiting: dict[int, list[np.ndarray]]
    _lock: Any

    def __init__(self, buckets: Buckets, order: Sequence[int], batch_size: int):
        """Takes an order of rows.

        Args:
            buckets: the rows' sizes.
            order: the row at each place of an endless order; each epoch of as many places as there
                are rows has each of them once.
            batch_size: the number of examples in a batch of all processes together.

        Raises:
            ValueError: no row's image can be read.
        """
        self.buckets, self.order, self.batch_size = buckets, order, batch_size
        self.rows, self.counts = len(buckets.of_row), buckets.counts
        if not self.counts.sum():
            raise ValueError(f"none of the {self.rows} images can be read")
        self._start()

    def batch(self, number: int) -> tuple[int, np.ndarray]:
        """Returns a batch: the index of its size, and the places of its rows in the order."""
        with self._lock:
            epoch = self._epoch_of(number)
            if epoch not in self._batches:
                batches, waiting = self._epoch(epoch)
                # Threads that read ahead are in the next epoch already, others still in this one.
                self._batches = {**dict([*self._batches.items()][-1:]), epoch: batches}
                self._waiting = {epoch + 1: waiting}
            places = self._batches[epoch][number - self._before(epoch)]
        return int(self.buckets.of_row[self.order[int(places[0])]]), places

    def _before(self, epoch: int) -> int:
        """Returns the number of batches before an epoch."""
        return int((epoch * self.counts // self.batch_size).sum())

    def _epoch_of(self, number: int) -> int:
        epoch = number * self.batch_size // int(self.counts.sum())
        while self._before(epoch + 1) <= number:
            epoch += 1
        return epoch

    def _epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns an epoch's batches, m batch_size places, and what waits at its end by size."""
        waiting = self._waiting.get(epoch) or self._waiting_before(epoch)
        ready, left = [], []
        for before, new in zip(waiting, self._places(epoch), strict=True):
            places = np.concatenate([before, new])
            whole = len(places) - len(places) % self.batch_size
            ready.append(places[:whole].reshape(-1, self.batch_size))
            left.append(places[whole:])
        batches = np.concatenate(ready)
        return batches[np.argsort(batches[:, -1])], left

    def _waiting_before(self, epoch: int) -> list[np.ndarray]:
        """Returns what waits when an epoch begins, from the epochs before it."""
        missing = epoch * self.counts % self.batch_size
        found: list[list[np.ndarray]] = [[] for _ in self.counts]
        while missing.any():
            epoch -= 1
            for bucket, places in enumerate(self._places(epoch)):
                last = places[len(places) - min(missing[bucket], len(places)) :]
                found[bucket].insert(0, last)
                missing[bucket] -= len(last)
        return [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in found]

    def _places(self, epoch: int) -> list[np.ndarray]:
        """Returns the places of an epoch by size."""
        start = epoch * self.rows
        rows = np.fromiter((self.order[start + i] for i in range(self.rows)), np.int64, self.rows)
        buckets = self.buckets.of_row[rows]
        return [start + np.flatnonzero(buckets == bucket) for bucket in range(len(self.counts))]

    def _start(self) -> None:
        self._batches, self._waiting, self._lock = {}, {}, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_batches", "_waiting", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()
