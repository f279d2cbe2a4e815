"""The calls of a running batch that cannot join others, in a thread of their own."""

import collections
import threading

from diffusax.pipelines.generation import Request
from diffusax.pipelines.plan import PreparedRun
from diffusax.pipelines.requests import prepare
from diffusax.pipelines.step_callbacks import view_of, watch_call

_AHEAD = 16
"""The calls that wait with what was prepared of them; those beyond are prepared at their turn."""


class RunsAlone:
    """Runs calls one after the other, beside the batches.

    Any thread may call the methods.
    """

    def __init__(self) -> None:
        """Starts the thread, without calls."""
        self._waiting: collections.deque[tuple[Request, PreparedRun | None]] = collections.deque()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="diffusax-alone", daemon=True)
        self._thread.start()

    def add(self, request: Request, run: PreparedRun | None = None) -> None:
        """Adds a call. run: what was prepared of it; None prepares it at its turn."""
        with self._changed:
            prepared = sum(other is not None for _, other in self._waiting)
            self._waiting.append((request, run if prepared < _AHEAD else None))
            self._changed.notify()

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after the calls that were added. wait: whether to wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if wait:
            self._thread.join()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    if self._closing:
                        return
                    self._changed.wait()
                request, run = self._waiting.popleft()
            if not request.generation.done():
                _run(request, run)


def _run(request: Request, run: PreparedRun | None) -> None:
    try:
        run = prepare(request) if run is None else run
        request.finish = run.finish
        pipe = view_of(request.pipe, request.c)
        latents = watch_call(
            *(pipe, request.c, request.call, run),
            interrupted=lambda: pipe.interrupt,
            bar={"disable": True},
        )
        request.complete(request.decode(latents, run.decoding, run.decoder_condition))
    except BaseException as error:  # Whatever a callback raises ends its own call alone.
        request.generation.settle(error=error)
