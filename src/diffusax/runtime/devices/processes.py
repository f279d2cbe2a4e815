"""The processes of a run: how they find each other, and what they tell each other."""

import json
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

log = logging.getLogger(__name__)


def initialize(
    heartbeat_seconds: int = 30, *, local_device_ids: Sequence[int] | None = None
) -> None:
    """Joins the other processes of a run; call it before using JAX otherwise.

    JAX finds them on TPU pods and under Slurm (see `jax.distributed.initialize`), there also with
    JAX_COORDINATOR_ADDRESS (host:port of the first) alone; elsewhere that variable,
    JAX_NUM_PROCESSES and JAX_PROCESS_ID say where they are. On CPUs they communicate by gloo. Each
    process generates its own images.

    Args:
        heartbeat_seconds: the time without a sign of a process after which the others end with an
            error.
        local_device_ids: the numbers of the GPUs that this process uses. By default those of the
            variable JAX_LOCAL_DEVICE_IDS (0,1,2), under Slurm all of a node with one task, or else
            as many as JAX chooses: under Slurm and Open MPI one, with the task's number.

    Raises:
        ValueError: only some of the variables are set.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, count, index = (os.environ.get(name) for name in names)
    options: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat_seconds}
    own = gpus_of_task(os.environ) if local_device_ids is None else list(local_device_ids)
    if own is not None:
        options["local_device_ids"] = own
    if bool(count) != bool(index) or (count and not address):
        raise ValueError(f"{', '.join(names)} must be set together (got {[address, count, index]})")
    if address and not count:
        try:
            jax.distributed.initialize(address, **options)
        except ValueError as error:
            raise ValueError(
                f"JAX_NUM_PROCESSES and JAX_PROCESS_ID must be set with JAX_COORDINATOR_ADDRESS, "
                f"because there is no Slurm or TPU pod that says them (got {address!r}: {error})"
            ) from None
    elif address:
        jax.distributed.initialize(address, int(str(count)), int(str(index)), **options)
    else:
        jax.distributed.initialize(**options)


def gpus_of_task(environ: Mapping[str, str]) -> list[int] | None:
    """Returns the numbers of the GPUs of a node that Slurm gives to one task; None for JAX's own.

    JAX gives a task the one GPU that has the task's number on its node. Where there are fewer tasks
    than GPUs, and more than one, a warning says so.
    """
    counts = [environ.get(name, "") for name in _SLURM]
    if "JAX_LOCAL_DEVICE_IDS" in environ or not all(count.isdigit() for count in counts):
        return None
    gpus, tasks, nodes = map(int, counts)
    if visible := environ.get("CUDA_VISIBLE_DEVICES"):
        gpus = min(gpus, len(visible.split(",")))
    if tasks == nodes:
        return list(range(gpus)) if gpus > 1 else None
    if gpus * nodes > tasks:
        log.warning(
            "each of the %d tasks uses one of the %d GPUs of its node; set JAX_LOCAL_DEVICE_IDS "
            "(such as 0,1) for each, or start one task for each node or for each GPU",
            *(tasks, gpus),
        )
    return None


_SLURM = ("SLURM_GPUS_ON_NODE", "SLURM_NTASKS", "SLURM_STEP_NUM_NODES")
"""Slurm's numbers of a job step: GPUs on this node, tasks, and nodes."""


def of_all_processes(value: Any) -> list[Any]:
    """Returns what each process gives, in their order; all of them must call it, and wait for it.

    value: what JSON can hold, which goes from process to process as a text.
    """
    if jax.process_count() == 1:
        return [value]
    text = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.pad(text, (0, int(sizes.max()) - len(text)))
    rows = multihost_utils.process_allgather(padded)
    return [json.loads(row[:size].tobytes()) for row, size in zip(rows, sizes, strict=True)]
