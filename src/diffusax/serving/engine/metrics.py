"""Counts what an engine does, in plain numbers."""

import bisect
import collections
import dataclasses
import math
import threading
import time
from collections.abc import Sequence
from typing import Literal

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
"""The buckets of histograms of seconds."""
_RECENT = 300.0
"""The seconds over which the longest gap is looked for."""


@dataclasses.dataclass
class Histogram:
    """How many values are at most as large as each of some bounds."""

    bounds: tuple[float, ...] = SECONDS
    counts: list[int] = dataclasses.field(default_factory=list)
    """The values of each bucket alone; one more than there are bounds."""
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """Counts a value."""
        self.counts[bisect.bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulative(self) -> list[tuple[float, int]]:
        """Returns (bound, the number of values up to it), the last with an infinite bound."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts):
            total += count
            found.append((bound, total))
        return found


@dataclasses.dataclass(frozen=True)
class Sample:
    """One figure."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    value: float | Histogram
    labels: tuple[tuple[str, str], ...] = ()


class Metrics:
    """The figures of an engine. Any thread may call the methods."""

    def __init__(self) -> None:
        self.to_image, self.to_first_step = Histogram(), Histogram()
        self.jobs: collections.Counter[str] = collections.Counter()
        """The jobs that have ended, by their state, and those that were refused."""
        self.rows = 0
        """The network's evaluations of single images."""
        self.compiled: collections.Counter[str] = collections.Counter()
        """The programs by where they came from."""
        self._seconds: collections.deque[tuple[int, float, int]] = collections.deque(
            maxlen=int(_RECENT) + 1
        )
        """For each second with rows: the second, the longest gap that ended in it, and its rows."""
        self._last: float | None = None
        self._lock = threading.Lock()

    def count_rows(self, rows: int) -> None:
        """Counts rows of an image that were computed just now."""
        now = time.perf_counter()
        with self._lock:
            self.rows += rows
            gap = 0.0 if self._last is None else now - self._last
            if self._seconds and self._seconds[-1][0] == int(now):
                _, longest, before = self._seconds.pop()
                gap, rows = max(gap, longest), rows + before
            self._seconds.append((int(now), gap, rows))
            self._last = now

    def count_job(self, state: str) -> None:
        """Counts a job that has ended in some state, or one that was "refused"."""
        with self._lock:
            self.jobs[state] += 1

    def pause(self) -> None:
        """Notes that nothing is left to compute: the time until the next row is no gap."""
        self._last = None

    def longest_gap(self, seconds: float = _RECENT) -> float:
        """Returns the longest time between rows in the last seconds, while there was work."""
        since = time.perf_counter() - seconds
        with self._lock:
            return max((gap for at, gap, _ in self._seconds if at + 1 > since), default=0.0)

    def rows_per_second(self, seconds: float = 10.0) -> float:
        """Returns the rows per second over the last seconds, at least one."""
        now = time.perf_counter()
        since = math.ceil(now - seconds)
        with self._lock:
            return sum(rows for at, _, rows in self._seconds if at >= since) / (now - since)

    def samples(self) -> Sequence[Sample]:
        """Returns all figures."""
        found = [
            Sample("to_image_seconds", "histogram", "Seconds until a job is done.", self.to_image),
            Sample(
                "to_first_step_seconds",
                "histogram",
                "Seconds until the first step of a job is computed.",
                self.to_first_step,
            ),
            Sample("steps_total", "counter", "Evaluations of single images.", self.rows),
            Sample("steps_per_second", "gauge", "The same now.", self.rows_per_second()),
            Sample(
                "longest_gap_seconds",
                "gauge",
                "The longest time between steps in the last five minutes, while there was work.",
                self.longest_gap(),
            ),
        ]
        for state in ("done", "failed", "cancelled", "refused"):
            label = (("state", state),)
            count = self.jobs[state]
            found.append(Sample("jobs_total", "counter", "Jobs that have ended.", count, label))
        for where in ("file", "process", "here"):
            label = (("from", where),)
            about = "Programs that were made ready, by where they came from."
            count = self.compiled[where]
            found.append(Sample("compilations_total", "counter", about, count, label))
        return found
