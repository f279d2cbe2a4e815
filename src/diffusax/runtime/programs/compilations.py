"""Counts compilations, to show that a changed argument compiles nothing."""

import contextlib
import threading
from collections.abc import Iterator

import jax

from diffusax.runtime.compat import COMPILE_EVENT


@contextlib.contextmanager
def count_compilations(*, every_thread: bool = False) -> Iterator[list[str]]:
    """Yields a list of the programs that this thread, or every one, compiles inside the context."""
    compiled: list[str] = []
    active, thread = True, threading.get_ident()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        counted = every_thread or threading.get_ident() == thread
        if active and counted and event == COMPILE_EVENT:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        active = False
