"""TPUs that are not here: their compiler runs without them, and says what a program will take."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from diffusax.extras import require_extra
from diffusax.runtime.mesh import AXES, make_mesh, parse_mesh


class Chip(NamedTuple):
    """What one device can do, by its maker's data sheet."""

    tflops: float
    """Peak TFLOP/s in bfloat16."""
    memory: float
    """GB of high-bandwidth memory."""
    bandwidth: float
    """GB/s of that memory."""


CHIPS = {
    "TPU v4": Chip(275, 32, 1228),
    "TPU v5 lite": Chip(197, 16, 819),
    "TPU v5": Chip(459, 95, 2765),
    "TPU v6 lite": Chip(918, 32, 1640),
}
"""By JAX's `device_kind`. Source: cloud.google.com/tpu/docs, the page of each version."""


def topology_mesh(topology: str, mesh: str | None = None) -> Mesh:
    """A mesh of TPUs that need not be there, to compile for.

    Args:
        topology: version and layout, such as "v5e:2x2", "v4:2x2x4" or "v6e:4x4".
        mesh: as for `make_mesh`; one with fewer devices than the topology takes the first.

    Raises:
        ValueError: there is no such topology, or the mesh does not fit it.
        ImportError: libtpu is not installed; names the extra.
    """
    require_extra("libtpu", "tpu")
    with _without_a_host():
        try:
            found: Any = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **_chip_config(topology)
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"topology {topology!r} is not one that libtpu knows: {reason}"
            ) from None
    devices = list(found.devices)
    sizes = parse_mesh(mesh or "")
    if sizes and -1 not in sizes.values() and "data" in sizes:
        devices = devices[: math.prod(sizes.get(axis, 1) for axis in AXES)]
    return make_mesh(sizes, devices=devices)


def _chip_config(topology: str) -> dict[str, str]:
    """JAX takes the two cores of a v4 chip for one device, which libtpu's default does not."""
    return {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}


class DoesNotFitError(ValueError):
    """A program takes more memory than a device has; the message says how much."""


def compile_there(
    lowered: jax.stages.Lowered, *, effort: float | None = -1.0
) -> jax.stages.Compiled:
    """Compiles a program for devices of a topology, or for those that are here.

    Args:
        lowered: the program.
        effort: XLA's for a short execution time, from -1 to 1; None is that of real runs. The
            least takes a small part of the time, and gives the same operations and about the same
            memory.

    Raises:
        DoesNotFitError: their memory does not hold it.
    """
    options: Any = None if effort is None else {"exec_time_optimization_effort": effort}
    try:
        return lowered.compile(options)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise DoesNotFitError(" ".join(str(error).split())[:200]) from None


@contextlib.contextmanager
def _without_a_host() -> Iterator[None]:
    """Keeps libtpu from asking a cloud machine's metadata server, and from claiming a TPU."""
    variables = {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Cost(NamedTuple):
    """What a compiled program takes on each device. Loops count once, however often they run."""

    tflop: float
    """10^12 floating-point operations."""
    moved: float
    """GB read from and written to the device's memory."""
    arguments: float
    """GB of arguments, parameters among them."""
    temporaries: float
    """GB besides arguments and results while it runs."""
    code: float
    """GB of the program itself."""
    peak: float
    """GB of arguments, results, temporaries and code together."""

    def fits(self, chip: Chip) -> bool:
        """Whether the chip's memory holds the peak."""
        return self.peak <= chip.memory

    def seconds(self, chip: Chip) -> float:
        """The time that the chip needs at least: to compute, or to move, whichever is longer."""
        return max(self.tflop / chip.tflops, self.moved / chip.bandwidth)


def cost_of(compiled: jax.stages.Compiled) -> Cost:
    """What XLA says of an executable; memory that it does not tell counts nothing."""
    analysis: Any = compiled.cost_analysis() or {}
    memory: Any = compiled.memory_analysis()

    def gigabytes(name: str) -> float:
        return getattr(memory, f"{name}_size_in_bytes", 0) / 1e9

    arguments, temporaries = gigabytes("argument"), gigabytes("temp")
    results = gigabytes("output") - gigabytes("alias")
    code = gigabytes("generated_code")
    return Cost(
        analysis.get("flops", 0) / 1e12,
        analysis.get("bytes accessed", 0) / 1e9,
        arguments,
        temporaries,
        code,
        arguments + results + temporaries + code,
    )
