"""How much compiled programs may take, and what is released when they take more.

On CPUs every program takes memory maps, of which Linux gives a process 65,530; XLA ends the process
when they are used up. Elsewhere a program's code takes the device's memory.
"""

import functools
import gc
import logging
import math
import weakref
from pathlib import Path
from typing import Any

import jax

from diffusax.runtime.devices.memory import device_memory

log = logging.getLogger(__name__)

ALL: weakref.WeakSet[Any] = weakref.WeakSet()
"""Every `Program` of the process."""

_MAPS = 1 / 2
"""The part of a process's memory maps that may be in use."""
_MEMORY = 1 / 16
"""The part of a device's memory that the programs' code may take."""
_BYTES = 2**30
"""The number of bytes, if the device does not tell how much memory it has."""
ENOUGH = 3 / 4
"""The part of the limit to leave; less than all makes the search for the oldest rare."""


def make_room() -> None:
    """Releases what JAX has compiled while it takes more than its limit, the longest unused first.

    If that is not enough, it clears JAX's own caches, which hold the programs of all other jitted
    functions of the process.
    """
    if _fullness() <= 1:
        return
    dropped = 0
    while _fullness() > ENOUGH and (count := _drop_oldest()):
        dropped += count
        gc.collect()
    log.info("let go of the programs of %d shapes, which were not used for longest", dropped)
    if _fullness() > 1:
        jax.clear_caches()
        gc.collect()
        log.info("cleared all of JAX's caches of compiled programs")


def _fullness() -> float:
    return fullness(sum(size for program in list(ALL) for _, _, size in program.uses()))


def _drop_oldest() -> int:
    """Releases a quarter of what JAX has compiled for calls, and returns the number of shapes."""
    uses = [(used, program, shape) for program in list(ALL) for shape, used, _ in program.uses()]
    uses.sort(key=lambda use: use[0])
    oldest = uses[: math.ceil(len(uses) / 4)]
    for _, program, shape in oldest:
        program.release(shape)
    return len(oldest)


def fullness(code: int) -> float:
    """Returns what programs take, as a part of their limit. code: the bytes of their code."""
    return code / _byte_limit() if counts_bytes() else memory_maps() / _map_limit()


def counts_bytes() -> bool:
    """Returns whether programs take a device's memory, and not this process's memory maps."""
    return jax.default_backend() != "cpu"


def code_bytes(compiled: jax.stages.Compiled) -> int:
    """Returns the size of an executable's code."""
    memory: Any = compiled.memory_analysis()
    return getattr(memory, "generated_code_size_in_bytes", 0)


def memory_maps() -> int:
    """Returns the number of this process's memory maps; 0 if the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


@functools.cache
def _map_limit() -> float:
    """Returns the number of memory maps that may be in use."""
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text()) * _MAPS
    except (OSError, ValueError):
        return math.inf


@functools.cache
def _byte_limit() -> float:
    """Returns the number of bytes of a device's memory that the code of programs may take."""
    memory = device_memory(jax.local_devices()[0])
    return _BYTES if memory is None else memory * _MEMORY
