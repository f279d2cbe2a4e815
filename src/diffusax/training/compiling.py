"""Compiles in a thread, so that signals are answered: XLA cannot be interrupted."""

import atexit
import concurrent.futures
import os
import sys
import threading
from collections.abc import Callable

import jax

from diffusax.runtime.devices.topology import compile_there

_TICK_SECONDS = 0.5


def compile_in_background(
    lowered: jax.stages.Lowered, tick: Callable[[], None]
) -> jax.stages.Compiled:
    """Compiles a program in a thread of its own, while this one waits and answers signals.

    Args:
        lowered: the program.
        tick: a function that is called twice in a second. If it raises an error, the wait ends, and
            the process can then end without waiting for the compiler.

    Raises:
        DoesNotFitError: the compiler finds that the devices' memory does not hold the program.
    """
    future: concurrent.futures.Future[jax.stages.Compiled] = concurrent.futures.Future()

    def work() -> None:
        try:
            future.set_result(compile_there(lowered, effort=None))
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=work, name="compile", daemon=True)
    thread.start()
    try:
        while not concurrent.futures.wait([future], _TICK_SECONDS).done:
            tick()
    except BaseException as error:
        atexit.register(_leave, thread, getattr(error, "exit_code", 1))
        raise
    return future.result()


def _leave(thread: threading.Thread, code: int) -> None:
    """Ends the process while the thread still compiles, where Python itself would abort."""
    if not thread.is_alive():
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)
