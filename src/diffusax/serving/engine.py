"""The engine: a thread that owns the device, and the queue of jobs that share its batches."""

import collections
import dataclasses
import logging
import secrets
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from diffusax.pipelines.batch_loop import BatchLoop, Sizes
from diffusax.pipelines.text_cache import TextCache
from diffusax.serving.drawing import Drawing
from diffusax.serving.errors import Busy, Closing, NotFound
from diffusax.serving.jobs import Job
from diffusax.serving.parts import Part, prepare_part

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The bounds of an engine."""

    lanes: int = 8
    """The most lanes of each batch, a power of two."""
    adapter_rank: int = 64
    """The total rank of adapters that a batch has room for."""
    most_queued: int = 64
    """The jobs that may wait."""
    most_kept: int = 100
    """The jobs that have ended and can still be asked for."""
    most_kept_bytes: int = 256 * 2**20
    """The bytes of their images."""
    deadline: float | None = None
    """The seconds within which a job must be done that names no deadline of its own."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What an engine does at the moment."""

    queued: int
    running: int
    lanes_live: int
    lanes: int
    steps_per_second: float
    closing: bool


class Engine:
    """Draws what is submitted, as many drawings at once as the device has room for.

    Drawings join a running batch at its next step, see `diffusax.RunningBatch`. All methods may be
    called from any thread.
    """

    def __init__(self, catalogue: Any, settings: EngineSettings = EngineSettings()):
        """Starts the threads. catalogue: the models, see `diffusax.serving.catalogue.Catalogue`."""
        self.catalogue, self.settings = catalogue, settings
        self._texts = TextCache()
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._queue: collections.deque[Part] = collections.deque()
        self._ready: collections.deque[Part] = collections.deque()
        self._lock, self._awake = threading.RLock(), threading.Event()
        self._closing = self._ending = False
        self._finishers = ThreadPoolExecutor(2, "diffusax-finish")
        self._preparers = ThreadPoolExecutor(1, "diffusax-prepare")
        sizes = Sizes(settings.lanes, 1, settings.adapter_rank)
        self._loop = BatchLoop(sizes, self._finishers)
        self._thread = threading.Thread(target=self._serve, name="diffusax-engine", daemon=True)
        self._thread.start()

    def submit(
        self,
        drawing: Drawing,
        *,
        client: str = "",
        priority: int = 0,
        deadline: float | None = None,
    ) -> Job:
        """Adds a drawing to the queue, and returns its job.

        Args:
            drawing: the drawing.
            client: who asks for it.
            priority: drawings with a higher one come first.
            deadline: the seconds within which it must be done.

        Raises:
            Refused: the drawing cannot be made.
            Busy: the queue is full.
            Closing: the engine takes no more drawings.
        """
        checked = self.catalogue.check(drawing)
        if checked.seed is None:
            checked = dataclasses.replace(checked, seed=secrets.randbits(32))
        with self._lock:
            if self._closing:
                raise Closing("the server is about to end; ask again later", retry_after=10)
            if len(self._queue) >= self.settings.most_queued:
                raise Busy(
                    f"the queue is full with {self.settings.most_queued} jobs; ask again later",
                    retry_after=5,
                )
            job = Job(
                checked, client=client, priority=priority, deadline=deadline, on_change=self._wake
            )
            self._jobs[job.id] = job
            parts = [Part(job, i, self._wake) for i in range(checked.num_images)]
            self._queue.extend(parts)
        for part in parts:
            self._preparers.submit(self._prepare, part)
        return job

    def job(self, id: str) -> Job:
        """Returns a job by its id.

        Raises:
            NotFound: there is none, or it ended long ago.
        """
        with self._lock:
            if id not in self._jobs:
                raise NotFound(f"there is no job {id!r}; its images are kept for a while only")
            return self._jobs[id]

    def jobs(self, client: str | None = None) -> list[Job]:
        """Returns the jobs of a client, or of all, the newest first."""
        with self._lock:
            return [j for j in reversed(self._jobs.values()) if client in (None, j.client)]

    def state(self) -> EngineState:
        """Returns what the engine does at the moment."""
        with self._lock:
            live = [job for job in self._jobs.values() if not job.is_over]
        running = sum(job.state == "running" for job in live)
        return EngineState(
            queued=len(live) - running,
            running=running,
            lanes_live=0,
            lanes=self.settings.lanes,
            steps_per_second=0.0,
            closing=self._closing,
        )

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more drawings, waits for those under way, and returns whether all have ended."""
        self._closing = True
        return all([job.wait(timeout) in ("done", "failed", "cancelled") for job in self.jobs()])

    def close(self) -> None:
        """Cancels what is under way and stops the threads."""
        self._closing = self._ending = True
        for job in self.jobs():
            job.cancel()
        self._wake()
        self._thread.join()
        self._preparers.shutdown()
        self._finishers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wake(self, job: Job | None = None) -> None:
        self._awake.set()

    def _prepare(self, part: Part) -> None:
        if prepare_part(part, self.catalogue, self._texts):
            self._ready.append(part)
        else:
            with self._lock:
                self._queue.remove(part)
        self._wake()

    def _serve(self) -> None:
        while True:
            if not self._loop.has_work() and not self._ready:
                if self._ending:
                    return
                self._awake.wait(1.0)
            self._awake.clear()
            while self._ready:
                part = self._ready.popleft()
                with self._lock:
                    self._queue.remove(part)
                if not part.job.is_over:
                    part.job.set_state("running")
                    self._loop.add_prepared(part.request, part.pictures)
            self._loop.turn()
