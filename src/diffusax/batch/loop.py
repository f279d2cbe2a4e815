"""The batches of images that run, which take turns, and the rows that are dispatched at once."""

import collections
import dataclasses
import functools
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Any

import jax

from diffusax.batch.image import Image, Kind, Status
from diffusax.batch.measures import RowSeconds
from diffusax.batch.policies import Device
from diffusax.batch.run import BatchRun
from diffusax.batch.sizes import Sizes

log = logging.getLogger(__name__)

_SECONDS = 0.05
"""About the time for which rows are dispatched at once while others could join."""
_LONGEST = 0.25
"""The same while the batch is full."""
_IN_FLIGHT = 2
"""The dispatches that the device may be behind."""


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
    progress: list[tuple[Image, int]]
    """The next row of each image after these."""


class BatchLoop:
    """Runs images in one running batch for each kind of them; the batches take turns.

    One thread at a time calls the methods.
    """

    def __init__(self, sizes: Sizes, finishers: Executor, previewers: Executor):
        """Starts without images.

        Args:
            sizes: the sizes of batches.
            finishers: the threads that decode what has ended.
            previewers: the threads that make previews.
        """
        self._sizes, self._finishers, self._previewers = sizes, finishers, previewers
        self._runs: dict[Any, list[BatchRun]] = {}
        """The batches by the key of their images."""
        self.seconds = RowSeconds()
        """The seconds of rows, as far as they were measured."""
        self._flying: collections.deque[_Dispatch] = collections.deque()

    def has_work(self) -> bool:
        """Returns whether an image has a seat."""
        return any(map(len, self._all_runs()))

    @property
    def live(self) -> list[tuple[Kind, int, int]]:
        """The kind, the size and the lanes in use of each batch with images."""
        return [(run.kind, run.size, run.lanes.taken) for run in self._all_runs() if len(run)]

    def device(self, arrivals: float) -> Device:
        """Returns what a policy knows of the device now. arrivals: images that come each second."""
        smallest = self._sizes.smallest_of

        def seconds(kind: Kind, lanes: int) -> float:
            return self.seconds.estimate(kind, lanes, smallest(kind))

        def reach(kind: Kind) -> int:
            return self.seconds.reach(kind, smallest(kind))

        largest = functools.cache(self._sizes.largest_of)
        return Device(functools.cache(seconds), largest, arrivals, reach)

    def seat(self, image: Image) -> bool:
        """Seats an image if there is a free seat, in a larger batch if that is allowed.

        Returns whether it has one. What it raises concerns this image alone.
        """
        run = self._run_for(image)
        if run is None:
            return False
        while (seat := run.lanes.find(image.prepared.branches)) is None:
            if 2 * run.size > self._sizes.largest_of(run.kind):
                return False
            try:
                run.resize(2 * run.size)
            except Exception as error:
                if self._sizes.begins_again(run.kind, 2 * run.size, error):
                    return False
                raise
        run.make_room(image.prepared)
        try:
            run.join(image, seat)
        except Exception as error:
            # The batch's arrays were donated.
            if self._give_up(run, error):
                return False
            raise
        image.status = Status.RUNNING
        return True

    def turn(self) -> None:
        """Runs some rows of each batch."""
        self._drop_ended()
        for key in list(self._runs):
            for run in self._runs[key]:
                self._shrink(run)
            for run in [run for run in self._runs[key] if len(run)]:
                self._show(run)
                try:
                    self._advance(run)
                except Exception as error:
                    self._give_up(run, error)
            self._forget_empty(key)
        while len(self._flying) > (_IN_FLIGHT - 1 if self.has_work() else 0):
            self._land()
        self._measure_again()

    def fail(self, error: BaseException) -> None:
        """Ends the requests of all images that have a seat, and forgets the batches."""
        for run in self._all_runs():
            for image in run.images.values():
                image.status = Status.DONE
                image.request.settle(error=error)
        self._runs.clear()
        self._flying.clear()

    def _all_runs(self) -> Iterator[BatchRun]:
        # Other threads ask for `live`.
        for runs in list(self._runs.values()):
            yield from runs

    def _drop_ended(self) -> None:
        """Frees the seats of images whose request was cancelled or has failed."""
        for run in self._all_runs():
            for place, image in run.images.items():
                if image.request.done():
                    image.status = Status.DONE
                    run.leave(place)

    def _run_for(self, image: Image) -> BatchRun | None:
        """Returns the batch that an image joins; None while its adapters have no room."""
        prepared, runs = image.prepared, self._runs.setdefault(image.prepared.key, [])
        fitting = [run for run in runs if run.has_shapes_for(prepared)]
        if not fitting:
            size = self._sizes.size_for(image)
            fitting = [BatchRun(image.request.c, prepared, size, image.kind)]
            runs += fitting
        return next((run for run in fitting if run.has_ranks_for(prepared)), None)

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
        for image in run.images.values():
            if again:
                image.status, image.at = Status.READY, 0
                image.request.set_rows(image.index, 0, image.prepared.rows)
            else:
                image.status = Status.DONE
                image.request.settle(error=error)
        for dispatch in self._flying:
            if dispatch.run is run:
                # These rows are no longer part of the images' runs.
                dispatch.progress.clear()
        return again

    def _forget_empty(self, key: Any) -> None:
        """Frees the arrays of batches in which no image is left."""
        if left := [run for run in self._runs[key] if len(run)]:
            self._runs[key] = left
        else:
            del self._runs[key]

    def _advance(self, run: BatchRun) -> None:
        """Dispatches rows, and hands over the images that end with them."""
        full = run.size >= self._sizes.largest_of(run.kind) and run.lanes.find(1) is None
        seconds = self.seconds.measured(run.kind, run.size) or _SECONDS
        most = int((_LONGEST if full else _SECONDS) / seconds)
        rows = max(1, min(run.rows_until_change(), most))
        # Some backends compute small programs before the call returns.
        began = time.perf_counter()
        ended = run.advance(rows)
        progress = [(image, image.at) for image in run.images.values()]
        self._flying.append(_Dispatch(run.done, run, run.size, rows, began, progress))
        for place in ended:
            image, latents = run.images[place], run.latents(place)
            run.leave(place)
            image.status = Status.DONE
            self._finishers.submit(image.request.deliver, image, latents)

    def _land(self) -> None:
        """Waits for the oldest dispatch, and notes how long its rows took."""
        dispatch = self._flying.popleft()
        late = dispatch.done.is_ready()
        try:
            jax.block_until_ready(dispatch.done)
        except Exception as error:
            self._give_up(dispatch.run, error)
            return
        times = dispatch.began, time.perf_counter()
        self.seconds.land(dispatch.run.kind, dispatch.size, dispatch.rows, *times, late=late)
        for image, row in dispatch.progress:
            image.request.set_rows(image.index, row, image.prepared.rows)

    def _measure_again(self) -> None:
        """Measures one of the sizes that are due, in a batch beside those that run.

        Larger ones than the next wait until a batch is half their size, so that nobody waits long.
        """
        for run in self._all_runs():
            smallest = self._sizes.smallest_of(run.kind)
            largest = min(self._sizes.largest_of(run.kind), 2 * run.size)
            for size in self.seconds.due(run.kind):
                if (
                    len(run)
                    and size != run.size
                    and smallest <= size <= largest
                    and self._sizes.has_room(run.kind, size)
                ):
                    self._measure(next(iter(run.images.values())), smallest, size)
                    return

    def _measure(self, image: Image, smallest: int, size: int) -> None:
        log.info("the machine has changed: batches of %d lanes are measured again", size)
        while self._flying:
            self._land()
        try:
            run = BatchRun(image.request.c, image.prepared, smallest, image.kind)
            while run.size < size:
                run.resize(2 * run.size)
            time_rows(self.seconds, run, image)
        except Exception as error:
            log.warning("a batch of %d lanes cannot be measured again", size, exc_info=error)
            self._sizes.begins_again(image.kind, size, error)
            self.seconds.forget(image.kind, size)

    def _show(self, run: BatchRun) -> None:
        """Decodes the images of requests that want a preview."""
        images = run.images
        wanted = {i.request for i in images.values() if i.request.wants_preview()}
        for request in wanted:
            mine = [(place, image) for place, image in images.items() if image.request is request]
            try:
                now = [(image, run.latents(place), image.at) for place, image in mine]
                make = functools.partial(request.make_preview, now)
            except Exception as error:
                # The batch itself is as it was.
                make = functools.partial(_raise, error)
            self._previewers.submit(request.answer_previews, make)


def time_rows(seconds: RowSeconds, run: BatchRun, image: Image) -> jax.Array:
    """Measures twice what a row of a batch without images takes; what runs is left as it is.

    Args:
        seconds: is told.
        run: the batch.
        image: an image of its kind, whose rows are computed; the programs are the same for any
            number of branches.

    Returns:
        The latents of the image then, 1 h w c.
    """
    seat = run.lanes.find(1)
    assert seat is not None
    run.join(Image(image.request, image.index, image.prepared, image.kind), seat)
    rows = max(1, int(_SECONDS / (seconds.measured(run.kind, run.size) or _SECONDS)))
    jax.block_until_ready(run.latents(seat.place))
    for _ in range(2):
        began = time.perf_counter()
        run.advance(rows)
        jax.block_until_ready(run.done)
        seconds.note(run.kind, run.size, (time.perf_counter() - began) / rows)
    latents = run.latents(seat.place)
    run.leave(seat.place)
    return latents


def _raise(error: Exception) -> list[Any]:
    raise error
