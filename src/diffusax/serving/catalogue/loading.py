"""Loads models with their embeddings, and makes their pipelines for tasks and ControlNets."""

import logging
from collections.abc import Sequence
from typing import Any

import jax

from diffusax.checkpoints.single_file import is_single_file
from diffusax.networks import ControlNetModel, Model
from diffusax.serving.catalogue.entries import AUTOS, Checkpoint, FileEntry

log = logging.getLogger(__name__)


class LoadedModel:
    """A model in memory, with a pipeline for each task and each set of ControlNets in use.

    All of them share the model's parameters, embeddings and adapters.
    """

    def __init__(
        self, checkpoint: Checkpoint, embeddings: Sequence[FileEntry], options: dict[str, Any]
    ):
        """Loads the model.

        Args:
            checkpoint: the model.
            embeddings: textual inversions; those of other models are left out.
            options: dtype, device and mesh of `from_pretrained`.

        Raises:
            ValueError: a file cannot be read; says which and why.
        """
        self.checkpoint, self.embeddings = checkpoint, tuple(embeddings)
        cls = checkpoint.pipeline_class(checkpoint.entry.kind)
        self._pipe = cls.from_pretrained(checkpoint.source, **options)
        self._pipe.set_progress_bar_config(disable=True)
        if embeddings:
            _load_embeddings(self._pipe, embeddings)
        self._pipes: dict[tuple[str, tuple[str, ...]], Any] = {
            (checkpoint.entry.kind, ()): self._pipe
        }
        self.nbytes = sum(count_bytes(params) for params in self._pipe.params.values())
        """The bytes of its parameters, without those of ControlNets."""

    def is_of(self, checkpoint: Checkpoint | None, embeddings: Sequence[FileEntry]) -> bool:
        """Returns whether it was loaded from these files, as they are now listed."""
        return self.checkpoint == checkpoint and self.embeddings == tuple(embeddings)

    def pipeline(self, task: str, controlnets: Sequence[tuple[str, Model]]) -> Any:
        """Returns the pipeline for a task, steered by ControlNets, which are given with names."""
        key = task, tuple(name for name, _ in controlnets)
        if key not in self._pipes:
            nets = [net for _, net in controlnets]
            steered = {"controlnet": nets if len(nets) > 1 else nets[0]} if nets else {}
            self._pipes[key] = AUTOS[task].from_pipe(self._pipe, **steered)
        return self._pipes[key]

    def forget(self, controlnet: str) -> None:
        """Forgets the pipelines with a ControlNet."""
        self._pipes = {key: pipe for key, pipe in self._pipes.items() if controlnet not in key[1]}


class LoadedControlNet:
    """A ControlNet in memory."""

    def __init__(self, entry: FileEntry, *, dtype: Any = None, device: Any = None):
        """Loads the ControlNet. dtype and device: those of its models.

        Raises:
            ValueError: it cannot be read; says why.
        """
        self.entry = entry
        open_with = (
            ControlNetModel.from_single_file
            if is_single_file(entry.path)
            else ControlNetModel.from_pretrained
        )
        self.model: Model = open_with(entry.path, dtype=dtype or "float32", device=device)
        self.nbytes = count_bytes(self.model.params)
        """The bytes of its parameters."""


def count_bytes(params: Any) -> int:
    """Returns the bytes of a tree of parameters."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def _load_embeddings(pipe: Any, entries: Sequence[FileEntry]) -> None:
    """Loads the embeddings that fit a pipeline; logs the others."""
    try:
        # Each call copies the text encoder's table, so one call loads as many as it can.
        pipe.load_textual_inversion([entry.path for entry in entries])
    except ValueError as error:
        if len(entries) == 1:
            log.info("%s is not loaded: %s", entries[0].path, error)
            return
        half = len(entries) // 2
        _load_embeddings(pipe, entries[:half])
        _load_embeddings(pipe, entries[half:])
