"""The processes of a run: how they find each other, and what they tell each other."""

import json
import os
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils


def initialize(heartbeat_seconds: int = 30) -> None:
    """Joins the other processes of a run; call it before using JAX otherwise.

    JAX finds them on TPU pods and under Slurm (see `jax.distributed.initialize`); elsewhere the
    variables JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES and JAX_PROCESS_ID
    say where they are. On CPUs they communicate by gloo. Each process generates its own images.

    Args:
        heartbeat_seconds: the time without a sign of a process after which the others end with an
            error.

    Raises:
        ValueError: only some of the variables are set.
    """
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    values = [os.environ.get(name) for name in names]
    options: dict[str, Any] = {"heartbeat_timeout_seconds": heartbeat_seconds}
    if not any(values):
        jax.distributed.initialize(**options)
    elif not all(values):
        raise ValueError(f"{', '.join(names)} must be set together (got {values})")
    else:
        address, count, index = values
        jax.distributed.initialize(address, int(str(count)), int(str(index)), **options)


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
