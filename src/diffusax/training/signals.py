"""What training does about signals that ask it to stop."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from diffusax.runtime.signals import STOP_SIGNALS, StopRequest, receiving, signal_name


class Preempted(Exception):
    """A signal asked the run to stop; the state has been saved, if there was one."""

    def __init__(self, number: int, step: int):
        """number: of the signal. step: that the saved state has reached; at 0 there is none."""
        self.exit_code = 128 + number
        """As of a process that the signal ended."""
        saved = (
            f"; saved at step {step}" if step else " before the first step, with nothing to save"
        )
        super().__init__(f"stopped by {signal_name(number)}{saved}")


class Interrupted(Exception):
    """A signal asked to stop where no step is under way."""

    def __init__(self, number: int):
        """number: of the signal."""
        self.exit_code = 128 + number
        super().__init__(signal_name(number))


class TrainingStop(StopRequest):
    """A request to stop that all processes of a run answer alike."""

    def __init__(self) -> None:
        super().__init__("the run is saved after this step")
        self._at_once = False

    def receive(self, number: int, frame: object) -> None:
        """Notes a signal; the second one ends the process."""
        super().receive(number, frame)
        if self._at_once:
            self.check()

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, between two steps, a signal interrupts what goes on; one before it already has.

        Raises:
            Interrupted: there was a signal.
        """
        answer, self.answer, self._at_once = self.answer, "the run ends", True
        try:
            self.check()
            yield
            self.check()
        finally:
            self.answer, self._at_once = answer, False

    def check(self) -> None:
        """Raises Interrupted if there was a signal."""
        if self.number is not None:
            raise Interrupted(self.number)

    def reached(self, step: int) -> bool:
        """Whether to stop after this step.

        JAX takes SIGTERM itself where there are several processes.
        """
        if jax.process_count() == 1:
            return self.number is not None
        return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def stop_signals() -> Iterator[TrainingStop]:
    """What the first SIGTERM or Ctrl-C sets; the second one ends the process."""
    stop = TrainingStop()
    with contextlib.nullcontext() if jax.process_count() > 1 else receiving(stop):
        yield stop


def follow_parent(index: int, count: int) -> None:
    """To be called in a worker process: leaves signals to the parent, and ends with it.

    A terminal sends Ctrl-C to all processes, and the parent still needs data for its last step.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
