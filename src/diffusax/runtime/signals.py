"""Signals that ask a run to stop: SIGTERM and Ctrl-C."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_SAME_REQUEST_SECONDS = 1.0


class StopRequest:
    """Whether, and by which signal, a run was asked to stop."""

    number: int | None = None
    _since = 0.0

    def __init__(self, answer: str):
        """answer: what is done about it, for the terminal; may change while the run goes on."""
        self.answer = answer

    def receive(self, number: int, _frame: object) -> None:
        """Notes a signal; the second one ends the process."""
        now = time.monotonic()
        if self.number is not None:
            # Launchers pass on what the terminal has sent to all processes already.
            if now - self._since < _SAME_REQUEST_SECONDS:
                return
            _say(f"{signal_name(number)} again: stopping at once")
            # Whatever is being written appears only when it is whole.
            os._exit(128 + number)
        self.number, self._since = number, now
        _say(f"{signal_name(number)}: {self.answer}; once more stops at once")


@contextlib.contextmanager
def receiving(stop: StopRequest) -> Iterator[None]:
    """Hands the signals that ask to stop to the request.

    Signals are taken in the main thread alone; elsewhere they are not ours to take.
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
    """What a person calls the signal."""
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def _say(text: str) -> None:
    # A signal may come while another write to sys.stderr is under way.
    with contextlib.suppress(OSError):
        os.write(2, f"\ndiffusax: {text}\n".encode())
