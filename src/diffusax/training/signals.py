"""Signals that ask a run to stop: SIGTERM and Ctrl-C."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_SECONDS = 1.0


class Preempted(Exception):
    """A signal asked the run to stop; the state has been saved."""

    def __init__(self, number: int, step: int):
        """number: of the signal. step: that the saved state has reached."""
        self.exit_code = 128 + number
        """As of a process that the signal ended."""
        super().__init__(f"stopped by {_name(number)}; saved at step {step}")


class StopRequest:
    """Whether, and by which signal, the run was asked to stop."""

    number: int | None = None
    exporting = False
    """Whether the result is being written already."""
    _since = 0.0

    def reached(self, step: int) -> bool:
        """Whether to stop after this step; all processes answer alike.

        JAX takes SIGTERM itself where there are several processes.
        """
        if jax.process_count() == 1:
            return self.number is not None
        return multihost_utils.reached_preemption_sync_point(step)

    def _receive(self, number: int, _frame: object) -> None:
        now = time.monotonic()
        if self.number is not None:
            # Launchers pass on what the terminal has sent to all processes already.
            if now - self._since < _SAME_REQUEST_SECONDS:
                return
            _say(f"{_name(number)} again: stopping at once")
            # Whatever is being written appears only when it is whole.
            os._exit(128 + number)
        self.number, self._since = number, now
        if self.exporting:
            what = "the result is written, then the run ends"
        else:
            what = "the run is saved after this step"
        _say(f"{_name(number)}: {what}; once more stops at once")


@contextlib.contextmanager
def stop_signals() -> Iterator[StopRequest]:
    """What the first SIGTERM or Ctrl-C sets; the second one ends the process.

    Signals are taken in the main thread alone; elsewhere they are not ours to take.
    """
    stop = StopRequest()
    main = threading.current_thread() is threading.main_thread()
    if not main or jax.process_count() > 1:
        yield stop
        return
    before = {number: signal.signal(number, stop._receive) for number in _SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def follow_parent(index: int, count: int) -> None:
    """To be called in a worker process: leaves signals to the parent, and ends with it.

    A terminal sends Ctrl-C to all processes, and the parent still needs data for its last step.
    """
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    # A signal may come while another write to sys.stderr is under way.
    with contextlib.suppress(OSError):
        os.write(2, f"\ndiffusax: {text}\n".encode())
