"""The calls of a running batch that cannot join others, in a thread of their own."""

import collections
import functools
import threading

import jax

from diffusax.batch.request import Request, preview_of
from diffusax.pipelines.pipeline.call import remember
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.run.callbacks import row_callback, view_of
from diffusax.pipelines.run.images import decode_result
from diffusax.pipelines.run.sample import OnRow, run_plan

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
        self._running: Request | None = None
        self._closing = False
        self.thread = threading.Thread(target=self._serve, name="diffusax-alone", daemon=True)
        self.thread.start()

    def add(self, request: Request, run: PreparedRun | None = None) -> None:
        """Adds a call. run: what was prepared of it; None prepares it at its turn."""
        with self._changed:
            for waiting in [w for w in self._waiting if w[0].done()]:
                self._waiting.remove(waiting)
            prepared = sum(other is not None for _, other in self._waiting)
            self._waiting.append((request, run if prepared < _AHEAD else None))
            self._changed.notify()

    def requests(self) -> list[Request]:
        """Returns the calls that have not ended, the one that runs first."""
        with self._changed:
            running = [] if self._running is None else [self._running]
            return [*running, *(request for request, _ in self._waiting)]

    def close(self, *, wait: bool = True) -> None:
        """Ends the thread after the calls that were added. wait: whether to wait for it."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        if wait:
            self.thread.join()

    def cancel(self) -> None:
        """Cancels all calls."""
        for request in self.requests():
            request.cancel()

    def _serve(self) -> None:
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Runs the next call; returns whether there was one. No call outlives its turn."""
        if (given := self._next()) is None:
            return False
        if not given[0].done():
            _run(*given)
        given[0].forget()
        return True

    def _next(self) -> tuple[Request, PreparedRun | None] | None:
        """Waits for the next call; returns None if there will be none."""
        with self._changed:
            self._running = None
            while not self._waiting:
                if self._closing:
                    return None
                self._changed.wait()
            given = self._waiting.popleft()
            self._running = given[0]
            return given


def _run(request: Request, run: PreparedRun | None) -> None:
    try:
        run = request.prepare() if run is None else run
        pipe, call = view_of(request.pipe, request.c), request.call
        remember(pipe, call, run)
        on_row = None if call.callback_on_step_end is None else row_callback(pipe, call)
        sampled = run_plan(
            request.c,
            run,
            functools.partial(_tell, request, on_row),
            interrupted=lambda: pipe.interrupt or request.done(),
            bar={"disable": True},
        )
        if not request.done():
            flags = request.pipe.returns_flags
            request.settle(decode_result(request.c, call, run, sampled, flags=flags))
    except BaseException as error:  # Whatever a callback raises ends its own call alone.
        request.settle(error=error)


def _tell(
    request: Request, on_row: OnRow | None, row: int, state: jax.Array, run: PreparedRun
) -> tuple[jax.Array, PreparedRun, bool]:
    """Tells how many rows are computed, answers previews, and calls the call's own callback."""
    # Otherwise rows that are dispatched ahead could not be cancelled.
    state.block_until_ready()
    rows = row + 1
    request.set_rows(0, rows, len(run.schedule))
    if request.wants_preview():
        now = state[0], run.schedule.levels[rows], run.decoding, run.decoder_condition
        request.answer_previews(lambda: preview_of(request.c, *now))
    return (state, run, False) if on_row is None else on_row(row, state, run)
