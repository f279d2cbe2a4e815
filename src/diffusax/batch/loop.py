"""The loop of a running batch: who joins when, and how many rows are dispatched at once."""

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import jax

from diffusax.batch.image import PreparedImage
from diffusax.batch.policies import Candidate, Device, RowSeconds
from diffusax.batch.request import Request
from diffusax.batch.run import BatchRun, Kind, count_shares, kind_of
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.plan import PreparedRun

log = logging.getLogger(__name__)

_SECONDS = 0.05
"""About the time for which rows are dispatched at once while others could join."""
_LONGEST = 0.25
"""The same while the batch is full."""
_IN_FLIGHT = 2
"""The dispatches that the device may be behind."""


@dataclasses.dataclass(eq=False)
class Waiting:
    """An image that has been prepared and waits for a seat, or has one."""

    request: Request
    image: int
    """Which of the request's images it is."""
    prepared: PreparedImage


def images_of(request: Request, images: Sequence[PreparedImage]) -> list[Waiting]:
    """Returns the images of a request, which are ready to join."""
    request.results = [None] * len(images)
    for i, prepared in enumerate(images):
        request.generation.set_rows(i, 0, prepared.rows)
    return [Waiting(request, i, prepared) for i, prepared in enumerate(images)]


@dataclasses.dataclass(eq=False)
class _Dispatch:
    """Rows that were given to the device."""

    done: Any
    """An array that is ready when they are computed."""
    run: BatchRun
    size: int
    """The lanes of the batch then."""
    rows: int
    began: float
    progress: list[tuple[Waiting, int]]
    """The next row of each image after these."""


@dataclasses.dataclass
class Sizes:
    """The sizes of running batches, which may be bounded further by their kinds (`kind_of`)."""

    largest: int
    """The most lanes."""
    smallest: int
    """The lanes while little is to do."""
    rank: int
    """The least total rank of adapters, where images have some."""

    def smallest_of(self, kind: Kind) -> int:
        """Returns how many lanes a batch of a kind has while there is little to do."""
        return self.smallest

    def largest_of(self, kind: Kind) -> int:
        """Returns the most lanes of a batch of a kind."""
        return self.largest

    def begins_again(self, kind: Kind, size: int, error: Exception) -> bool:
        """Returns whether the images of a batch of this size that failed with an error begin again.

        Otherwise their requests end with it.
        """
        return False


