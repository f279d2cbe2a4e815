"""Measures the memory of this machine and of a device."""

import contextlib
import ctypes
import functools
import gc
import math
import os
from pathlib import Path
from typing import Any

import jax

# The files with a container's own limit, in cgroups version 2 and 1.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


_FOUR_BITS = ("int4", "uint4")


@functools.cache
def host_memory() -> int | None:
    """Returns the bytes of this machine's memory, or of its container's if that has fewer.

    Returns None if the machine does not tell.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return min([total, *filter(None, map(_limit, _LIMITS))])


def device_memory(device: jax.Device) -> int | None:
    """Returns the bytes that programs can use on a device; CPU devices share the machine's.

    Returns None if it is not known.
    """
    if device.platform == "cpu":
        total = host_memory()
        return total and total // jax.local_device_count("cpu")
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def array_bytes(x: Any, place: Any = None) -> int:
    """Returns the bytes of an array, or of its part on each device of a sharding.

    Two numbers of four bits share a byte, but on CPUs and in NumPy's arrays.

    Args:
        x: an array, or its shape.
        place: the sharding.
    """
    shape = x.shape if place is None else place.shard_shape(x.shape)
    count = math.prod(shape) * x.dtype.itemsize
    if x.dtype.name not in _FOUR_BITS:
        return count
    devices = getattr(place or getattr(x, "sharding", None), "device_set", None)
    packs = devices and next(iter(devices)).platform != "cpu"
    return -(-count // 2) if packs else count


def return_memory() -> None:
    """Collects garbage, and gives memory that is free back to the system where glibc does so."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _limit(file: Path) -> int | None:
    """Reads the number in the file; returns None if the container has no limit."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an error says that the device's memory is used up."""
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error)
