"""Finds out whether a step fits into the devices' memory before it runs."""

import math
from typing import Any

import jax
from jax.sharding import Mesh

from diffusax.runtime.devices.memory import device_memory, host_memory
from diffusax.runtime.programs.cost import cost_of
from diffusax.runtime.programs.topology import DoesNotFitError
from diffusax.training.config import TrainConfig

_MEND = "use a smaller batch_size or a larger accumulate"


def check_arguments(config: TrainConfig, mesh: Mesh, state: Any, frozen: Any, batch: Any) -> None:
    """Raises an error, before any parameter is read, where the step's arguments alone do not fit.

    Args:
        config: the options of the run.
        mesh: the mesh of the devices.
        state: the training state as shapes with shardings.
        frozen: the frozen parameters as shapes with shardings.
        batch: a batch as shapes with shardings.

    Raises:
        DoesNotFitError: a device cannot hold its part of both, or this machine its part of a batch;
            names the batch size.
    """
    states, examples = bytes_on_device((state, frozen)), bytes_on_device(batch)
    available = device_memory(mesh.local_devices[0])
    own = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(batch))
    own //= jax.process_count()
    host = host_memory()
    if available is not None and states + examples > available:
        mend = "more devices on the mesh's axis fsdp" if states > available else _MEND
        raise DoesNotFitError(
            f"{_what(config)} cannot fit: parameters and optimizer take {_gb(states)} and the "
            f"examples of a batch {_gb(examples)} of each device's {_gb(available)}; use "
            f"{mend.removeprefix('use ')}"
        )
    if host is not None and own > host:
        raise DoesNotFitError(
            f"{_what(config)} cannot fit: the examples of a batch take {_gb(own)} of this "
            f"machine's {_gb(host)}; use a smaller batch_size"
        )


def check_step(
    config: TrainConfig, mesh: Mesh, compiled: jax.stages.Compiled, later: int = 0
) -> None:
    """Raises an error where the devices' memory does not hold a compiled step.

    Args:
        config: the options of the run.
        mesh: the mesh of the devices.
        compiled: the step.
        later: the number of bytes on each device that join the state during the run.

    Raises:
        DoesNotFitError: the step does not fit; gives the compiler's figures and the batch size.
    """
    needed, available = cost_of(compiled).peak * 1e9 + later, device_memory(mesh.local_devices[0])
    if available is None or needed <= available:
        return
    averages = f", {_gb(later)} of them for the averages that begin later" if later else ""
    raise DoesNotFitError(
        f"{_what(config)} cannot fit: the compiler says that the step needs {_gb(needed)} on each "
        f"device{averages}, and there are {_gb(available)}; {_MEND}"
    )


def does_not_fit(config: TrainConfig, error: Exception) -> DoesNotFitError:
    """Returns the error for one of the compiler, or of a device that had no memory left."""
    reason = " ".join(str(error).split())[:200]
    return DoesNotFitError(f"{_what(config)} cannot fit: {reason}; {_MEND}")


def bytes_on_device(tree: Any) -> int:
    """Returns the bytes that each device holds of a tree of arrays, or of shapes with shardings."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)
    )


def _what(config: TrainConfig) -> str:
    return f"batch_size={config.batch_size} with accumulate={config.accumulate}"


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
