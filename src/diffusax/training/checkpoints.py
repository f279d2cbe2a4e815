"""A run on disk, with Orbax: the state, the position in the data, the last few steps."""

import contextlib
import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from diffusax.extras import require_extra
from diffusax.training.step import TrainState

# What Orbax writes besides the arrays, generously.
_SPARE_BYTES = 2**20


class Checkpoints:
    """The checkpoints in a folder, one per process group; written in the background.

    A checkpoint appears under its step only when it is whole, so one that was being written when
    the run was killed is never taken for one.
    """

    def __init__(self, folder: Path, *, keep: int):
        """keep: how many to keep; older ones are deleted once a newer one is whole."""
        self._ocp = require_extra("orbax.checkpoint", "train")
        self.folder = folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        options = self._ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = self._ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        """The step of the last whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Begins to write the state after `step`; waits for the one before to be finished.

        position: of this process in its data.

        Raises:
            OSError: the disk is full, now or while the one before was written. The last whole
                checkpoint is untouched.
        """
        with self._disk_errors(step):
            self._manager.wait_until_finished()
            self._check_space(state)
            facts = {"averaged": state.ema is not None, "processes": _of_all_processes(position)}
            self._manager.save(
                step,
                args=self._ocp.args.Composite(
                    state=self._ocp.args.StandardSave(state),
                    facts=self._ocp.args.JsonSave(facts),
                ),
                force=True,
            )

    def restore(
        self, step: int, like: Callable[[bool], TrainState]
    ) -> tuple[TrainState, dict[str, Any]]:
        """The state after `step`, and this process's position in its data.

        like: shapes with shardings, for a state with an average or without.

        Raises:
            ValueError: it was written by another number of processes.
        """
        args = self._ocp.args
        facts = self._manager.restore(step, args=args.Composite(facts=args.JsonRestore()))["facts"]
        positions = facts["processes"]
        if len(positions) != jax.process_count():
            raise ValueError(
                f"the run in {self.folder} had {len(positions)} processes and now has "
                f"{jax.process_count()}, so its position in the data is of no use; start it again "
                "with as many, or with another output folder"
            )
        restore = args.StandardRestore(like(facts["averaged"]))
        state = self._manager.restore(step, args=args.Composite(state=restore))["state"]
        return state, positions[jax.process_index()]

    def finish(self) -> None:
        """Waits until everything is written."""
        with self._disk_errors(None):
            self._manager.wait_until_finished()
        self._manager.close()

    def _check_space(self, state: TrainState) -> None:
        """Fails before writing what cannot fit: a half-written file would fill the disk."""
        local = [s.data.nbytes for x in jax.tree.leaves(state) for s in x.addressable_shards[:1]]
        needed, free = sum(local) + _SPARE_BYTES, shutil.disk_usage(self.folder).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"{needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free")

    @contextlib.contextmanager
    def _disk_errors(self, step: int | None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            text = str(error)
            full = getattr(error, "errno", None) == errno.ENOSPC or any(
                words in text for words in ("No space left", "Disk quota")
            )
            if not full:
                raise
            what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            raise OSError(
                errno.ENOSPC,
                f"{what} could not be written to {self.folder}, the disk is full ({text}); the "
                f"last whole one, of step {self.latest()}, is untouched: make room and start again",
            ) from error


def _of_all_processes(position: dict[str, Any]) -> list[dict[str, Any]]:
    """Every process's position; one process writes them all."""
    if jax.process_count() == 1:
        return [position]
    text = np.frombuffer(json.dumps(position).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(len(text)))
    padded = np.pad(text, (0, int(sizes.max()) - len(text)))
    rows = multihost_utils.process_allgather(padded)
    texts = [row[:size].tobytes() for row, size in zip(rows, sizes)]
    return [json.loads(text) for text in texts]
