"""Counting compilations, to show that a knob compiles nothing."""

import contextlib
import threading
from collections.abc import Iterator

import jax

from diffusax.runtime.compat import COMPILE_EVENT


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Within the context, every program compiled for this thread appends to what this yields."""
    compiled: list[str] = []
    active, thread = True, threading.get_ident()

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if active and event == COMPILE_EVENT and threading.get_ident() == thread:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        active = False
