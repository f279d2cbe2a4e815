"""Devices as a mesh, and where arrays lie on it.

Two axes: "data" holds copies of the parameters, "fsdp" splits them (Zhao et al. 2023; ZeRO stage 3,
Rajbhandari et al. 2020). A batch is split over both.
"""

import os
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

BATCH_AXES = ("data", "fsdp")
# Splitting smaller arrays costs more in messages than it saves in memory.
MIN_SHARDED_SIZE = 2**14


def start_processes() -> None:
    """Joins the other processes of a run; before anything else is done with JAX.

    JAX finds them on TPU pods and under Slurm (see `jax.distributed.initialize`); elsewhere the
    variables JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID
    say where they are. On CPUs they talk through gloo.

    Raises:
        ValueError: only some of the variables are set.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = [os.environ.get(name) for name in names]
    if not any(values):
        jax.distributed.initialize()
    elif not all(values):
        raise ValueError(f"{', '.join(names)} must be set together (got {values})")
    else:
        address, count, index = values
        jax.distributed.initialize(address, int(str(count)), int(str(index)))


def make_mesh(fsdp: int = 1, *, devices: Any = None) -> Mesh:
    """All devices (or `devices`), `fsdp` of which share one copy of the parameters; -1 is all.

    Raises:
        ValueError: the number of devices is not divisible by fsdp.
    """
    devices = jax.devices() if devices is None else list(devices)
    fsdp = len(devices) if fsdp == -1 else fsdp
    if fsdp < 1 or len(devices) % fsdp:
        raise ValueError(
            f"fsdp must divide the number of devices, {len(devices)} (got {fsdp}); -1 takes all"
        )
    return Mesh(np.asarray(devices).reshape(-1, fsdp), BATCH_AXES)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The first axis over all devices."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """A copy on every device."""
    return NamedSharding(mesh, PartitionSpec())


def param_sharding(mesh: Mesh, shape: tuple[int, ...]) -> NamedSharding:
    """The largest axis that "fsdp" divides is split; small arrays are copied."""
    parts = mesh.shape["fsdp"]
    divisible = [i for i, n in enumerate(shape) if n % parts == 0]
    if parts == 1 or not divisible or np.prod(shape) < MIN_SHARDED_SIZE:
        return replicated(mesh)
    axis = max(divisible, key=lambda i: shape[i])
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "fsdp"))


def tree_sharding(mesh: Mesh, tree: Any) -> Any:
    """`param_sharding` for each array (or shape) of a tree."""
    return jax.tree.map(lambda x: param_sharding(mesh, x.shape), tree)


def put_batch(mesh: Mesh, batch: Any) -> Any:
    """This process's part of a batch as an array of the whole batch over the mesh."""
    sharding = batch_sharding(mesh)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)


def gather(mesh: Mesh, tree: Any) -> Any:
    """The whole tree as NumPy arrays, on every process; all of them must call it."""
    whole = jax.jit(lambda x: x, out_shardings=replicated(mesh))(tree)
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), whole)
