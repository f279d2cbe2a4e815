"""The scheduler: one thread that lets the images of many requests share running batches.

A request goes through these steps:

1. It waits in a `FairQueue`: by priority, then by the share of its key, then in order of arrival.
2. It is prepared in a thread beside: its model is loaded, its prompts are encoded, its noise is
   drawn, and its images are READY. A few more are prepared than could join at once.
3. A READY image may join when the programs of its kind of batch are compiled, and the memory holds
   such a batch. Images that wait for programs hold nobody up; one that waits for memory does, so
   that the others end and leave it theirs.
4. The policy chooses those of them that join now, by the measured seconds of rows. They are RUNNING
   from then on: they have a seat in the batch of their kind, which grows and shrinks.
5. The batches take turns. An image whose last row is dispatched leaves, and is decoded in a thread
   beside; the last one settles its request.
6. What the rows of each size take is measured, and each size before the next is tried. When the
   measurements say that the machine has changed, the other sizes are measured again, one each turn.

Requests that were cancelled, or are not done in time, leave before the next step, wherever they
are. `RunningBatch` and the server's `Engine` differ in how a request is prepared, and in whether
programs are compiled ahead.
"""

import collections
import functools
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

from diffusax.batch.compiling import Compiler
from diffusax.batch.image import Image, Kind, Status
from diffusax.batch.loop import BatchLoop
from diffusax.batch.measures import Arrivals
from diffusax.batch.policies import FairQueue, Policy, finish_times, running
from diffusax.batch.request import Request
from diffusax.batch.sizes import Sizes
from diffusax.runtime.programs.program import watched_compilations

log = logging.getLogger(__name__)

_AHEAD = 16
"""The images that are prepared and could join at once."""
_MOST_PREPARED = 64
"""The images that are prepared, of which some wait for programs."""
_BETWEEN_ESTIMATES = 0.25
"""The least seconds between estimates of when requests end."""

OnEstimate = Callable[[Sequence[Request], dict[Request, float]], None]
"""Called with the requests in order and the seconds until each ends, as far as they are known."""


