"""TPUs that are elsewhere: their compiler runs without them, and says what a program will take."""

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
    """The performance of one device, by its maker's data sheet."""

    tflops: float
    """The peak TFLOP/s in bfloat16."""
    memory: float
    """The GB of high-bandwidth memory."""
    bandwidth: float
    """The bandwidth of that memory in GB/s."""


CHIPS = {
    "TPU v4": Chip(275, 32, 1228),
    "TPU v5 lite": Chip(197, 16, 819),
    "TPU v5": Chip(459, 95, 2765),
    "TPU v6 lite": Chip(918, 32, 1640),
}
"""Chips by JAX's `device_kind`. Source: cloud.google.com/tpu/docs, the page of each version."""


def topology_mesh(topology: str, mesh: str | None = None) -> Mesh:
    """Makes a mesh of TPUs that may be elsewhere, to compile for.

    Args:
        topology: version and layout, such as "v5e:2x2", "v4:2x2x4" or "v6e:4x4".
        mesh: the shape as for `make_mesh`; if it has fewer devices, the first ones are taken.

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
    """Returns options by which libtpu treats the two cores of a v4 chip as one device, like JAX."""
    return {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}


class DoesNotFitError(ValueError):
    """A program takes more memory than a device has; the message says how much."""


def compile_there(
    lowered: jax.stages.Lowered, *, effort: float | None = -1.0
) -> jax.stages.Compiled:
    """Compiles a program for the devices of a topology, or for those of this machine.

    Args:
        lowered: the program.
        effort: XLA's effort for a short execution time, from -1 to 1; None is that of real runs.
            The least effort compiles much faster, and gives the same operations and about the same
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
    """What a compiled program takes on each device. A loop counts once, however often it runs."""

    tflop: float
    """The number of floating-point operations in 10^12."""
    moved: float
    """The GB read from and written to the device's memory."""
    arguments: float
    """The GB of arguments, which include the parameters."""
    temporaries: float
    """The GB besides arguments and results while it runs."""
    code: float
    """The GB of the program itself."""
    peak: float
    """The GB of arguments, results, temporaries and code together."""

    def fits(self, chip: Chip) -> bool:
        """Returns whether the chip's memory holds the peak."""
        return self.peak <= chip.memory

    def seconds(self, chip: Chip) -> float:
        """Returns the least time that the chip needs: to compute or to move, the longer of the
        two.
        """
        return max(self.tflop / chip.tflops, self.moved / chip.bandwidth)


def cost_of(compiled: jax.stages.Compiled) -> Cost:
    """Returns what XLA says of an executable; memory that it does not tell counts as 0."""
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
