"""The thread that owns the device: it prepares the parts of jobs, admits them and runs batches."""

import collections
import functools
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax

from diffusax.batch.compiling import Compiler
from diffusax.batch.loop import BatchLoop, images_of
from diffusax.batch.policies import POLICIES, Arrivals, Candidate, batch_size, finish_times
from diffusax.batch.run import Kind, count_shares
from diffusax.batch.sizes import KindSizes, memory_in_use
from diffusax.runtime.programs.program import watched_compilations
from diffusax.serving.catalogue.adapters import Adapters
from diffusax.serving.drawings.errors import NotFound, TooLate
from diffusax.serving.drawings.strength import count_steps
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.metrics import Metrics
from diffusax.serving.engine.parts import Part, prepare_part, refusal
from diffusax.serving.engine.previews import Previews
from diffusax.serving.engine.queue import FairQueue

log = logging.getLogger(__name__)

_AHEAD = 16
"""The parts that are prepared and could join at once."""
_MOST_PREPARED = 64
"""The parts that are prepared, of which some wait for programs."""
_BETWEEN_ESTIMATES = 0.25
"""The least seconds between estimates of when jobs end."""


class Schedule:
    """Runs the parts of jobs in the batches of one device, or of the devices of a mesh."""

    def __init__(self, catalogue: Any, settings: Any, metrics: Metrics):
        """Starts the threads.

        Args:
            catalogue: the models.
            settings: an `EngineSettings`.
            metrics: what counts.
        """
        self._catalogue, self._settings, self._metrics = catalogue, settings, metrics
        self._sizes = KindSizes(
            settings.lanes, settings.smallest, settings.adapter_rank, settings.memory
        )
        self._policy = POLICIES[settings.policy]
        self._given = {
            "texts": weakref.WeakKeyDictionary(),
            "adapters": Adapters(),
            "previews": Previews(),
            "rank": settings.adapter_rank,
            "lanes": settings.lanes,
        }
        self._queue = FairQueue()
        self._parts: dict[str, list[Part]] = {}
        self._preparing: set[Part] = set()
        self._prepared: set[Part] = set()
        self._seated: set[Part] = set()
        self._arrivals = Arrivals()
        self._estimated = 0.0
        # Other threads put functions here; only the engine's thread changes the rest.
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._awake, self._ending = threading.Event(), False
        self._loaders = ThreadPoolExecutor(1, "diffusax-load")
        self._preparers = ThreadPoolExecutor(2, "diffusax-prepare")
        self._finishers = ThreadPoolExecutor(1, "diffusax-finish")
        self._previewers = ThreadPoolExecutor(1, "diffusax-preview")
        self._loop = BatchLoop(self._sizes, self._finishers, previewers=self._previewers)
        self._compiler = Compiler(
            self._sizes,
            metrics.compiled,
            is_busy=lambda: bool(self._seated),
            is_wanted=self._is_wanted,
            on_ready=self._awake.set,
            on_error=lambda *given: self._tell(self._not_compiled, *given),
            folder=settings.executables,
        )
        self._thread = threading.Thread(target=self._serve, name="diffusax-engine", daemon=True)
        self._thread.start()

    def add(self, job: Job, *, warm: bool = False) -> None:
        """Adds a job to the queue. Any thread may call this.

        warm: whether to compile all sizes of its batches.
        """
        self._tell(self._enter, job, warm)

    def wake(self) -> None:
        """Wakes the engine's thread: a job ended or a preview is wanted."""
        self._awake.set()

    @property
    def is_compiling(self) -> bool:
        """Whether sizes of batches are yet to be compiled."""
        return self._compiler.waiting > 0

    def state(self) -> dict[str, Any]:
        """Returns the fields of `EngineState` that concern the device."""
        live = self._loop.live
        return {
            "lanes_live": sum(taken for _, _, taken in live),
            "batches": len(live),
            "compiling": self._compiler.waiting,
            "memory_in_use": memory_in_use(),
            "alive": self._thread.is_alive(),
        }

    def close(self) -> None:
        """Stops the threads, once all jobs have ended."""
        self._ending = True
        self._awake.set()
        self._thread.join()
        for pool in (self._loaders, self._preparers, self._previewers, self._finishers):
            pool.shutdown(cancel_futures=True)
        self._compiler.close()
        self._preparing.clear()
        self._let_go()

    def _serve(self) -> None:
        while not self._ending or self._loop.has_work():
            if not self._loop.has_work():
                self._metrics.pause()
                self._awake.wait(0.5)
            self._awake.clear()
            try:
                self._turn()
            except Exception as error:
                # An error of ours: no job may wait for ever.
                log.exception("the engine failed")
                self._loop.fail(error)
                time.sleep(_BETWEEN_ESTIMATES)

    def _turn(self) -> None:
        while self._inbox:
            self._inbox.popleft()()
        self._end_late_jobs()
        self._let_go()
        self._prepare_next()
        present, waiting = self._candidates()
        for image in self._policy(present, waiting, self._loop.device(self._arrivals.rate())):
            self._seat(image.owner)
        self._estimate()
        self._loop.turn()

    def _tell(self, function: Callable[..., None], *given: Any) -> None:
        """Makes the engine's thread call a function."""
        self._inbox.append(functools.partial(function, *given))
        self._awake.set()

    def _enter(self, job: Job, warm: bool) -> None:
        options: Any = {"on_change": self._awake.set, "on_rows": self._computed, "warm": warm}
        self._parts[job.id] = [Part(job, index, **options) for index in range(len(job.images))]
        for part in self._parts[job.id]:
            self._queue.add(part, _work(job))
            self._arrivals.note(time.monotonic())

    def _end_late_jobs(self) -> None:
        now = time.time()
        for parts in list(self._parts.values()):
            job = parts[0].job
            if job.deadline is not None and now > job.deadline and not job.is_over:
                seconds = job.deadline - job.created
                job.end(
                    "failed", TooLate(f"the images were not ready within {seconds:.1f} seconds")
                )

    def _let_go(self) -> None:
        """Removes parts that are done, and those of jobs that have ended."""
        for id, parts in list(self._parts.items()):
            for part in [part for part in parts if part.job.is_over or part.done()]:
                if part in self._preparing:
                    continue
                part.cancel()
                if part in self._seated:
                    self._seated.discard(part)
                else:
                    self._queue.remove(part, served=False)
                    self._prepared.discard(part)
                if part.pipe is not None:
                    self._catalogue.release(part.pipe)
                parts.remove(part)
            if not parts:
                del self._parts[id]

    def _prepare_next(self) -> None:
        """Prepares the next parts of the queue, as many as could join soon.

        Parts that wait for programs do not count.
        """
        if len(self._queue) == len(self._prepared) + len(self._preparing):
            return
        ready = sum(map(self._is_compiled, self._prepared))
        room = min(_AHEAD - ready, _MOST_PREPARED - len(self._prepared)) - len(self._preparing)
        fresh = (
            part
            for part in self._queue.ordered()
            if part not in self._prepared and part not in self._preparing
        )
        for part in itertools.islice(fresh, max(room, 0)):
            self._preparing.add(part)
            loaded = self._is_loaded(part)
            if not loaded:
                part.job.set_state("loading")
            (self._preparers if loaded else self._loaders).submit(self._prepare, part)

    def _is_loaded(self, part: Part) -> bool:
        """Returns whether a part's model is in memory, so that preparing it is fast."""
        try:
            return bool(self._catalogue.entry(part.job.drawing.model).loaded)
        except NotFound:
            # It has left the catalogue since; preparing the part says so.
            return True

    def _prepare(self, part: Part) -> None:
        """Prepares a part in a thread of the pools."""
        try:
            if not part.job.is_over:
                with watched_compilations(lambda: part.job.set_state("compiling")):
                    prepare_part(part, self._catalogue, **self._given)
                self._tell(self._prepared.add, part)
        except Exception as error:
            part.job.end("failed", refusal(error))
        self._tell(self._preparing.discard, part)

    def _candidates(self) -> tuple[list[Candidate], list[Candidate]]:
        """Returns the running parts, and in their order the waiting ones that could join."""
        present = [_candidate(part) for part in self._seated]
        ready = []
        for part in self._queue.ordered() if self._prepared else ():
            if part in self._prepared and not part.done():
                self._ask_for_programs(part)
                compiled = self._is_compiled(part)
                part.job.set_state("queued" if compiled else "compiling")
                if compiled:
                    if not self._has_room(part):
                        # Nobody overtakes it, so that the others end and leave it their memory.
                        break
                    ready.append(_candidate(part))
        return present, ready

    def _is_compiled(self, part: Part) -> bool:
        """Returns whether the programs of a batch that a part fits are compiled."""
        sizes = self._sizes
        return bool(sizes.ready(part.kind)) and sizes.largest_of(part.kind) >= self._least(part)

    def _has_room(self, part: Part) -> bool:
        """Returns whether the memory holds a batch for a part beside those that run."""
        if not self._seated or any(other.kind is part.kind for other in self._seated):
            return True
        size = max(self._least(part), self._sizes.smallest_of(part.kind))
        return self._sizes.has_room(part.kind, size)

    def _least(self, part: Part) -> int:
        """Returns the size of the smallest batch that a part fits."""
        devices = count_shares(part.request.c.mesh)
        return devices * max(self._settings.smallest, batch_size(part.prepared.branches))

    def _ask_for_programs(self, part: Part) -> None:
        """Asks for the programs that a part needs, and for sizes that suit the load."""
        kind, given = part.kind, (part.request.c, part.prepared)
        ready = self._sizes.ready(kind)
        self._compiler.use(kind)
        if not ready:
            self._sizes.spread(kind, count_shares(part.request.c.mesh))
            least = self._least(part)
            self._compiler.ask(kind, least, *given, urgency=0)
            while part.warm and (least := 2 * least) <= self._sizes.cap(kind):
                self._compiler.ask(kind, least, *given, keep=True)
            return
        every = (*self._seated, *self._prepared)
        wanted = sum(other.prepared.branches for other in every if other.kind is kind)
        larger, smaller = 2 * max(ready), min(ready) // 2
        if wanted > max(ready) and larger <= self._sizes.cap(kind):
            self._compiler.ask(kind, larger, *given)
        # Where a step of few lanes takes less time, which is so on CPUs.
        if wanted <= smaller and jax.default_backend() == "cpu" and smaller >= self._least(part):
            self._compiler.ask(kind, smaller, *given, urgency=2)

    def _is_wanted(self, kind: Kind) -> bool:
        """Returns whether parts of a kind wait or run. Any thread may call this."""
        every = (*self._seated.copy(), *self._prepared.copy())
        return any(part.kind is kind and not part.job.is_over for part in every)

    def _seat(self, part: Part) -> None:
        self._queue.remove(part, served=True)
        self._prepared.discard(part)
        self._seated.add(part)
        for image in images_of(part.request, [part.prepared]):
            self._loop.add(image)
        part.job.set_state("running")

    def _estimate(self) -> None:
        """Sets the positions of jobs and how long they will take."""
        now = time.monotonic()
        if now - self._estimated < _BETWEEN_ESTIMATES:
            return
        self._estimated = now
        positions = {part.job.id: part.job for part in self._queue.ordered()}
        queued = [job for job in positions.values() if job.started is None]
        for position, job in enumerate(queued):
            job.set_position(position)
        present, waiting = self._candidates()
        together = max(len(present), 1)
        ends: dict[str, float] = {}
        for image, end in finish_times(
            present, waiting[:_AHEAD], together, self._loop.device(self._arrivals.rate())
        ):
            ends[image.owner.job.id] = max(end, ends.get(image.owner.job.id, 0.0))
        for id, parts in self._parts.items():
            parts[0].job.eta = ends.get(id)

    def _computed(self, part: Part, rows: int) -> None:
        self._metrics.count_rows(rows)
        job = part.job
        if job.first_step is None:
            job.first_step = time.time()
            self._metrics.to_first_step.add(job.first_step - job.created)

    def _not_compiled(self, kind: Kind, size: int, error: Exception) -> None:
        """Gives up a size that does not compile; ends its jobs if there is no other size."""
        if ready := self._sizes.ready(kind):
            log.warning("batches of %d lanes cannot be compiled: %s", size, error)
            if size < min(ready):
                self._sizes.refuse(kind, size)
            else:
                self._sizes.bound(kind, size // 2)
            return
        for part in self._prepared:
            if part.kind is kind:
                part.job.end("failed", refusal(error))


def _candidate(part: Part) -> Candidate:
    settings = part.kind, part.job.drawing.sampler, part.prepared.rows, part.prepared.branches
    return Candidate(part, part.kind, part.prepared.branches, part.rows_left, settings)


def _work(job: Job) -> float:
    """Estimates what an image of a job costs: rows times lanes times megapixels."""
    drawing = job.drawing
    guided = drawing.guidance_scale is None or drawing.guidance_scale > 1
    lanes = 1 + guided + (drawing.image_guidance_scale is not None)
    pixels = (drawing.width or 512) * (drawing.height or 512)
    return count_steps(drawing) * lanes * pixels / 2**20
