"""A run's averages on disk, as they were every so many steps.

Each is a safetensors file. Its tensors have the component's name before their own in checkpoints.
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from safetensors import SafetensorError, safe_open

from diffusax.checkpoints.tensors import TensorFile, write_tensors
from diffusax.checkpoints.tree import checkpoint_name, params_to_tensors, to_flax
from diffusax.models.network import Params
from diffusax.runtime.devices.mesh import to_host
from diffusax.training.ema.update import EMAConfig, EMAState

AVERAGES = "averages"
"""The folder of the averages inside the run's."""

# One value, so that the same average is the same bytes.
_FACTS = "average"
_NAME = re.compile(r"(\d{7,})-[\d.]+\.safetensors")


class Snapshot(NamedTuple):
    """One stored average."""

    path: Path
    step: int
    """The step of the run."""
    start: int
    """The step after which averaging began."""
    updates: int
    """The number of the average's updates."""
    length: float
    """The width sigma_rel of the average."""
    recipe: str
    """The name of the run's recipe."""


def write_snapshots(
    folder: Path, step: int, state: EMAState, config: EMAConfig, *, start: int, recipe: str
) -> None:
    """Writes each average to a file, which appears only when whole; all processes must call it.

    An average that was not updated yet has no profile and is left out.

    Raises:
        OSError: a file cannot be written; names it and says why.
    """
    updates = int(to_host(state.updates))
    if not updates:
        return
    for length, average in zip(config.lengths, state.averages, strict=True):
        params = jax.tree.map(lambda x: x.astype(config.snapshot_dtype), to_host(average))
        if jax.process_index():
            continue
        facts = {
            "step": step,
            "start": start,
            "updates": updates,
            "length": length,
            "recipe": recipe,
        }
        folder.mkdir(exist_ok=True)
        write_tensors(
            folder / f"{step:07}-{length:g}.safetensors",
            params_to_tensors(params),
            metadata={_FACTS: json.dumps(facts)},
        )


def read_snapshots(folder: Path) -> list[Snapshot]:
    """Reads the averages in a folder in the order of their steps; only the headers of the files.

    Raises:
        ValueError: there are no averages, or a file is not an average.
    """
    files = sorted(_files(folder))
    if not files:
        raise ValueError(
            f"{folder} holds no stored averages; a run with ema.rule=power writes them there"
        )
    return [_read(file) for file in files]


def remove_snapshots_after(folder: Path, step: int) -> None:
    """Removes what an earlier attempt of the run wrote after a step or did not finish writing."""
    for path in [*_files(folder), *folder.glob("*.partial")]:
        if path.suffix == ".partial" or int(path.name.split("-")[0]) > step:
            path.unlink(missing_ok=True)


def combine(snapshots: Sequence[Snapshot], weights: np.ndarray, shapes: Params) -> Params:
    """Computes the sum of stored averages, tensor by tensor, in float32.

    shapes: the parameter tree as shapes.

    Raises:
        ValueError: a file has other tensors.
    """
    files = [TensorFile(snapshot.path) for snapshot in snapshots]

    def one(path: tuple[Any, ...], shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = checkpoint_name(path)
        total = np.zeros((), np.float32)
        for file, weight in zip(files, weights, strict=True):
            entry = file.entries.get(name)
            if entry is None:
                raise ValueError(f"{file.path} has no {name}; it is of another run")
            total = total + np.float32(weight) * file.view(entry).astype(np.float32)
            file.release(entry)
        found = to_flax(np.asarray(total), path)
        if found.shape != shape.shape:
            raise ValueError(f"{name} in {file.path} has shape {found.shape}, not {shape.shape}")
        return np.ascontiguousarray(found)

    return jax.tree_util.tree_map_with_path(one, shapes)


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.glob("*.safetensors") if _NAME.fullmatch(path.name)]


def _read(path: Path) -> Snapshot:
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads(file.metadata()[_FACTS])
        step, start, updates = (int(facts[name]) for name in ("step", "start", "updates"))
        return Snapshot(path, step, start, updates, float(facts["length"]), facts["recipe"])
    except (SafetensorError, OSError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no stored average ({error}); remove it") from None
