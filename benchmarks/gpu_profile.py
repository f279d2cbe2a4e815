"""The slowest kernels of a trace, such as those that gpu.py --profile writes into a folder."""

import collections
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jax.profiler import ProfileData


class Slow(NamedTuple):
    """A kernel by its name, or on CPUs an operation."""

    name: str
    seconds: float
    calls: int


def slowest(folder: Path, count: int = 20) -> list[Slow]:
    """The kernels of the newest trace below a folder that take most time, all calls together."""
    files = sorted(folder.rglob("*.xplane.pb"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise ValueError(f"{folder} holds no trace (*.xplane.pb)")
    times: dict[str, list[float]] = collections.defaultdict(list)
    for name, nanoseconds in _events(ProfileData.from_file(str(files[-1]))):
        times[name].append(nanoseconds / 1e9)
    found = [Slow(name, sum(seconds), len(seconds)) for name, seconds in times.items()]
    return sorted(found, key=lambda slow: -slow.seconds)[:count]


def _events(data: ProfileData) -> Iterator[tuple[str, float]]:
    """Names and durations of the kernels on the streams of GPUs, or of operations on CPUs."""
    planes = list(data.planes)
    gpus = [plane for plane in planes if plane.name.startswith("/device:GPU")]
    for plane in gpus or planes:
        for line in plane.lines:
            # Other lines of a GPU tell of the same time by operations and modules.
            if gpus and not line.name.startswith("Stream"):
                continue
            for event in line.events:
                # On CPUs what XLA runs knows its operation; the rest is Python's.
                if gpus or any(name == "hlo_op" for name, _ in event.stats):
                    yield event.name, event.duration_ns


def print_slowest(folder: Path) -> None:
    """Prints the twenty slowest kernels."""
    for slow in slowest(folder):
        time = f"{1e3 * slow.seconds:10.3f} ms {slow.calls:7} calls"
        print(f"  {time}  {slow.name[:100]}", flush=True)
