"""The engine: a thread that owns the device, and the queue of jobs that share its batches."""

import collections
import dataclasses
import functools
import logging
import secrets
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from diffusax.batch.compiling import Compiler
from diffusax.batch.policies import POLICIES
from diffusax.batch.request import Request
from diffusax.batch.scheduler import Scheduler
from diffusax.batch.sizes import KindSizes, memory_in_use
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.serving.catalogue.residents import Adapters
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.metrics import Metrics
from diffusax.serving.engine.parts import Part, prepare_part
from diffusax.serving.engine.previews import Previews
from diffusax.serving.engine.videos import image_bytes
from diffusax.serving.requests.errors import Busy, Closing, NotFound, Refused
from diffusax.serving.requests.generation import Generation

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The bounds of an engine."""

    lanes: int = 8
    """The most lanes of each batch on each device, a power of two.

    See docs/serving/running_batch.md.
    """
    smallest: int = 1
    """The fewest lanes of a batch on each device, a power of two."""
    adapter_rank: int = 64
    """The total rank of LoRAs that a batch has room for."""
    policy: Literal["running", "one", "whole"] = "running"
    """When images join a batch: so that they end soonest, one at a time, or in whole batches."""
    most_queued: int = 64
    """The jobs that may wait."""
    most_per_client: int | None = None
    """The jobs of one client that may wait or run; None for any number."""
    most_live_bytes: int = 2**30
    """The bytes of the images of jobs that wait or run, given and generated."""
    most_kept: int = 100
    """The jobs that have ended and can still be asked for."""
    most_kept_bytes: int = 256 * 2**20
    """The bytes of their images."""
    keep_seconds: float = 86_400.0
    """The seconds after its end for which a job and the addresses of its images are there."""
    deadline: float | None = None
    """The most seconds within which a job must be done; it may name fewer."""
    memory: int | None = None
    """The bytes of a device that the process may use; most of them by default."""
    executables: Path | None = None
    """The folder of compiled programs; by default one in the compilation cache."""
    name: str = ""
    """What the ids of jobs begin with, so that a router finds this engine among others."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineState:
    """What an engine does at the moment."""

    queued: int
    """The jobs that wait."""
    running: int
    """The jobs that have begun."""
    lanes_live: int
    """The lanes in use, of all batches."""
    lanes: int
    """The most lanes of one batch."""
    batches: int
    """The batches with images."""
    compiling: int
    """The sizes of batches that are being compiled, or wait for it."""
    steps_per_second: float
    """The evaluations of single images, over ten seconds."""
    longest_gap: float
    """The longest seconds between steps in the last five minutes."""
    kept: int
    """The jobs that have ended and can still be asked for."""
    memory_in_use: int
    """The bytes in use: of a device, or on CPUs of the process."""
    closing: bool
    """Whether it takes no more jobs."""
    alive: bool
    """Whether its thread runs."""


