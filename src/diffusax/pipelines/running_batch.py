"""A running batch for calls that come one after the other, in a thread of its own."""

import collections
import dataclasses
import functools
import inspect
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import jax
import numpy as np

from diffusax.pipelines.arguments import bound_arguments, check_call
from diffusax.pipelines.batch_run import BatchRun, check_local, count_shares
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
_FINISHERS = 2
"""The threads that decode and convert images that have left."""


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
    """The batch's key and its size."""
    rows: int
    began: float
    progress: list[tuple[_Waiting, int]]
    """The next row of each image after these."""


class RunningBatch:
    """Runs the calls of pipelines in one batch, which they join and leave at any step.

    Calls may have any sampler, number of steps, guidance, prompt, strength and mask, and come from
    any thread; other ones compile nothing. Images of another size, or of another pipeline, form a
    batch of their own, and the batches take turns. A call's images are those that the call alone
    would generate, to rounding.

        with diffusax.RunningBatch(pipe) as batch:
            futures = [batch.submit(prompt, seed=i) for i, prompt in enumerate(prompts)]
            images = [future.result().images[0] for future in futures]
    """

    def __init__(self, pipe: Any, *, lanes: int = 8, smallest: int | None = None):
        """Starts a running batch.

        Args:
            pipe: the pipeline whose calls are submitted. Others may be named with each call.
            lanes: the most entries of the network's batch, a power of two, at least 4, times the
                devices of the pipeline's mesh. An image takes one without guidance, two with
                classifier-free guidance and three with InstructPix2Pix's.
            smallest: the entries of the network's batch while little is to do, such a power of two
                from 1 to lanes; by default one for each device. A step of a small batch takes less
                time on CPUs, and each size compiles once.

        Raises:
            ValueError: lanes or smallest is not such a number, or the mesh belongs to several
                processes.
        """
        check_local(pipe.mesh)
        self._devices = count_shares(pipe.mesh)
        self._smallest = self._devices if smallest is None else smallest
        for name, value, least in (("lanes", lanes, 4), ("smallest", self._smallest, 1)):
            share, rest = divmod(value, self._devices)
            if rest or share < least or share.bit_count() != 1 or value > lanes:
                raise ValueError(
                    f"{name} must be a power of two, at least {least}, times {self._devices} "
                    f"devices, and smallest at most lanes (got {value})"
                )
        self._pipe, self._lanes, self._texts = pipe, lanes, TextCache()
        self._new: collections.deque[Request] = collections.deque()
        self._waiting: dict[Any, collections.deque[_Waiting]] = {}
        self._runs: dict[Any, BatchRun] = {}
        self._seated: dict[Any, dict[int, _Waiting]] = {}
        self._seconds: dict[Any, float] = {}
        self._flying: collections.deque[_Dispatch] = collections.deque()
        self._landed = 0.0
        self._changed = threading.Condition()
        self._closing = False
        self._finishers = ThreadPoolExecutor(_FINISHERS, "diffusax-finish")
        self._thread = threading.Thread(target=self._serve, name="diffusax-batch", daemon=True)
        self._thread.start()

    def submit(
        self, *args: Any, pipe: Any = None, sampler: str | Scheduler | None = None, **kwargs: Any
    ) -> Generation:
        """Submits a call, and returns its future.

        Args:
            *args: the arguments of the pipeline's call.
            pipe: another pipeline to call, such as one for another task with the same components
                (`from_pipe`).
            sampler: the name of a sampler or a scheduler for this call; by default the pipeline's
                own.
            **kwargs: the arguments of the pipeline's call by name.

        Raises:
            ValueError: an argument is not valid; errors that concern arrays and images are raised
                by the future's `result`.
            TypeError: the arguments do not fit the pipeline's call.
            RuntimeError: the running batch is closed.
        """
        request = self._request(pipe or self._pipe, sampler, args, kwargs)
        with self._changed:
            if self._closing:
                raise RuntimeError("the running batch is closed; make another")
            self._new.append(request)
            self._changed.notify()
        return request.generation

    def warm(self, *args: Any, **kwargs: Any) -> None:
        """Compiles the programs that images like those of this call need, for every size of batch.

        The arguments are those of `submit`. Sizes that were not compiled are when a batch first
        grows to them, which the images in it wait for.
        """
        sampler, pipe = kwargs.pop("sampler", None), kwargs.pop("pipe", None)
        request = self._request(pipe or self._pipe, sampler, args, kwargs)
        picture = prepare_pictures(request.c, request.pipe.task, self._prepared(request))[0]
        sizes = [self._smallest]
        run = BatchRun(request.c, picture, sizes[0])
        while sizes[-1] < self._lanes:
            sizes.append(2 * sizes[-1])
        for size in (*sizes, *sizes[-2::-1]):
            if size != run.size:
                run.resize(size)
            # The programs are the same for any number of branches.
            seat = run.lanes.find(1)
            assert seat is not None
            run.join(picture, seat)
            run.advance(1)
            latents = run.latents(seat.place)
            run.leave(seat.place)
        request.decode(latents, picture.decoding, picture.decoder_condition)

    def close(self, *, cancel: bool = False) -> None:
        """Waits until all calls have ended, and stops the threads.

        cancel: whether to cancel the calls first.
        """
        with self._changed:
            self._closing = True
            if cancel:
                for request in self._requests():
                    request.generation.cancel()
            self._changed.notify()
        self._thread.join()
        self._finishers.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: Any, error: Any, traceback: Any) -> None:
        self.close(cancel=error is not None)

    def _request(
        self, pipe: Any, sampler: str | Scheduler | None, args: tuple[Any, ...], kwargs: Any
    ) -> Request:
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
        c = dataclasses.replace(parts, scheduler=scheduler, texts=self._texts, **copies)
        return Request(pipe, c, call, Generation(self._wake))

    def _wake(self) -> None:
        # A notification without the lock could come before the wait.
        if self._changed.acquire(blocking=False):
            self._changed.notify()
            self._changed.release()

    def _requests(self) -> Iterator[Request]:
        yield from self._new
        for group in (*self._waiting.values(), *(s.values() for s in self._seated.values())):
            yield from (waiting.request for waiting in group)

    def _serve(self) -> None:
        """Runs until the batch is closed and all calls have ended."""
        while True:
            with self._changed:
                while not self._has_work():
                    if self._closing:
                        return
                    self._changed.wait(1.0)
            try:
                self._turn()
            except Exception as error:
                # Out of memory, or an error of ours: no call may wait for ever.
                log.exception("the running batch failed")
                self._fail(error)

    def _has_work(self) -> bool:
        return bool(self._new) or any(self._waiting.values()) or any(map(len, self._runs.values()))

    def _turn(self) -> None:
        """Lets each batch run some rows."""
        self._prepare()
        self._drop_cancelled()
        for key in list(self._waiting):
            self._admit(key)
            run = self._runs.get(key)
            if run is None or not len(run):
                self._forget(key)
                continue
            self._show(key, run)
            self._advance(key, run)
            # The device is busy: what comes next is prepared meanwhile.
            self._prepare()
        while len(self._flying) > (_IN_FLIGHT - 1 if self._has_work() else 0):
            self._land()

    def _forget(self, key: Any) -> None:
        """Frees the arrays of a batch in which no image is left."""
        for group in (self._waiting, self._runs, self._seated):
            group.pop(key, None)

    def _prepare(self) -> None:
        """Prepares submitted calls, as many as could join soon."""
        while self._new and sum(map(len, self._waiting.values())) < self._lanes:
            request = self._new.popleft()
            if request.generation.cancelled():
                continue
            try:
                run = self._prepared(request)
                request.finish = run.finish
                if runs_alone(request.call, run):
                    self._finishers.submit(self._alone, request, run)
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

    @staticmethod
    def _prepared(request: Request) -> PreparedRun:
        with in_mesh(request.c.local_mesh):
            run: PreparedRun = request.pipe.task(request.c, request.call)
        return run

    @staticmethod
    def _alone(request: Request, run: PreparedRun) -> None:
        """Runs a call that cannot join others."""
        try:
            bar = {"disable": True}
            latents = watch_call(request.pipe, request.c, request.call, run, bar=bar)
            request.complete(request.decode(latents, run.decoding, run.decoder_condition))
        except Exception as error:
            request.generation.settle(error=error)

    def _drop_cancelled(self) -> None:
        for queue in self._waiting.values():
            for waiting in [w for w in queue if w.request.generation.done()]:
                queue.remove(waiting)
        for key, seated in self._seated.items():
            for place in [p for p, w in seated.items() if w.request.generation.done()]:
                del seated[place]
                self._runs[key].leave(place)

    def _admit(self, key: Any) -> None:
        """Gives seats to those that wait, in the order in which they came, and fits the size."""
        queue, run = self._waiting[key], self._runs.get(key)
        if run is None:
            if not queue:
                return
            first = queue[0]
            run = BatchRun(first.request.c, first.picture, self._smallest)
            self._runs[key], self._seated[key] = run, {}
        if not queue:
            self._shrink(key, run)
        while queue:
            seat = run.lanes.find(queue[0].picture.branches)
            if seat is not None:
                waiting = queue.popleft()
                run.join(waiting.picture, seat)
                self._seated[key][seat.place] = waiting
            elif run.size < self._lanes:
                self._resize(key, run, 2 * run.size)
            else:
                return

    def _shrink(self, key: Any, run: BatchRun) -> None:
        """Halves the batch while its images fit the half."""
        while run.size > self._smallest and run.lanes.taken <= run.size // 2:
            try:
                self._resize(key, run, run.size // 2)
            except ValueError:
                # On a mesh some device may still be full.
                return

    def _resize(self, key: Any, run: BatchRun, size: int) -> None:
        moved = run.resize(size)
        self._seated[key] = {moved[place]: w for place, w in self._seated[key].items()}

    def _advance(self, key: Any, run: BatchRun) -> None:
        """Dispatches rows, and hands over the images that end with them."""
        seated, most = self._seated[key], run.rows_until_change()
        full = run.lanes.find(1) is None
        seconds = self._seconds.get((key, run.size), _SECONDS)
        rows = max(1, min(most, int((_LONGEST if full else _SECONDS) / seconds)))
        done = run.advance(rows)
        progress = [(w, run.position(place)) for place, w in seated.items()]
        now = time.perf_counter()
        self._flying.append(_Dispatch(run.done, (key, run.size), rows, now, progress))
        for place in done:
            waiting = seated.pop(place)
            latents = run.latents(place)
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

    def _show(self, key: Any, run: BatchRun) -> None:
        """Decodes the images of calls that want a preview."""
        seated = self._seated[key].items()
        for request in {w.request for _, w in seated if w.request.generation.wants_preview()}:
            now = [
                (w.picture, _unit(run.latents(p), w.picture.levels[run.position(p)]))
                for p, w in seated
                if w.request is request
            ]
            generation = request.generation
            make = functools.partial(request.preview, now)
            self._finishers.submit(generation.answer_previews, make)

    def _fail(self, error: Exception) -> None:
        for request in list(self._requests()):
            request.generation.settle(error=error)
        self._new.clear()
        for group in (self._waiting, self._runs, self._seated):
            group.clear()
        self._flying.clear()


def _unit(latents: jax.Array, level: np.ndarray) -> jax.Array:
    """Returns latents of a noise level with about the variance of clean ones."""
    return latents / np.float32(np.hypot(*level))
