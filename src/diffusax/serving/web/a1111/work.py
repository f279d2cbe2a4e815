"""The calls of A1111's clients that are under way: their progress, and their end on request."""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from diffusax.serving.jobs import Job


class Work:
    """One call: the jobs that it has submitted, and those that it will."""

    def __init__(self, client: str, passes: int):
        """Begins a call. passes: how often it submits jobs, one set after the other."""
        self.client, self.begun = client, time.time()
        self.passes: list[list[Job]] = []
        self._count, self.interrupted, self.skipped = passes, False, False

    def add(self, jobs: Iterable[Job]) -> None:
        """Adds the jobs of the next pass."""
        self.passes.append(list(jobs))

    @property
    def jobs(self) -> list[Job]:
        """All jobs so far."""
        return [job for jobs in self.passes for job in jobs]

    @property
    def progress(self) -> float:
        """The fraction that is computed of all passes."""
        done = [
            sum(1.0 if job.is_over else job.progress for job in jobs) / len(jobs)
            for jobs in self.passes
            if jobs
        ]
        return sum(done) / self._count

    def interrupt(self) -> None:
        """Ends all jobs; no further pass begins."""
        self.interrupted = True
        for job in self.jobs:
            job.cancel()

    def skip(self) -> None:
        """Ends the first job that has not ended."""
        self.skipped = True
        job = next((job for job in self.jobs if not job.is_over), None)
        if job is not None:
            job.cancel()


class Works:
    """The calls under way, oldest first."""

    def __init__(self) -> None:
        """Starts without calls."""
        self._found: list[Work] = []
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def during(self, work: Work) -> Iterator[None]:
        """Lists a call inside the context."""
        with self._lock:
            self._found.append(work)
        try:
            yield
        finally:
            with self._lock:
                self._found.remove(work)

    def of(self, client: str) -> list[Work]:
        """Returns the calls of a client."""
        with self._lock:
            return [work for work in self._found if work.client == client]


def describe_progress(works: list[Work]) -> dict[str, Any]:
    """Returns the progress of a client's calls in A1111's form, without the current image."""
    live = [job for work in works for job in work.jobs if not job.is_over]
    first = live[0] if live else None
    etas = [job.eta for job in live if job.eta is not None]
    total = sum(work.progress for work in works) / max(len(works), 1)
    began = time.strftime("%Y%m%d%H%M%S", time.localtime(works[0].begun)) if works else "0"
    steps = first.drawing.num_inference_steps or 0 if first else 0
    return {
        # 0 says that nothing is under way.
        "progress": max(total, 0.001) if works else 0.0,
        "eta_relative": max(etas) if etas else 0.0,
        "state": {
            "skipped": any(work.skipped for work in works),
            "interrupted": any(work.interrupted for work in works),
            "stopping_generation": False,
            "job": first.id if first else "",
            "job_count": len(works),
            "job_timestamp": began,
            "job_no": 0,
            "sampling_step": min(first.steps_done, steps) if first else 0,
            "sampling_steps": steps,
        },
        "textinfo": first.state if first else None,
    }
