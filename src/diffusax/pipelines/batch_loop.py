"""The loop of a running batch: who joins when, and how many rows are dispatched at once."""

import collections
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

import jax
import numpy as np

from diffusax.pipelines.adapter_store import resolve_adapters
from diffusax.pipelines.arguments import bound_arguments, check_call
from diffusax.pipelines.batch_run import BatchRun
from diffusax.pipelines.entries import Picture, prepare_pictures, runs_alone
from diffusax.pipelines.generation import Generation, Request
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.step_callbacks import watch_call
from diffusax.pipelines.text_cache import TextCache
from diffusax.runtime.mesh import in_mesh
from diffusax.samplers import Scheduler, scheduler_from_name

log = logging.getLogger(__name__)

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
    run: BatchRun


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

    def __init__(
        self,
        sizes: Sizes,
        finishers: Executor,
        *,
        largest: Callable[[Any], int] | None = None,
        on_error: Callable[[Any, int, Exception], bool] = lambda key, size, error: False,
    ):
        """Starts without requests.

        Args:
            sizes: the sizes of batches.
            finishers: the threads that decode what has ended.
            largest: returns the most lanes of a batch by its key; by default those of `sizes`.
            on_error: called with the key and the lanes of a batch whose step failed, and the error;
                says whether the batch's images begin again. Otherwise their requests end with the
                error.
        """
        self._sizes, self._finishers = sizes, finishers
        self._largest = largest or (lambda key: sizes.largest)
        self._on_error = on_error
        self._new: collections.deque[Request] = collections.deque()
        self._waiting: dict[Any, collections.deque[_Waiting]] = {}
        self._runs: dict[Any, list[BatchRun]] = {}
        self._seconds: dict[Any, float] = {}
        self._flying: collections.deque[_Dispatch] = collections.deque()
        self._landed = 0.0

    def add(self, request: Request) -> None:
        """Adds a request. Any thread may call this."""
        self._new.append(request)

    def add_prepared(self, request: Request, pictures: Sequence[Picture]) -> None:
        """Adds a request whose images are ready to join."""
        request.results = [None] * len(pictures)
        for image, picture in enumerate(pictures):
            request.generation.set_rows(image, 0, picture.rows)
            queue = self._waiting.setdefault(picture.key, collections.deque())
            queue.append(_Waiting(request, image, picture))

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
                try:
                    self._advance(run)
                except Exception as error:
                    self._give_up(key, run, error)
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
            self.add_prepared(request, pictures)

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
            try:
                if not self._seat(key, queue[0]):
                    return
            except Exception as error:
                # The batch is as it was: who is in it goes on.
                if self._on_error(key, self._largest(key), error):
                    return
                queue[0].request.generation.settle(error=error)
            queue.popleft()
        for run in self._runs.get(key, ()):
            self._shrink(run)

    def _seat(self, key: Any, waiting: _Waiting) -> bool:
        """Gives an image a seat if there is one, in a larger batch if there may be."""
        picture, run = waiting.picture, self._run_for(key, waiting)
        while run is not None:
            seat = run.lanes.find(picture.branches)
            if seat is not None:
                run.join(picture, seat, waiting)
                return True
            if 2 * run.size > self._largest(key):
                return False
            run.resize(2 * run.size)
        return False

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

    def _give_up(self, key: Any, run: BatchRun, error: Exception) -> None:
        """Forgets a batch whose step failed; its images begin again or their requests end."""
        if run not in self._runs.get(key, ()):
            return
        again = self._on_error(key, run.size, error)
        if not again:
            log.error("a running batch failed", exc_info=error)
        self._runs[key].remove(run)
        queue = self._waiting.setdefault(key, collections.deque())
        for member in reversed(run.members.values()):
            waiting = member.owner
            if again:
                waiting.request.generation.set_rows(waiting.image, 0, waiting.picture.rows)
                queue.appendleft(waiting)
            else:
                waiting.request.generation.settle(error=error)

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
        full = run.size >= self._largest(run.key) and run.lanes.find(1) is None
        seconds = self._seconds.get(shape, _SECONDS)
        most = int((_LONGEST if full else _SECONDS) / seconds)
        rows = max(1, min(run.rows_until_change(), most))
        # Some backends compute small programs before the call returns.
        began = time.perf_counter()
        ended = run.advance(rows)
        progress = [(member.owner, member.at) for member in run.members.values()]
        self._flying.append(_Dispatch(run.done, shape, rows, began, progress, run))
        for place in ended:
            waiting, latents = run.members[place].owner, run.latents(place)
            run.leave(place)
            arguments = waiting.image, waiting.picture, latents
            self._finishers.submit(waiting.request.deliver, *arguments)

    def _land(self) -> None:
        """Waits for the oldest dispatch, and notes how long its rows took."""
        dispatch = self._flying.popleft()
        try:
            jax.block_until_ready(dispatch.done)
        except Exception as error:
            self._give_up(dispatch.run.key, dispatch.run, error)
            return
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


def make_request(
    pipe: Any,
    sampler: str | Scheduler | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    texts: TextCache,
    generation: Generation,
) -> Request:
    """Returns the request of a call with the components that the pipeline has now.

    Args:
        pipe: the pipeline.
        sampler: the name of a sampler or a scheduler; None for the pipeline's own.
        args: the arguments of the pipeline's call.
        kwargs: those that are given by name.
        texts: the cache of encoded texts.
        generation: the future of the result.

    Raises:
        ValueError: an argument is not valid.
        TypeError: the arguments do not fit the pipeline's call.
    """
    signature = inspect.signature(type(pipe).__call__)
    call = check_call(bound_arguments(signature, pipe, args, kwargs))
    parts = pipe.parts
    scheduler = parts.scheduler if sampler is None else sampler
    if isinstance(scheduler, str):
        scheduler = scheduler_from_name(scheduler, parts.scheduler)
    # What the pipeline's owner changes later concerns later calls.
    params: dict[str, Any] = {}
    models = {name: model.bound_to(params, name) for name, model in parts.models.items()}
    copies = {"models": models, "params": params, "tokenizers": dict(parts.tokenizers)}
    stores = {"adapters": parts.adapters, "ip_adapters": parts.ip_adapters}
    copies |= {name: store.snapshot() for name, store in stores.items()}
    c = dataclasses.replace(parts, scheduler=scheduler, texts=texts, **copies)
    c, call = resolve_adapters(c, call)
    return Request(pipe, c, call, generation)


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
