"""The loop of a running batch: who joins when, and how many rows are dispatched at once."""

import collections
import dataclasses
import functools
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from diffusax.pipelines.batch_run import BatchRun
from diffusax.pipelines.entries import Picture, prepare_pictures, runs_alone
from diffusax.pipelines.generation import Request
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.step_callbacks import watch_call
from diffusax.runtime.mesh import in_mesh

_SECONDS = 0.05
"""About the time for which rows are dispatched at once while others could join."""
_LONGEST = 0.25
"""The same while the batch is full."""
_IN_FLIGHT = 2
"""The dispatches that the device may be behind."""


@dataclasses.dataclass(eq=False)
class _Waiting:
    """An image that has been prepared and waits for a seat, or has one."""

    request: Request
    image: int
    picture: Picture


@dataclasses.dataclass(eq=False)
class _Dispatch:
    """Rows that were given to the device."""

    done: Any
    """An array that is ready when they are computed."""
    shape: Any
    """What the time of a row depends on."""
    rows: int
    began: float
    progress: list[tuple[_Waiting, int]]
    """The next row of each image after these."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of running batches."""

    largest: int
    """The most lanes."""
    smallest: int
    """The lanes while little is to do."""
    rank: int
    """The least total rank of adapters, where images have some."""


class BatchLoop:
    """Runs requests in one running batch for each kind of image, which take turns.

    One thread at a time calls its methods.
    """

    def __init__(self, sizes: Sizes, finishers: Executor):
        """Starts without requests. finishers: the threads that decode what has ended."""
        self._sizes, self._finishers = sizes, finishers
        self._new: collections.deque[Request] = collections.deque()
        self._waiting: dict[Any, collections.deque[_Waiting]] = {}
        self._runs: dict[Any, list[BatchRun]] = {}
        self._seconds: dict[Any, float] = {}
        self._flying: collections.deque[_Dispatch] = collections.deque()
        self._landed = 0.0

    def add(self, request: Request) -> None:
        """Adds a request. Any thread may call this."""
        self._new.append(request)

    def has_work(self) -> bool:
        """Returns whether a request has not ended."""
        running = any(len(run) for runs in self._runs.values() for run in runs)
        return bool(self._new) or any(self._waiting.values()) or running

    def requests(self) -> Iterator[Request]:
        """Yields the requests that have not ended, those of several images several times."""
        yield from self._new
        for queue in self._waiting.values():
            yield from (waiting.request for waiting in queue)
        for run in self._all_runs():
            yield from (member.owner.request for member in run.members.values())

    def fail(self, error: BaseException) -> None:
        """Ends all requests with an error, and forgets the batches."""
        for request in list(self.requests()):
            request.generation.settle(error=error)
        for group in (self._new, self._waiting, self._runs, self._flying):
            group.clear()

    def turn(self) -> None:
        """Lets each batch run some rows."""
        self._prepare()
        self._drop_cancelled()
        for key in list({**self._waiting, **self._runs}):
            self._admit(key)
            for run in [run for run in self._runs.get(key, ()) if len(run)]:
                self._show(run)
                self._advance(run)
                # The device is busy: what comes next is prepared meanwhile.
                self._prepare()
            self._forget_empty(key)
        while len(self._flying) > (_IN_FLIGHT - 1 if self.has_work() else 0):
            self._land()

    def _all_runs(self) -> Iterator[BatchRun]:
        for runs in self._runs.values():
            yield from runs

    def _prepare(self) -> None:
        """Prepares submitted calls, as many as could join soon."""
        while self._new and sum(map(len, self._waiting.values())) < self._sizes.largest:
            request = self._new.popleft()
            if request.generation.cancelled():
                continue
            try:
                run = prepare(request)
                request.finish = run.finish
                if runs_alone(request.call, run):
                    self._finishers.submit(_run_alone, request, run)
                    continue
                pictures = prepare_pictures(request.c, request.pipe.task, run)
            except Exception as error:
                request.generation.settle(error=error)
                continue
            request.results = [None] * len(pictures)
            for image, picture in enumerate(pictures):
                request.generation.set_rows(image, 0, picture.rows)
                queue = self._waiting.setdefault(picture.key, collections.deque())
                queue.append(_Waiting(request, image, picture))

    def _drop_cancelled(self) -> None:
        for queue in self._waiting.values():
            for waiting in [w for w in queue if w.request.generation.done()]:
                queue.remove(waiting)
        for run in self._all_runs():
            for place, member in run.members.items():
                if member.owner.request.generation.done():
                    run.leave(place)

    def _admit(self, key: Any) -> None:
        """Gives seats to those that wait, in the order in which they came, and fits the sizes."""
        queue = self._waiting.get(key, ())
        while queue:
            picture = queue[0].picture
            run = self._run_for(key, queue[0])
            seat = None if run is None else run.lanes.find(picture.branches)
            if run is None:
                return
            if seat is not None:
                run.join(picture, seat, queue.popleft())
            elif run.size < self._sizes.largest:
                run.resize(2 * run.size)
            else:
                return
        for run in self._runs.get(key, ()):
            self._shrink(run)

    def _run_for(self, key: Any, waiting: _Waiting) -> BatchRun | None:
        """Returns the batch that an image joins; None while its adapters have no room."""
        picture, runs = waiting.picture, self._runs.setdefault(key, [])
        fitting = [run for run in runs if run.has_shapes_for(picture)]
        if not fitting:
            c, sizes = waiting.request.c, self._sizes
            fitting = [BatchRun(c, picture, sizes.smallest, rank=sizes.rank)]
            runs += fitting
        return next((run for run in fitting if run.has_ranks_for(picture)), None)

    def _shrink(self, run: BatchRun) -> None:
        """Halves the batch while its images fit the half."""
        while len(run) and run.size > self._sizes.smallest and run.lanes.taken <= run.size // 2:
            try:
                run.resize(run.size // 2)
            except ValueError:
                # On a mesh some device may still be full.
                return

    def _forget_empty(self, key: Any) -> None:
        """Frees the arrays of batches in which no image is left."""
        left = [run for run in self._runs.get(key, ()) if len(run)]
        if left:
            self._runs[key] = left
        else:
            self._runs.pop(key, None)
            if not self._waiting.get(key):
                self._waiting.pop(key, None)

    def _advance(self, run: BatchRun) -> None:
        """Dispatches rows, and hands over the images that end with them."""
        shape = run.key, run.size
        full = run.size == self._sizes.largest and run.lanes.find(1) is None
        seconds = self._seconds.get(shape, _SECONDS)
        most = int((_LONGEST if full else _SECONDS) / seconds)
        rows = max(1, min(run.rows_until_change(), most))
        # Some backends compute small programs before the call returns.
        began = time.perf_counter()
        ended = run.advance(rows)
        progress = [(member.owner, member.at) for member in run.members.values()]
        self._flying.append(_Dispatch(run.done, shape, rows, began, progress))
        for place in ended:
            waiting, latents = run.members[place].owner, run.latents(place)
            run.leave(place)
            arguments = waiting.image, waiting.picture, latents
            self._finishers.submit(waiting.request.deliver, *arguments)

    def _land(self) -> None:
        """Waits for the oldest dispatch, and notes how long its rows took."""
        dispatch = self._flying.popleft()
        jax.block_until_ready(dispatch.done)
        now = time.perf_counter()
        began, self._landed = max(self._landed, dispatch.began), now
        self._seconds[dispatch.shape] = (now - began) / dispatch.rows
        for waiting, row in dispatch.progress:
            waiting.request.generation.set_rows(waiting.image, row, waiting.picture.rows)

    def _show(self, run: BatchRun) -> None:
        """Decodes the images of calls that want a preview."""
        members = run.members.items()
        wanted = {m.owner.request for _, m in members if m.owner.request.generation.wants_preview()}
        for request in wanted:
            now = [
                (m.picture, _unit(run.latents(place), m.picture.levels[m.at]))
                for place, m in members
                if m.owner.request is request
            ]
            make = functools.partial(request.preview, now)
            self._finishers.submit(request.generation.answer_previews, make)


def prepare(request: Request) -> PreparedRun:
    """Returns the run of a request.

    Raises:
        ValueError: an argument of its call is not valid.
    """
    with in_mesh(request.c.local_mesh):
        run: PreparedRun = request.pipe.task(request.c, request.call)
    return run


def _run_alone(request: Request, run: PreparedRun) -> None:
    """Runs a call that cannot join others."""
    try:
        bar = {"disable": True}
        latents = watch_call(request.pipe, request.c, request.call, run, bar=bar)
        request.complete(request.decode(latents, run.decoding, run.decoder_condition))
    except Exception as error:
        request.generation.settle(error=error)


def _unit(latents: jax.Array, level: np.ndarray) -> jax.Array:
    """Returns latents of a noise level with about the variance of clean ones."""
    return latents / np.float32(np.hypot(*level))