class BatchLoop:
    """Runs images in one running batch for each kind of them, which take turns.

    An image that is added joins as soon as it has a seat. One thread at a time calls the methods.
    """

    def __init__(
        self,
        sizes: Sizes,
        finishers: Executor,
        previewers: Executor | None = None,
    ):
        """Starts without images.

        Args:
            sizes: the sizes of batches.
            finishers: the threads that decode what has ended.
            previewers: the threads that make previews; by default the finishers.
        """
        self._sizes, self._finishers = sizes, finishers
        self._previewers = previewers or finishers
        self._waiting: dict[Any, collections.deque[Waiting]] = {}
        self._runs: dict[Any, list[BatchRun]] = {}
        self.seconds = RowSeconds()
        """The seconds of rows, as far as they were measured."""
        self._flying: collections.deque[_Dispatch] = collections.deque()
        self._landed = 0.0

    def add(self, image: Waiting) -> None:
        """Adds an image, which joins the batch of its kind at the next turn that has a seat."""
        self._waiting.setdefault(image.prepared.key, collections.deque()).append(image)

    def has_lanes_for(self, run: PreparedRun, c: Components) -> bool:
        """Returns whether the largest batch has as many lanes as an image of a run has branches."""
        return 1 + len(run.weights) <= self._sizes.largest // count_shares(c.mesh)

    def has_work(self) -> bool:
        """Returns whether an image has not ended."""
        return any(self._waiting.values()) or any(map(len, self._all_runs()))

    def requests(self) -> Iterator[Request]:
        """Yields the requests that have not ended, those of several images several times."""
        for queue in self._waiting.values():
            yield from (waiting.request for waiting in queue)
        for run in self._all_runs():
            yield from (member.owner.request for member in run.members.values())

    def fail(self, error: BaseException) -> None:
        """Ends all requests with an error, and forgets the batches."""
        for request in list(self.requests()):
            request.generation.settle(error=error)
        for group in (self._waiting, self._runs, self._flying):
            group.clear()

    def device(self, arrivals: float) -> Device:
        """Returns what a policy knows of the device now. arrivals: images that come each second."""
        smallest = self._sizes.smallest_of

        def seconds(kind: Kind, lanes: int) -> float:
            return self.seconds.estimate(kind, lanes, smallest(kind))

        largest = functools.cache(self._sizes.largest_of)
        return Device(functools.cache(seconds), largest, arrivals)

    def candidates(self) -> list[Candidate]:
        """Returns the images that have been added and not ended."""
        found = [
            Candidate(m.owner, run.kind, len(run.lanes.seats[place].lanes), m.prepared.rows - m.at)
            for run in self._all_runs()
            for place, m in run.members.items()
        ]
        return [*found, *(self.candidate(w) for queue in self._waiting.values() for w in queue)]

    def candidate(self, image: Waiting) -> Candidate:
        """Returns what a policy knows of an image that waits."""
        kind = kind_of(image.request.c, image.prepared, self._sizes.rank)
        return Candidate(image, kind, image.prepared.branches, image.prepared.rows)

    @property
    def live(self) -> list[tuple[Kind, int, int]]:
        """The kind, the size and the lanes in use of each batch with images."""
        return [(run.kind, run.size, run.lanes.taken) for run in self._all_runs() if len(run)]

    def turn(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Runs some rows of each batch. meanwhile: called while the device is busy."""
        self._drop_cancelled()
        for key in list({**self._waiting, **self._runs}):
            self._admit(key)
            for run in [run for run in self._runs.get(key, ()) if len(run)]:
                self._show(run)
                try:
                    self._advance(run)
                except Exception as error:
                    self._give_up(run, error)
                meanwhile()
            self._forget_empty(key)
        while len(self._flying) > (_IN_FLIGHT - 1 if self.has_work() else 0):
            self._land()

    def _all_runs(self) -> Iterator[BatchRun]:
        for runs in self._runs.values():
            yield from runs

    def _drop_cancelled(self) -> None:
        for queue in self._waiting.values():
            for waiting in [w for w in queue if w.request.generation.done()]:
                queue.remove(waiting)
        for run in self._all_runs():
            for place, member in run.members.items():
                if member.owner.request.generation.done():
                    run.leave(place)

    def _admit(self, key: Any) -> None:
        """Seats waiting images in the order in which they came, and adjusts the batches' sizes."""
        queue = self._waiting.get(key, ())
        while queue:
            waiting = queue[0]
            try:
                if not self._seat(waiting):
                    return
            except Exception as error:
                waiting.request.generation.settle(error=error)
            queue.remove(waiting)
        for run in self._runs.get(key, ()):
            self._shrink(run)

    def _seat(self, waiting: Waiting) -> bool:
        """Seats an image if there is a free seat, in a larger batch if that is allowed.

        Returns whether it has one. What it raises concerns this image alone.
        """
        run = self._run_for(waiting)
        if run is None:
            return False
        while (seat := run.lanes.find(waiting.prepared.branches)) is None:
            if 2 * run.size > self._sizes.largest_of(run.kind):
                return False
            try:
                run.resize(2 * run.size)
            except Exception as error:
                if self._sizes.begins_again(run.kind, 2 * run.size, error):
                    return False
                raise
        run.make_room(waiting.prepared)
        try:
            run.join(waiting.prepared, seat, waiting)
        except Exception as error:
            # The batch's arrays were donated.
            if self._give_up(run, error):
                return False
            raise
        return True

    def _run_for(self, waiting: Waiting) -> BatchRun | None:
        """Returns the batch that an image joins; None while its adapters have no room."""
        prepared, runs = waiting.prepared, self._runs.setdefault(waiting.prepared.key, [])
        fitting = [run for run in runs if run.has_shapes_for(prepared)]
        if not fitting:
            fitting = [self._new_run(waiting.request.c, prepared)]
            runs += fitting
        return next((run for run in fitting if run.has_ranks_for(prepared)), None)

    def _new_run(self, c: Components, prepared: PreparedImage) -> BatchRun:
        kind = kind_of(c, prepared, self._sizes.rank)
        size = self._sizes.smallest_of(kind)
        while size // count_shares(c.mesh) < prepared.branches:
            size *= 2
        return BatchRun(c, prepared, size, kind)

    def _shrink(self, run: BatchRun) -> None:
        """Halves the batch while its images fit the half."""
        smallest = self._sizes.smallest_of(run.kind)
        while len(run) and run.size > smallest and run.lanes.taken <= run.size // 2:
            try:
                run.resize(run.size // 2)
            except (ValueError, RuntimeError, MemoryError):
                # On a mesh some device may still be full, or there is no memory for a second batch.
                return

    def _give_up(self, run: BatchRun, error: Exception) -> bool:
        """Forgets a batch whose step failed; its images begin again or their requests end.

        Returns whether they begin again.
        """
        if run not in self._runs.get(run.key, ()):
            return False
        again = self._sizes.begins_again(run.kind, run.size, error)
        if not again:
            log.error("a running batch failed", exc_info=error)
        self._runs[run.key].remove(run)
        queue = self._waiting.setdefault(run.key, collections.deque())
        for member in reversed(run.members.values()):
            waiting = member.owner
            if again:
                waiting.request.generation.set_rows(waiting.image, 0, waiting.prepared.rows)
                queue.appendleft(waiting)
            else:
                waiting.request.generation.settle(error=error)
        for dispatch in self._flying:
            if dispatch.run is run:
                # These rows are no longer part of the images' runs.
                dispatch.progress.clear()
        return again

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
        full = run.size >= self._sizes.largest_of(run.kind) and run.lanes.find(1) is None
        seconds = self.seconds.measured(run.kind, run.size) or _SECONDS
        most = int((_LONGEST if full else _SECONDS) / seconds)
        rows = max(1, min(run.rows_until_change(), most))
        # Some backends compute small programs before the call returns.
        began = time.perf_counter()
        ended = run.advance(rows)
        progress = [(member.owner, member.at) for member in run.members.values()]
        self._flying.append(_Dispatch(run.done, run, run.size, rows, began, progress))
        for place in ended:
            waiting, latents = run.members[place].owner, run.latents(place)
            run.leave(place)
            arguments = waiting.image, waiting.prepared, latents
            self._finishers.submit(waiting.request.deliver, *arguments)

    def _land(self) -> None:
        """Waits for the oldest dispatch, and notes how long its rows took."""
        dispatch = self._flying.popleft()
        try:
            jax.block_until_ready(dispatch.done)
        except Exception as error:
            self._give_up(dispatch.run, error)
            return
        now = time.perf_counter()
        began, self._landed = max(self._landed, dispatch.began), now
        self.seconds.note(dispatch.run.kind, dispatch.size, (now - began) / dispatch.rows)
        for waiting, row in dispatch.progress:
            waiting.request.generation.set_rows(waiting.image, row, waiting.prepared.rows)

    def _show(self, run: BatchRun) -> None:
        """Decodes the images of calls that want a preview."""
        members = run.members.items()
        wanted = {m.owner.request for _, m in members if m.owner.request.generation.wants_preview()}
        for request in wanted:
            mine = [(place, m) for place, m in members if m.owner.request is request]
            try:
                now = [(m.prepared, run.latents(place), m.at) for place, m in mine]
                make = functools.partial(request.preview, now)
            except Exception as error:
                # The batch itself is as it was.
                make = functools.partial(_raise, error)
            self._previewers.submit(request.generation.answer_previews, make)


def _raise(error: Exception) -> list[Any]:
    raise error
