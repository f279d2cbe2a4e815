"""Stops training when a signal asks for it."""

import contextlib
from collections.abc import Iterator

import jax
from jax.experimental import multihost_utils

from diffusax.runtime.signals import StopRequest, receiving, signal_name


class Preempted(Exception):
    """A signal stopped the run; the state was saved if there was one."""

    def __init__(self, number: int, step: int):
        """Takes the signal's number, and the step of the saved state, 0 if there is none."""
        self.exit_code = 128 + number
        """The exit code of a process that the signal ended."""
        saved = (
            f"; saved at step {step}" if step else " before the first step, with nothing to save"
        )
        super().__init__(f"stopped by {signal_name(number)}{saved}")


class Interrupted(Exception):
    """A signal came while no step was running."""

    def __init__(self, number: int):
        """Takes the signal's number."""
        self.exit_code = 128 + number
        super().__init__(signal_name(number))


class TrainingStop(StopRequest):
    """A request to stop that all processes of a run answer at the same step."""

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
        """Lets a signal interrupt what happens inside the context, which is between two steps.

        Raises:
            Interrupted: a signal came, inside the context or before it.
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
        """Returns whether to stop after this step.

        With several processes, JAX itself receives SIGTERM.
        """
        if jax.process_count() == 1:
            return self.number is not None
        return multihost_utils.reached_preemption_sync_point(step)


@contextlib.contextmanager
def stop_signals() -> Iterator[TrainingStop]:
    """Yields the request that the first SIGTERM or Ctrl-C makes; a second ends the process."""
    stop = TrainingStop()
    with contextlib.nullcontext() if jax.process_count() > 1 else receiving(stop):
        yield stop
