"""The calls of a running batch that wait: they are prepared, and join as a policy says."""

import collections
import time
from collections.abc import Iterator

from diffusax.batch.alone import RunsAlone
from diffusax.batch.image import draws_torch_noise, prepare_images
from diffusax.batch.loop import BatchLoop, images_of
from diffusax.batch.policies import Arrivals, Candidate, Policy
from diffusax.batch.request import Request, padded, prepare

_AHEAD = 16
"""The images that are prepared and wait, where some wait."""
_SECONDS = 0.05
"""The seconds for which calls are prepared while the device is busy."""


_Arrival = tuple[Request, float]
"""A call and when it came (time.monotonic)."""


class Intake:
    """Prepares calls in the order in which they come, and lets their images join a loop's batches.

    One thread at a time calls its methods, but for `add`.
    """

    def __init__(self, loop: BatchLoop, policy: Policy, alone: RunsAlone):
        """Starts without calls.

        Args:
            loop: the loop of the batches.
            policy: who joins when.
            alone: what runs the calls that cannot join others.
        """
        self._loop, self._policy, self._alone = loop, policy, alone
        self._new: collections.deque[_Arrival] = collections.deque()
        self._held: list[_Arrival] = []
        """Calls whose adapters are merged into parameters, while those of others are in use."""
        self._merged: list[Request] = []
        """The calls whose adapters are merged now; all have the same."""
        self._ready: list[Candidate] = []
        self._arrivals = Arrivals()

    def __bool__(self) -> bool:
        return bool(self._new or self._ready or self._next_held())

    @property
    def holds(self) -> bool:
        """Whether a call waits until the parameters that others have changed are free."""
        return bool(self._held)

    def add(self, request: Request) -> None:
        """Adds a call. Any thread may call this."""
        self._new.append((request, time.monotonic()))

    def requests(self) -> Iterator[Request]:
        """Yields the calls that wait, those of several images several times."""
        yield from (request for request, _ in [*self._held, *self._new])
        yield from (image.owner.request for image in self._ready)

    def fail(self, error: BaseException) -> None:
        """Ends all calls that wait with an error."""
        for request in list(self.requests()):
            request.generation.settle(error=error)
        for group in (self._new, self._held, self._ready):
            group.clear()

    def admit(self) -> None:
        """Admits the images that the policy chooses."""
        self._ready = [i for i in self._ready if not i.owner.request.generation.done()]
        until = time.perf_counter() + _SECONDS
        while not self._ready and self._prepare_one():
            # Many may run alone, and the batches go on meanwhile.
            if time.perf_counter() > until:
                break
        if not self._ready:
            return
        device = self._loop.device(self._arrivals.rate())
        for image in self._policy(self._loop.candidates(), self._ready, device):
            self._loop.add(image.owner)
            self._ready.remove(image)

    def prepare(self) -> None:
        """Prepares calls that could join soon, for as long as the device may be busy."""
        until = time.perf_counter() + _SECONDS
        while len(self._ready) < _AHEAD and time.perf_counter() < until:
            if not self._prepare_one():
                break

    def _prepare_one(self) -> bool:
        """Prepares the next call; returns whether there is one."""
        if (arrival := self._next()) is None:
            return False
        self._prepare(*arrival)
        return True

    def _next(self) -> _Arrival | None:
        """Removes and returns the next waiting call."""
        while True:
            if (held := self._next_held()) is not None:
                self._held.remove(held)
                self._merged.append(held[0])
                return held
            if not self._new:
                return None
            arrival = self._new.popleft()
            if arrival[0].mixture is not None:
                self._held.append(arrival)
            elif not arrival[0].generation.done():
                return arrival

    def _next_held(self) -> _Arrival | None:
        """Returns the first call that was held back, if its adapters may be merged now.

        There is one copy of the parameters at a time.
        """
        self._held = [held for held in self._held if not held[0].generation.done()]
        self._merged = [request for request in self._merged if not request.generation.done()]
        if not self._held:
            return None
        mixture = self._held[0][0].mixture
        free = mixture is None or all(mixture.equals(other.mixture) for other in self._merged)
        return self._held[0] if free else None

    def _prepare(self, request: Request, came: float) -> None:
        if request.call.callback_on_step_end is not None:
            self._alone.add(request)
            return
        try:
            call, count = padded(request.call)
            run = prepare(request, call)
            request.overlay = run.overlay
            if draws_torch_noise(run):
                self._alone.add(request, run)
                return
            if not self._loop.has_lanes_for(run, request.c):
                self._alone.add(request)
                return
            prepared = prepare_images(request.c, request.pipe.task, run, count)
            images = images_of(request, prepared)
            self._ready += map(self._loop.candidate, images)
        except Exception as error:
            request.generation.settle(error=error)
            return
        for _ in images:
            self._arrivals.note(came)