class Engine:
    """Generates the images of jobs, as many at once as is worth it.

    Images join a running batch at its next step, see `diffusax.RunningBatch`; those of another
    model or size form a batch of their own, and the batches take turns. Any thread may call the
    methods.

        with Engine(Catalogue("emoji")) as engine:
            job = engine.submit(Generation(prompt="a red apple"))
            job.wait()
            image = job.images[0]
    """

    def __init__(self, catalogue: Any, settings: EngineSettings | None = None):
        """Starts the threads.

        Args:
            catalogue: the models, see `diffusax.serving.catalogue.catalogue.Catalogue`.
            settings: the bounds.
        """
        self.catalogue, self.settings = catalogue, settings or EngineSettings()
        self.metrics = Metrics()
        self._jobs: collections.OrderedDict[str, Job] = collections.OrderedDict()
        self._over: collections.deque[Job] = collections.deque()
        self._kept_bytes = 0
        self._lock = threading.RLock()
        self._closing = False
        self._parts: dict[str, list[Part]] = {}
        """The parts of the jobs that have not ended."""
        self._texts: MutableMapping[Any, TextCache] = weakref.WeakKeyDictionary()
        """The cache of encoded texts of each model, by its store of adapters."""
        self._adapters, self._previews = Adapters(), Previews()
        self._scheduler = self._make_scheduler().start()

    def submit(
        self,
        generation: Generation,
        *,
        client: str = "",
        priority: int = 0,
        deadline: float | None = None,
        checked: bool = False,
    ) -> Job:
        """Adds a request to the queue and returns its job.

        Args:
            generation: what to generate.
            client: who asks for it; clients have equal shares of the device.
            priority: jobs with a higher one come first.
            deadline: the seconds within which it must be done; never more than the settings'.
            checked: whether the catalogue's `check` returned `generation`.

        Raises:
            Refused: it cannot be generated; says why.
            NotFound: it names something that the catalogue lacks.
            Busy: the queue, or the client's part of it, is full, or the images of all jobs take
                too much memory.
            Closing: the engine takes no more jobs.
        """
        try:
            generation = generation if checked else self.catalogue.check(generation)
            own = self.settings.deadline
            seconds = own if deadline is None else min(deadline, own or deadline)
            with self._lock:
                self._check_room(client, generation)
                return self._add(generation, client=client, priority=priority, deadline=seconds)
        except Refused:
            self.metrics.count_job("refused")
            raise

    def job(self, id: str) -> Job:
        """Returns a job by its id.

        Raises:
            NotFound: there is none, or it ended long ago.
        """
        with self._lock:
            self._forget_oldest()
            if id not in self._jobs:
                raise NotFound(f"there is no job {id[:50]!r}; jobs that ended are kept for a while")
            return self._jobs[id]

    def jobs(self, client: str | None = None) -> list[Job]:
        """Returns the jobs of a client, or of all, the newest first."""
        with self._lock:
            self._forget_oldest()
            return [j for j in reversed(self._jobs.values()) if client in (None, j.client)]

    def state(self) -> EngineState:
        """Returns what the engine does at the moment."""
        with self._lock:
            live = [job for job in self._jobs.values() if not job.is_over]
            kept = len(self._over)
        queued = sum(job.started is None for job in live)
        return EngineState(
            queued=queued,
            running=len(live) - queued,
            lanes=self.settings.lanes,
            steps_per_second=self.metrics.rows_per_second(),
            longest_gap=self.metrics.longest_gap(),
            kept=kept,
            closing=self._closing,
            **self._device_state(),
        )

    def warm(self, generations: Iterable[Generation]) -> None:
        """Generates these and compiles all sizes of their batches; later ones need not wait.

        Raises:
            Refused: one of them cannot be generated.
            Closing: the engine takes no more jobs.
        """
        for generation in generations:
            checked = self.catalogue.check(generation)
            with self._lock:
                self._check_open()
                job = self._add(checked, warms=True)
            job.wait()
            if job.error is not None:
                raise job.error
        while self._compiler.waiting and not self._closing:
            time.sleep(0.05)

    def forget(self, job: Job) -> None:
        """Cancels a job if it has not ended, and keeps nothing of it."""
        job.cancel()
        with self._lock:
            if self._jobs.pop(job.id, None) is not None:
                self._over.remove(job)
                self._kept_bytes -= count_bytes(job.generation, job.shown)

    def drain(self, timeout: float | None = None) -> bool:
        """Takes no more jobs, ends those that wait, and finishes those that have begun.

        Args:
            timeout: the most seconds to wait.

        Returns:
            Whether all have ended.
        """
        with self._lock:
            self._closing = True
        until = None if timeout is None else time.monotonic() + timeout
        for job in self.jobs():
            if job.started is None:
                closing = Closing("the server ends; send the request again later")
                job.end("failed", closing)
        for job in self.jobs():
            job.wait(None if until is None else max(0.0, until - time.monotonic()))
        return all(job.is_over for job in self.jobs())

    def close(self) -> None:
        """Cancels what is under way, and stops the threads."""
        with self._lock:
            self._closing = True
        for job in self.jobs():
            job.cancel()
        self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closing:
            raise Closing("the server is about to end; ask again later", retry_after=10.0)

    def _check_room(self, client: str, generation: Generation) -> None:
        self._check_open()
        live = [job for job in self._jobs.values() if not job.is_over]
        soonest = min((job.eta for job in live if job.eta), default=1.0)
        again: dict[str, Any] = {"retry_after": max(1.0, soonest)}
        if sum(job.started is None for job in live) >= self.settings.most_queued:
            raise Busy(
                f"the queue is full with {self.settings.most_queued} jobs; ask again later", **again
            )
        given = count_bytes(generation)
        held = sum([count_bytes(job.generation, job.shown) for job in live])
        if given and held and given + held > self.settings.most_live_bytes:
            raise Busy(
                f"the images of {len(live)} jobs under way take {held / 1e6:.0f} MB and this one "
                f"{given / 1e6:.0f}, more than {self.settings.most_live_bytes / 1e6:.0f} in all; "
                "ask again later, or send smaller ones",
                **again,
            )
        own, most = sum(job.client == client for job in live), self.settings.most_per_client
        if most is not None and own >= most:
            raise Busy(
                f"this client has {own} jobs under way, of at most {most}; ask again later",
                code="client_busy",
                **again,
            )

    def _make_scheduler(self) -> Scheduler:
        settings = self.settings
        sizes = KindSizes(settings.lanes, settings.smallest, settings.adapter_rank, settings.memory)
        compiled, folder = self.metrics.compiled, settings.executables
        return Scheduler(
            sizes,
            functools.partial(
                prepare_part, texts=self._texts, adapters=self._adapters, settings=settings
            ),
            policy=POLICIES[settings.policy],
            preparers=2,
            compiler=functools.partial(Compiler, sizes, compiled, folder=folder),
            on_estimate=self._estimate,
            on_idle=self.metrics.pause,
        )

    @property
    def _compiler(self) -> Compiler:
        compiler = self._scheduler.compiler
        assert compiler is not None
        return compiler

    def _device_state(self) -> dict[str, Any]:
        """Returns the fields of `EngineState` that concern the device."""
        live = self._scheduler.loop.live
        return {
            "lanes_live": sum(taken for _, _, taken in live),
            "batches": len(live),
            "compiling": self._compiler.waiting,
            "memory_in_use": memory_in_use(),
            "alive": self._scheduler.is_alive,
        }

    def _estimate(self, order: Sequence[Request], ends: Mapping[Request, float]) -> None:
        """Sets the positions of jobs and how long they will take."""
        jobs: dict[str, Job] = {}
        etas: dict[str, float] = {}
        for part in order:
            assert isinstance(part, Part)
            jobs[part.job.id] = part.job
            if part in ends:
                etas[part.job.id] = max(ends[part], etas.get(part.job.id, 0.0))
        queued = (job for job in jobs.values() if job.started is None)
        for position, job in enumerate(queued):
            job.set_position(position)
        for id, job in jobs.items():
            job.eta = etas.get(id)

    def _computed(self, part: Part, rows: int) -> None:
        self.metrics.count_rows(rows)
        job = part.job
        if job.first_step is None:
            job.first_step = time.time()
            self.metrics.to_first_step.add(job.first_step - job.created)

    def _add(self, generation: Generation, *, warms: bool = False, **given: Any) -> Job:
        if generation.seed is None:
            generation = dataclasses.replace(generation, seed=secrets.randbits(32))
        if generation.variation_strength and generation.variation_seed is None:
            generation = dataclasses.replace(generation, variation_seed=secrets.randbits(32))
        job = Job(generation, on_change=self._changed, engine=self.settings.name, **given)
        self._jobs[job.id] = job
        options: Any = {"catalogue": self.catalogue, "previews": self._previews}
        options |= {"on_rows": self._computed, "warms": warms}
        self._parts[job.id] = [Part(job, index, **options) for index in range(len(job.images))]
        for part in self._parts[job.id]:
            self._scheduler.add(part)
        return job

    def _changed(self, job: Job) -> None:
        """Counts a job that has ended, and wakes the engine's thread."""
        if job.is_over:
            with self._lock:
                parts = self._parts.pop(job.id, [])
                self.metrics.count_job(job.state)
                if job.state == "done" and job.ended:
                    self.metrics.to_image.add(job.ended - job.created)
                self._over.append(job)
                self._kept_bytes += count_bytes(job.generation, job.shown)
                self._forget_oldest()
            for part in parts:
                part.cancel()
        self._scheduler.wake()

    def _forget_oldest(self) -> None:
        most, most_bytes = self.settings.most_kept, self.settings.most_kept_bytes
        expired = time.time() - self.settings.keep_seconds
        while self._over and (
            len(self._over) > most
            or self._kept_bytes > most_bytes
            or (self._over[0].ended or 0.0) < expired
        ):
            job = self._over.popleft()
            self._kept_bytes -= count_bytes(job.generation, job.shown)
            self._jobs.pop(job.id, None)


def count_bytes(generation: Generation, made: Iterable[Any] = ()) -> int:
    """Returns the bytes of a request's images and videos, and of what was made of it."""
    controls = [control.image for control in generation.controls]
    images = generation.image, generation.last_image, generation.mask_image, *generation.more_images
    own = *images, generation.video, generation.mask_video
    found = [one for one in (*own, *controls, *made) if one is not None]
    return sum([getattr(one, "nbytes", None) or image_bytes(one) for one in found])
