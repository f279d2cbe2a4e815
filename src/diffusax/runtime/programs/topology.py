"""TPUs and GPUs that are elsewhere: their compilers run without them, and say what is taken."""

import contextlib
import math
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from diffusax.boundary.messages import install_command, require_extra
from diffusax.runtime.compat import effort_options
from diffusax.runtime.devices.chips import CARDS, Card, target_config
from diffusax.runtime.devices.lowering import compiler_options
from diffusax.runtime.devices.mesh import check_processes, make_mesh, parse_mesh
from diffusax.runtime.programs.cache import without_compilation_cache

_GPUS = re.compile(r"(?:(\d{1,9})x)?([a-z][a-z0-9\-]*)(?::(\d{1,9}))?")
_TPUS = re.compile(r"([a-z][a-z0-9]*):\d+(x\d+)+")
_MAX_HOSTS = 4096
_MAX_CARDS = 16
_ONE_CHIP = {"v4:1": "v4:2x2x1", "v5e:1": "v5e:2x2", "v5p:1": "v5p:2x2x1", "v6e:1": "v6e:2x2"}
"""The smallest slices that libtpu knows, of which one chip is taken."""


def topology_mesh(topology: str, mesh: str | None = None) -> Mesh:
    """Makes a mesh of TPUs or GPUs that may be elsewhere, to compile for.

    Args:
        topology: for TPUs version and layout, such as "v5e:2x2", "v4:2x2x4", "v6e:4x4" or
            "tpu7x:2x2x1", each chip of which is two devices, or "v5e:1" for one chip (also of v4,
            v5p and v6e); for GPUs a name of `CARDS` and the number of them, with the number of
            hosts before it if there are several: "h100:8", "2xh100:8". Without a number it is one
            card.
        mesh: the shape as for `make_mesh`; if it has fewer devices, the first ones are taken.

    Raises:
        ValueError: there is no such topology, or the mesh does not fit it or has images that
            processes would share (`check_processes`).
        ImportError: the compiler is not installed; names the extra.
    """
    name = topology.strip().lower()
    gpus = _GPUS.fullmatch(name)
    if gpus and gpus[2] in CARDS:
        hosts, each = int(gpus[1] or 1), int(gpus[3] or 1)
        if not (1 <= hosts <= _MAX_HOSTS and 1 <= each <= _MAX_CARDS):
            raise ValueError(
                f"topology must have 1 to {_MAX_CARDS} cards on each of 1 to {_MAX_HOSTS} hosts, "
                f"such as 2xh100:8 (got {topology!r})"
            )
        devices = _gpus(CARDS[gpus[2]], hosts, each)
    elif name in _ONE_CHIP:
        devices = _tpus(_ONE_CHIP[name])[:1]
    elif (tpus := _TPUS.fullmatch(name)) and tpus[1] not in CARDS:
        devices = _tpus(name)
    else:
        raise ValueError(
            f"topology must be one of {', '.join(CARDS)} with a number of cards, such as h100:8, "
            f"or a version and layout of TPUs, such as v5e:2x2 (got {topology!r})"
        )
    sizes = parse_mesh(mesh or "")
    if sizes and -1 not in sizes.values() and "data" in sizes:
        devices = devices[: math.prod(sizes.values())]
    made = make_mesh(sizes, devices=devices)
    check_processes(made)
    return made


def _tpus(topology: str) -> list[Any]:
    require_extra("libtpu", "tpu")
    with _variables(_WITHOUT_A_TPU):
        try:
            found: Any = topologies.get_topology_desc(
                platform="tpu", topology_name=topology, **_chip_config(topology)
            )
        except Exception as error:
            reason = " ".join(str(error).split())[:200]
            raise ValueError(
                f"topology {topology!r} is not one that libtpu knows: {reason}"
            ) from None
    return list(found.devices)


def _gpus(card: Card, hosts: int, each: int) -> list[Any]:
    try:
        with _variables({"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}):
            found: Any = topologies.get_topology_desc(
                platform="cuda", target_config=target_config(card), topology=f"1x{hosts}x{each}"
            )
    except NotImplementedError:
        raise ImportError(
            f"XLA's compiler for GPUs is needed here; install it with {install_command('gpu')}"
        ) from None
    return list(found.devices)


def _chip_config(topology: str) -> dict[str, Any]:
    """Returns options by which libtpu treats the two cores of a v4 chip as one device, like JAX,
    and eight chips of v5e or v6e as one host's, as in v5litepod-8 and v6e-8.
    """
    if topology in ("v5e:2x4", "v6e:2x4"):
        return {"chips_per_host_bounds": [2, 4, 1]}
    return {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}


class DoesNotFitError(ValueError):
    """A program takes more memory than a device has; the message says how much."""


def compile_there(
    lowered: jax.stages.Lowered,
    mesh: Mesh | None = None,
    *,
    effort: float | None = -1.0,
    streams: bool = False,
    **options: Any,
) -> jax.stages.Compiled:
    """Compiles a program for the devices of a topology, or for those of this machine.

    Args:
        lowered: the program.
        mesh: the devices; None for those of this machine.
        effort: XLA's effort for a short execution time, from -1 to 1; None is that of real runs.
            The least effort compiles much faster, and gives the same operations and about the same
            memory.
        streams: whether the program copies parameters from the host's memory while it computes.
        options: XLA's compiler options, besides those of all programs (`compiler_options`).

    Raises:
        DoesNotFitError: their memory does not hold it.
    """
    options = {**compiler_options(mesh, streams=streams), **options}
    if effort is not None:
        options |= effort_options(effort)
    # What is compiled for devices that are elsewhere cannot be read from the cache again.
    uncached = contextlib.nullcontext() if effort is None else without_compilation_cache()
    try:
        with uncached:
            return lowered.compile(options or None)
    except jax.errors.JaxRuntimeError as error:
        if not str(error).startswith("RESOURCE_EXHAUSTED"):
            raise
        raise DoesNotFitError(" ".join(str(error).split())[:200]) from None


_WITHOUT_A_TPU = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
"""Keeps libtpu from asking a cloud machine's metadata server, and from claiming a TPU."""


@contextlib.contextmanager
def _variables(changes: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while."""
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
