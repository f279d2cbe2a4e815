"""How much memory there is: of this machine, and of a device."""

import os
from pathlib import Path

import jax

# A container's own limit, of cgroups version 2 and 1.
_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


def host_memory() -> int | None:
    """Bytes of this machine's memory, or of its container's where that has fewer.

    None where the machine does not tell.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
    return min([total, *filter(None, map(_limit, _LIMITS))])


def device_memory(device: jax.Device) -> int | None:
    """Bytes of a device that programs can use; the CPU devices of a process share the machine's.

    None where it is not known.
    """
    if device.platform == "cpu":
        total = host_memory()
        return total and total // jax.local_device_count("cpu")
    stats = device.memory_stats() or {}
    return stats.get("bytes_limit")


def _limit(file: Path) -> int | None:
    """The number in the file; there is none where a container is not limited."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
