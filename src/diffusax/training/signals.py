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
    """A signal asked the run to stop; the state has been saved."""

    def __init__(self, number: int, step: int):
        """number: of the signal. step: that the saved state has reached."""
        self.exit_code = 128 + number
        """As of a process that the signal ended."""
        super().__init__(f"stopped by {signal_name(number)}; saved at step {step}")


class TrainingStop(StopRequest):
    """A request to stop that all processes of a run answer alike."""

    def __init__(self) -> None:
        super().__init__("the run is saved after this step")

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
