"""Saves and restores a run with Orbax: its state and its position in the data."""

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from diffusax.boundary.messages import require_extra
from diffusax.models.arranged import KernelOrder
from diffusax.runtime.devices.processes import of_all_processes
from diffusax.training.step.step import TrainState

log = logging.getLogger(__name__)

# A generous bound on what Orbax writes besides the arrays.
_SPARE_BYTES = 2**20


class Checkpoints:
    """The checkpoints in a folder, one per group of processes, written in the background.

    A checkpoint appears under its step only when it is whole, so one that was being written when
    the run was killed is never taken for one. Soon after, it gets the digests of its files, by
    which a later change is found.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        order: KernelOrder | None = None,
        average: str = "",
        alphas: Mapping[str, float] | None = None,
    ):
        """Opens the folder.

        Args:
            folder: the folder, made where it is missing.
            keep: the number of checkpoints to keep; older ones go once a newer one is whole.
            order: the order of kernels in the states; by default that of layers.
            average: what the run averages, in words; it can continue only with the same averages.
            alphas: the alphas of the run's adapters by their layers, which must be the same, too.
        """
        self._ocp = require_extra("orbax.checkpoint", "train")
        self.folder = folder.absolute()
        self.average, self.alphas = average, dict(alphas or {})
        self.order = order or KernelOrder((), 1)
        self.folder.mkdir(parents=True, exist_ok=True)
        options = self._ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._manager = self._ocp.CheckpointManager(self.folder, options=options)
        logging.getLogger("absl").addFilter(_already_said)
        self._sealing: threading.Thread | None = None
        self._closing = threading.Event()

    def steps(self) -> list[int]:
        """The steps of the whole checkpoints, in order."""
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: TrainState, position: dict[str, Any]) -> None:
        """Starts to write the state after `step`, once the checkpoint before is written.

        position: this process's position in its data.

        Raises:
            OSError: the disk is full, now or while the checkpoint before was written. The last
                whole checkpoint is untouched.
        """
        with self._disk_errors(step):
            self._manager.wait_until_finished()
            self._check_space(state)
            facts = {
                "averaged": state.ema is not None,
                "average": self.average,
                "alphas": self.alphas,
                "processes": of_all_processes(position),
                "leaves": _leaves(state),
                "kernel_parts": self.order.parts,
            }
            self._manager.save(
                step,
                args=self._ocp.args.Composite(
                    state=self._ocp.args.StandardSave(state),
                    facts=self._ocp.args.JsonSave(facts),
                ),
                force=True,
            )
        if jax.process_index() == 0:
            self._sealing = threading.Thread(target=self._seal, args=(step,), daemon=True)
            self._sealing.start()

    def restore(
        self, like: Callable[[bool], TrainState]
    ) -> tuple[int, TrainState, dict[str, Any]] | None:
        """Reads the last undamaged checkpoint.

        Damaged checkpoints are named in the log and moved to `damaged-STEP` beside this folder.

        Args:
            like: returns the state as shapes with shardings, with an average (True) or without.

        Returns:
            The step, the state and this process's position in its data; None without a checkpoint.

        Raises:
            ValueError: all checkpoints are damaged, or they were written by another number of
                processes, with other parameters, another optimizer, other averages or alphas.
        """
        damaged: list[int] = []
        for step in reversed(self.steps()):
            reason = self._damage(step)
            if reason is None:
                try:
                    state, position = self._restore(step, like)
                except _OfAnotherRun as error:
                    raise ValueError(f"{self.folder.parent} {error}") from None
                except Exception as error:
                    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
                else:
                    self._set_aside(damaged)
                    return step, state, position
            damaged.append(step)
            log.warning("the checkpoint of step %d is damaged: %s", step, reason)
        if damaged:
            raise ValueError(
                f"no checkpoint in {self.folder} can be read (step {damaged[0]}: {reason}); use "
                "another output folder"
            )
        return None

    def finish(self) -> None:
        """Waits until everything is written.

        Raises:
            OSError: the disk is full.
        """
        try:
            with self._disk_errors(None):
                self._manager.wait_until_finished()
        finally:
            self._closing.set()
            if self._sealing is not None:
                self._sealing.join()
            self._manager.close()

    def _seal(self, step: int) -> None:
        """Writes the digests of a checkpoint as soon as it is whole."""
        folder = self.folder / str(step)
        while not folder.is_dir():
            if self._closing.wait(0.05) and not folder.is_dir():
                return
        # A checkpoint that is being deleted already needs no digests.
        with contextlib.suppress(OSError):
            write_manifest(folder)

    def _damage(self, step: int) -> str | None:
        """Describes what the first process finds wrong with a checkpoint; None for nothing."""
        if jax.process_count() == 1:
            return damage(self.folder / str(step))
        found = damage(self.folder / str(step)) if jax.process_index() == 0 else None
        any_found = multihost_utils.broadcast_one_to_all(np.int32(found is not None))
        return found or ("its files have changed" if any_found else None)

    def _restore(
        self, step: int, like: Callable[[bool], TrainState]
    ) -> tuple[TrainState, dict[str, Any]]:
        args = self._ocp.args
        facts = self._manager.restore(step, args=args.Composite(facts=args.JsonRestore()))["facts"]
        shapes, positions = like(facts["averaged"]), facts["processes"]
        if len(positions) != jax.process_count():
            raise _OfAnotherRun(
                f"holds a run of {len(positions)} processes, and there are {jax.process_count()} "
                "now, so its position in the data is of no use; start it again with as many, or "
                "with another output folder"
            )
        _check_leaves(facts.get("leaves"), _leaves(shapes))
        # Checkpoints of earlier versions say nothing of alphas.
        _check_alphas(facts.get("alphas", self.alphas), self.alphas)
        if facts["averaged"] and facts["average"] != self.average:
            raise _OfAnotherRun(
                f"holds a run with {facts['average']}, which cannot go on with "
                f"{self.average or 'no average'}; give the options in its config.yaml, or another "
                "output folder"
            )
        restore = args.StandardRestore(shapes, support_layout=True)
        state = self._manager.restore(step, args=args.Composite(state=restore))["state"]
        # Earlier versions kept kernels in the order of layers.
        state = self._in_order(state, facts.get("kernel_parts", 1), shapes)
        return state, positions[jax.process_index()]

    def _in_order(self, state: TrainState, parts: int, shapes: TrainState) -> TrainState:
        """Returns a state in the order of this run's devices.

        parts: the number of devices that had the state. shapes: the state as shapes with places.
        """
        if parts == self.order.parts:
            return state
        found = self.order.of_devices(self.order._replace(parts=parts).of_layers(state))

        def placed(new: Any, old: Any, shape: Any) -> Any:
            return old if new is old else jax.device_put(new, shape.sharding)

        return jax.tree.map(placed, found, state, shapes)

    def _set_aside(self, steps: list[int]) -> None:
        if not steps:
            return
        if jax.process_index() == 0:
            for step in steps:
                target = self.folder.parent / f"damaged-{step}"
                shutil.rmtree(target, ignore_errors=True)
                (self.folder / str(step)).rename(target)
        if jax.process_count() > 1:
            multihost_utils.sync_global_devices("damaged checkpoints set aside")
        self._manager.reload()

    def _check_space(self, state: TrainState) -> None:
        """Raises an error before writing what the disk cannot hold."""
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
            if getattr(error, "errno", None) != errno.ENOSPC and not _of_full_disk(text):
                raise
            reason = error.strerror if isinstance(error, OSError) else "No space left on device"
            what = "a checkpoint" if step is None else f"the checkpoint of step {step}"
            last = max(self.steps(), default=None)
            kept = "" if last is None else f"; the last whole one, of step {last}, is untouched"
            raise OSError(
                errno.ENOSPC,
                f"{what} could not be written to {self.folder}, the disk is full ({reason}){kept}: "
                "make room and start again",
            ) from None


def _of_full_disk(text: str) -> bool:
    return any(words in text for words in ("No space left", "Disk quota"))


def _already_said(record: logging.LogRecord) -> bool:
    """Filters Orbax's log: a full disk is raised as an error already."""
    return not _of_full_disk(f"{record.getMessage()} {record.exc_info and record.exc_info[1]}")


