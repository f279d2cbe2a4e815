"""The memory of the host and of the devices, in bytes."""

import os
import resource
import sys
from typing import Any


def host_memory() -> dict[str, int]:
    """Returns how much memory this process uses, and how much the machine has and has free."""
    page = os.sysconf("SC_PAGE_SIZE")
    return {
        "free": os.sysconf("SC_AVPHYS_PAGES") * page,
        "used": resident_memory(),
        "total": os.sysconf("SC_PHYS_PAGES") * page,
    }


def resident_memory() -> int:
    """Returns how much memory this process uses."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        # The most that it ever was; kilobytes on Linux, bytes on macOS.
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def device_memory() -> dict[str, Any]:
    """Returns how much memory of the first device is used, or why that is not known."""
    import jax

    stats = jax.local_devices()[0].memory_stats()
    if not stats:
        return {"error": "the device does not tell"}
    used, total = stats.get("bytes_in_use", 0), stats.get("bytes_limit", 0)
    return {"system": {"free": total - used, "used": used, "total": total}}
