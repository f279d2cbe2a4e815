"""Receives the signals that ask a run to stop: SIGTERM and Ctrl-C."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Whether a run was asked to stop, and by which signal."""

    number: int | None = None
    _since = 0.0

    def __init__(self, answer: str):
        """Starts without a signal. answer: the reaction to print, which may change."""
        self.answer = answer

    def receive(self, number: int, _frame: object) -> None:
        """Notes a signal; the second one ends the process."""
        now = time.monotonic()
        if self.number is not None:
            # Launchers pass on a signal that the terminal has already sent to all processes.
            if now - self._since < _SAME_REQUEST_SECONDS:
                return
            _say(f"{signal_name(number)} again: stopping at once")
            # Files that are being written appear only when they are whole.
            os._exit(128 + number)
        self.number, self._since = number, now
        _say(f"{signal_name(number)}: {self.answer}; once more stops at once")


@contextlib.contextmanager
def receiving(stop: StopRequest) -> Iterator[None]:
    """Sends the signals that ask to stop to the request, inside the context.

    Python delivers signals only in the main thread; in other threads this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, stop.receive) for number in STOP_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def signal_name(number: int) -> str:
    """Returns the name of the signal for people."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    # A signal may come during another write to sys.stderr.
    with contextlib.suppress(OSError):
        os.write(2, f"\ndiffusax: {text}\n".encode())