class _OfAnotherRun(Exception):
    """A checkpoint that is whole and does not belong to this run."""


def _leaves(state: TrainState) -> dict[str, str]:
    """Returns the shape and dtype of each array of a state, those of the average excepted."""
    paths, _ = jax.tree_util.tree_flatten_with_path(state._replace(ema=None))
    return {_leaf_name(path): f"{tuple(leaf.shape)} {leaf.dtype}" for path, leaf in paths}


def _leaf_name(path: Any) -> str:
    """Names an array by its path. Checkpoints of earlier versions have indices without quotes."""
    return re.sub(r"\['(\d+)'\]", r"[\1]", jax.tree_util.keystr(path))


def _check_leaves(saved: dict[str, str] | None, wanted: dict[str, str]) -> None:
    """Raises _OfAnotherRun where a saved state has other arrays than the run that would read it."""
    if saved is None or saved == wanted:
        return
    other = {name for name, _ in saved.items() ^ wanted.items()}
    if all(name.startswith(".opt_state") for name in other):
        what = "with another optimizer"
    else:
        name = min((n for n in other if n.startswith(".params")), default=min(other))
        called = ".".join(re.findall(r"\['?(.+?)'?\]", name)) or name
        kinds = (which.get(name, "nothing") for which in (saved, wanted))
        what = f"with other parameters (such as {called}: {' instead of '.join(kinds)})"
    raise _OfAnotherRun(
        f"holds a run {what}, which cannot be continued; give the options in its config.yaml, or "
        "another output folder"
    )


def _check_alphas(saved: Mapping[str, float], wanted: Mapping[str, float]) -> None:
    """Raises _OfAnotherRun where a saved run's adapters of the same shapes have other alphas."""
    layer = next((name for name, alpha in wanted.items() if saved.get(name) != alpha), None)
    if layer is not None:
        raise _OfAnotherRun(
            f"holds a run with other alphas ({saved.get(layer)} of {layer}, which has "
            f"{wanted[layer]} now), which cannot be continued; give lora.alpha and lora.path as in "
            "its config.yaml, or another output folder"
        )


_NAME = "sha256.json"


def write_manifest(folder: Path) -> None:
    """Writes the SHA-256 of each file below the folder into it; the list appears only when whole.

    Raises:
        OSError: a file has disappeared, or the disk is full.
    """
    digests = {
        file.relative_to(folder).as_posix(): _digest(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(_NAME)
    }
    partial = folder / f"{_NAME}.partial"
    partial.write_text(json.dumps(digests, indent=1), "utf-8")
    os.replace(partial, folder / _NAME)


def damage(folder: Path) -> str | None:
    """Describes what is wrong with the folder's files; returns None where nothing is known to be.

    A run that was killed just after a checkpoint leaves it without digests.
    """
    try:
        text = (folder / _NAME).read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{_NAME} cannot be read ({error})"
    try:
        digests = {folder / name: digest for name, digest in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        return f"{_NAME} is not whole"
    for file, digest in digests.items():
        try:
            actual = _digest(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
        if actual != digest:
            return f"{file} is not what was written"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