class Scheduler:
    """Runs the images of requests in the batches of one device, or of the devices of a mesh.

    Any thread may call the methods.
    """

    def __init__(
        self,
        sizes: Sizes,
        prepare: Callable[[Request], None],
        *,
        policy: Policy = running,
        preparers: int = 1,
        finishers: int = 1,
        compiler: Callable[..., Compiler] | None = None,
        on_estimate: OnEstimate | None = None,
        on_idle: Callable[[], None] = lambda: None,
        on_end: Callable[[], None] = lambda: None,
    ):
        """Starts without requests; `start` starts the thread.

        Args:
            sizes: the sizes of batches.
            prepare: a function that sets the images of a request (`Request.take_images`), or none
                if it runs elsewhere. What it raises ends the request.
            policy: chooses the images that join.
            preparers: the threads that call `prepare`; one more loads models.
            finishers: the threads that decode.
            compiler: makes what compiles programs ahead, a `Compiler` without its functions.
            on_estimate: is told from time to time when requests will end.
            on_idle: is told that nothing is left to compute.
            on_end: is told that all requests have ended after `close`.
        """
        self._sizes, self._prepare, self._policy = sizes, prepare, policy
        self._on_estimate, self._on_idle, self._on_end = on_estimate, on_idle, on_end
        self._queue, self._arrivals, self._estimated = FairQueue(), Arrivals(), 0.0
        self._preparing: set[Request] = set()
        self._prepared: set[Request] = set()
        self._with_deadline: set[Request] = set()
        self._merged: list[Request] = []
        """The requests with merged adapters that have not ended; all have the same."""
        # Other threads put functions here; only the scheduler's own changes the rest.
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._awake, self._ending, self._busy = threading.Event(), False, False
        self.threads: set[threading.Thread] = set()
        """The threads that must not wait for themselves."""
        self._preparers = self._pool(preparers, "diffusax-prepare")
        self._loaders = self._pool(1, "diffusax-load")
        finish = self._pool(finishers, "diffusax-finish")
        preview = self._pool(1, "diffusax-preview")
        self._pools = self._preparers, self._loaders, preview, finish
        self.loop = BatchLoop(sizes, finish, preview)
        self.compiler = compiler and compiler(
            is_busy=lambda: self._busy,
            is_wanted=self._is_wanted,
            on_ready=self._awake.set,
            on_error=functools.partial(self._tell, self._not_compiled),
        )
        self._thread = threading.Thread(target=self._serve, name="diffusax-batch", daemon=True)

    def start(self) -> Self:
        """Starts the thread."""
        self.threads.add(self._thread)
        self._thread.start()
        return self

    @property
    def is_alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def add(self, request: Request) -> None:
        """Adds a request."""
        request.on_change = self.wake
        self._tell(self._enter, request)

    def wake(self) -> None:
        """Tells that a request has ended or wants a preview."""
        self._awake.set()

    def cancel(self) -> None:
        """Cancels all requests that have not ended."""
        self._tell(self._cancel_all)

    def has_work(self) -> bool:
        """Returns whether a request has not ended."""
        return bool(self._inbox) or len(self._queue) > 0

    def close(self, *, wait: bool = True) -> None:
        """Ends the threads once all requests have ended. wait: whether to wait for it.

        Not to be waited for in one of `threads`.
        """
        self._ending = True
        self._awake.set()
        if wait:
            self._thread.join()
            for pool in self._pools:
                pool.shutdown()
            if self.compiler is not None:
                self.compiler.close()

    def _pool(self, count: int, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(
            count, name, initializer=lambda: self.threads.add(threading.current_thread())
        )

    def _serve(self) -> None:
        while not self._ending or self.has_work():
            if not self.loop.has_work():
                self._on_idle()
                self._awake.wait(0.5)
            self._awake.clear()
            try:
                self.turn()
            except Exception as error:
                # An error of ours: no request may wait for ever.
                log.exception("the scheduler failed")
                self._fail(error)
        self._on_end()
        for pool in self._pools:
            pool.shutdown(wait=False)

    def turn(self) -> None:
        """Prepares requests, seats images and runs some rows, which the thread does without end."""
        while self._inbox:
            self._inbox.popleft()()
        self._end_late()
        self._prepare_next()
        self._admit()
        if self._on_estimate is not None:
            self._estimate(self._on_estimate)
        self._busy = self.loop.has_work()
        self.loop.turn()

    def _tell(self, function: Callable[..., None], *given: Any) -> None:
        """Makes the scheduler's thread call a function."""
        self._inbox.append(functools.partial(function, *given))
        self._awake.set()

    def _enter(self, request: Request) -> None:
        self._queue.add(request)
        if request.deadline is not None:
            self._with_deadline.add(request)
        request.add_done_callback(functools.partial(self._tell, self._let_go))

    def _let_go(self, request: Request) -> None:
        """Removes a request that has ended, or that `prepare` has given to others."""
        if request not in self._queue or request in self._preparing:
            return
        self._queue.remove(request)
        self._prepared.discard(request)
        self._with_deadline.discard(request)
        request.release()
        if request.done():
            request.forget()

    def _cancel_all(self) -> None:
        for request in list(self._queue):
            request.cancel()

    def _fail(self, error: Exception) -> None:
        """Ends the requests that are prepared or run with an error."""
        self.loop.fail(error)
        for request in list(self._prepared):
            request.settle(error=error)

    def _end_late(self) -> None:
        now = time.time()
        for request in self._with_deadline:
            assert request.deadline is not None
            if now > request.deadline and not request.done():
                seconds = request.deadline - request.created
                message = f"the images were not ready within {seconds:.1f} seconds"
                request.settle(error=TimeoutError(message))

    def _prepare_next(self) -> None:
        """Prepares the next requests, as many as could join soon."""
        if len(self._queue) == len(self._prepared) + len(self._preparing):
            return
        waiting = [image for image in self._images() if image.status is Status.READY]
        ready = sum(map(self._sizes.is_ready, waiting))
        room = min(_AHEAD - ready, _MOST_PREPARED - len(waiting)) - len(self._preparing)
        self._merged = [request for request in self._merged if not request.done()]
        fresh = (
            request
            for request in self._queue
            if request not in self._prepared
            and request not in self._preparing
            and self._may_merge(request)
        )
        for request in itertools.islice(fresh, max(room, 0)):
            if request.mixture is not None:
                self._merged.append(request)
            self._preparing.add(request)
            loaded = request.is_loaded
            if not loaded:
                request.set_state("loading")
            (self._preparers if loaded else self._loaders).submit(self._prepare_one, request)

    def _may_merge(self, request: Request) -> bool:
        """Returns whether a request's adapters can be merged: there is one copy of parameters."""
        mixture = request.mixture
        return mixture is None or all(mixture.equals(other.mixture) for other in self._merged)

    def _prepare_one(self, request: Request) -> None:
        """Prepares a request in a thread of the pools."""
        try:
            if not request.done():
                with watched_compilations(lambda: request.set_state("compiling")):
                    self._prepare(request)
        except BaseException as error:  # Nothing may be lost in a thread.
            request.settle(error=error)
        self._tell(self._take_in, request)

    def _take_in(self, request: Request) -> None:
        self._preparing.discard(request)
        if request.done() or not request.images:
            self._let_go(request)
            return
        self._prepared.add(request)
        for _ in request.images:
            self._arrivals.note(request.created)

    def _images(self) -> list[Image]:
        """Returns the images that are prepared or run, in the order of their requests."""
        ordered = self._queue.ordered(self._prepared)
        return [image for request in ordered for image in request.images]

    def _candidates(self) -> tuple[list[Image], list[Image]]:
        """Returns the images that run, and in their order those that could join."""
        images = self._images()
        present = [image for image in images if image.status is Status.RUNNING]
        lanes: collections.Counter[Kind] = collections.Counter()
        for image in images:
            if image.status is not Status.DONE:
                lanes[image.kind] += image.prepared.branches
        ready = []
        for image in images:
            if image.status is not Status.READY or image.request.done():
                continue
            if self.compiler is not None:
                self.compiler.want(image, lanes[image.kind])
            compiled = self._sizes.is_ready(image)
            image.request.set_state("queued" if compiled else "compiling")
            if compiled:
                if not self._has_room(image, present):
                    # Nobody overtakes it, so that the others end and leave it their memory.
                    break
                ready.append(image)
        return present, ready

    def _has_room(self, image: Image, present: Sequence[Image]) -> bool:
        """Returns whether the memory holds a batch for an image beside those that run."""
        if not present or any(other.kind is image.kind for other in present):
            return True
        return self._sizes.has_room(image.kind, self._sizes.size_for(image))

    def _is_wanted(self, kind: Kind) -> bool:
        """Returns whether images of a kind wait or run. Any thread may call this."""
        images = (image for request in self._prepared.copy() for image in request.images)
        return any(image.kind is kind and not image.request.done() for image in images)

    def _admit(self) -> None:
        """Seats the images that the policy chooses."""
        present, ready = self._candidates()
        full: set[Any] = set()
        for image in self._policy(present, ready, self.loop.device(self._arrivals.rate())):
            if image.prepared.key in full:
                continue
            try:
                if not self.loop.seat(image):
                    # Nobody overtakes it in its batch.
                    full.add(image.prepared.key)
                    continue
            except Exception as error:
                image.request.settle(error=error)
                continue
            self._queue.begin(image.request)
            image.request.set_state("running")

    def _estimate(self, tell: OnEstimate) -> None:
        now = time.monotonic()
        if now - self._estimated < _BETWEEN_ESTIMATES:
            return
        self._estimated = now
        present, waiting = self._candidates()
        device = self.loop.device(self._arrivals.rate())
        ends: dict[Request, float] = {}
        for image, end in finish_times(present, waiting[:_AHEAD], max(len(present), 1), device):
            ends[image.request] = max(end, ends.get(image.request, 0.0))
        tell(list(self._queue), ends)

    def _not_compiled(self, kind: Kind, size: int, error: Exception) -> None:
        """Ends the requests of a kind of which no size compiles."""
        if self._sizes.give_up(kind, size, error):
            return
        for image in self._images():
            if image.kind is kind:
                image.request.settle(error=error)
