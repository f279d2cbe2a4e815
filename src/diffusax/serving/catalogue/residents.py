"""Keeps models, ControlNets and LoRAs in memory: loads them when needed, evicts unused ones."""

import collections
import dataclasses
import logging
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from diffusax.checkpoints.single_file import is_single_file
from diffusax.networks import ControlNetModel, Model
from diffusax.runtime.devices.memory import array_bytes, device_memory
from diffusax.serving.catalogue.entries import AUTOS, Checkpoint, FileEntry
from diffusax.serving.requests.errors import Refused
from diffusax.text.extra_networks import add_weights

log = logging.getLogger(__name__)

_SHARE = 0.6
"""The share of a device's memory for parameters by default; programs take the rest."""

Key = tuple[str, str]
"""The kind of a resident, "model" or "controlnet", and its name."""


@dataclasses.dataclass
class _Pin:
    """How often a pipeline is in use, and what it needs in memory."""

    keys: frozenset[Key]
    pipe: Any
    count: int = 0


class Residents:
    """The models and ControlNets in memory. Any thread may call it; one at a time loads."""

    def __init__(self, options: Mapping[str, Any], memory: int | None):
        """Starts empty.

        Args:
            options: dtype, device, mesh and weights of `from_pretrained`.
            memory: the bytes that parameters may take; None for six tenths of a device's.
        """
        self._options, self._memory = dict(options), memory
        self._lock, self._loading = threading.RLock(), threading.Lock()
        self._held: collections.OrderedDict[Key, Any] = collections.OrderedDict()
        """A LoadedModel or a LoadedControlNet, the least recently used first."""
        self._pins: dict[int, _Pin] = {}

    def models(self) -> set[str]:
        """Returns the names of the models in memory."""
        with self._lock:
            return {name for kind, name in self._held if kind == "model"}

    def tokenizer(self, name: str) -> Any:
        """Returns the tokenizer of a model in memory, the last of several; None for none."""
        with self._lock:
            held = self._held.get(("model", name))
        return None if held is None else held.tokenizer

    def acquire(
        self,
        checkpoint: Checkpoint,
        task: str,
        controlnets: Sequence[FileEntry],
        embeddings: Sequence[FileEntry],
        layout: str | None = None,
    ) -> Any:
        """Returns the pipeline of a model for a task, and keeps it in memory until `release`.

        Args:
            checkpoint: the model.
            task: one of its tasks.
            controlnets: the ControlNets that steer it, in order.
            embeddings: the textual inversions that a model gets when it is loaded.
            layout: that of the request's LoRAs, see `FileEntry.references_layout`.

        Raises:
            Refused: a file cannot be read; says which and why.
        """
        pipe = self._pinned(checkpoint, task, controlnets, embeddings, layout)
        if pipe is not None:
            return pipe
        with self._loading:
            try:
                found = self._loaded(checkpoint, controlnets, embeddings)
            except (ValueError, OSError) as error:
                message = f"model {checkpoint.entry.name!r} cannot be loaded: {error}"
                raise Refused(message, param="model", code="not_loaded", status=500) from None
            with self._lock:
                self._held.update(found)
                self._make_room(0, keep=frozenset(found))
                pipe = self._pinned(checkpoint, task, controlnets, embeddings, layout)
                assert pipe is not None
                return pipe

    def release(self, pipe: Any) -> None:
        """Releases a pipeline, once for each `acquire`."""
        with self._lock:
            pin = self._pins.get(id(pipe))
            if pin is None:
                return
            pin.count -= 1
            if pin.count == 0:
                del self._pins[id(pipe)]
            self._make_room(0)

    def free_unused(self) -> None:
        """Evicts what no image uses."""
        with self._lock:
            used = frozenset[Key]().union(*(pin.keys for pin in self._pins.values()))
            for key in [key for key in self._held if key not in used]:
                self._forget(key)

    def keep_only(
        self,
        checkpoints: Mapping[str, Checkpoint],
        controlnets: Mapping[str, FileEntry],
        embeddings: Sequence[FileEntry],
    ) -> None:
        """Evicts what is no longer listed or has changed; images under way keep it."""
        with self._lock:
            for (kind, name), held in list(self._held.items()):
                if kind == "controlnet":
                    listed = controlnets.get(name) == held.entry
                else:
                    listed = held.is_of(checkpoints.get(name), embeddings)
                if not listed:
                    self._forget((kind, name))

    def _pinned(
        self,
        checkpoint: Checkpoint,
        task: str,
        controlnets: Sequence[FileEntry],
        embeddings: Sequence[FileEntry],
        layout: str | None,
    ) -> Any:
        """Returns the pipeline and counts its use; None unless all of it is in memory."""
        with self._lock:
            model = self._model(checkpoint, embeddings)
            nets = {one.name: self._controlnet(one) for one in controlnets}
            if model is None or None in nets.values():
                return None
            keys = [("model", checkpoint.entry.name), *(("controlnet", name) for name in nets)]
            for key in keys:
                self._held.move_to_end(key)
            steering = [(one.name, nets[one.name].model) for one in controlnets]
            pipe = model.pipeline(task, steering, layout)
            pin = self._pins.setdefault(id(pipe), _Pin(frozenset(keys), pipe))
            pin.count += 1
            return pipe

    def _loaded(
        self,
        checkpoint: Checkpoint,
        controlnets: Sequence[FileEntry],
        embeddings: Sequence[FileEntry],
    ) -> dict[Key, Any]:
        """Returns the model and the ControlNets; loads those that are not in memory."""
        name = checkpoint.entry.name
        entries = {("controlnet", one.name): one for one in controlnets}
        with self._lock:
            nets = {key: self._controlnet(one) for key, one in entries.items()}
            model = self._model(checkpoint, embeddings)
        if model is None:
            log.info("loading the model %s", name)
            half = str(self._options.get("dtype") or "float32").endswith("16")
            width = 2.0 if half else 4.0
            # The autoencoder and small parameters keep their dtype.
            width = width if self._options.get("weights") in (None, "file") else 1.1
            wanted = int(checkpoint.count_parameters() * width)
            with self._lock:
                self._forget(("model", name))
                self._make_room(wanted, keep=frozenset(nets))
            model = LoadedModel(checkpoint, embeddings, self._options)
        for key in [key for key, net in nets.items() if net is None]:
            log.info("loading the ControlNet %s", key[1])
            options = {k: self._options.get(k) for k in ("dtype", "device", "weights")}
            with self._lock:
                self._forget(key)
            nets[key] = LoadedControlNet(entries[key], **options)
        return {("model", name): model, **nets}

    def _model(self, checkpoint: Checkpoint, embeddings: Sequence[FileEntry]) -> Any:
        """Returns a model as it is listed now, or None where it is not in memory."""
        held = self._held.get(("model", checkpoint.entry.name))
        return held if held is not None and held.is_of(checkpoint, embeddings) else None

    def _controlnet(self, entry: FileEntry) -> Any:
        """Returns a ControlNet as it is listed now, or None where it is not in memory."""
        held = self._held.get(("controlnet", entry.name))
        return held if held is not None and held.entry == entry else None

    def _make_room(self, wanted: int, keep: frozenset[Key] = frozenset()) -> None:
        """Evicts unused models, least recently used first, until the bytes fit."""
        limit = self._limit()
        if limit is None:
            return
        used = keep.union(*(pin.keys for pin in self._pins.values()))
        free = [key for key in self._held if key not in used]
        while free and sum(held.nbytes for held in self._held.values()) + wanted > limit:
            self._forget(free.pop(0))

    def _limit(self) -> int | None:
        if self._memory is None:
            total = device_memory(jax.local_devices()[0])
            self._memory = None if total is None else int(total * _SHARE)
        return self._memory

    def _forget(self, key: Key) -> None:
        if self._held.pop(key, None) is None:
            return
        log.info("forgetting the %s %s", *key)
        if key[0] == "controlnet":
            for (kind, _), model in self._held.items():
                if kind == "model":
                    model.forget(key[1])


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
            options: dtype, device, mesh and weights of `from_pretrained`.

        Raises:
            ValueError: a file cannot be read; says which and why.
        """
        self.checkpoint, self.embeddings = checkpoint, tuple(embeddings)
        cls = checkpoint.pipeline_class(checkpoint.entry.kind)
        self._pipe = cls.from_pretrained(checkpoint.source, **options)
        self._pipe.set_progress_bar_config(disable=True)
        if embeddings:
            _load_embeddings(self._pipe, embeddings)
        self._pipes: dict[tuple[str, tuple[str, ...], str | None], Any] = {
            (checkpoint.entry.kind, (), None): self._pipe
        }
        self.nbytes = sum(count_bytes(params) for params in self._pipe.params.values())
        """The bytes of its parameters, without those of ControlNets."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of its last text encoder, which reads the most of a prompt."""
        return self._pipe.parts.text_encoders[-1][0]

    def is_of(self, checkpoint: Checkpoint | None, embeddings: Sequence[FileEntry]) -> bool:
        """Returns whether it was loaded from these files, as they are now listed."""
        return self.checkpoint == checkpoint and self.embeddings == tuple(embeddings)

    def pipeline(
        self, task: str, controlnets: Sequence[tuple[str, Model]], layout: str | None = None
    ) -> Any:
        """Returns the pipeline for a task, steered by ControlNets, which are given with names.

        layout: see `Residents.acquire`.
        """
        cls = self.checkpoint.pipeline_class(task, steered=bool(controlnets), layout=layout)
        looks = cls.diffusers_name is not None and type(self._pipe) is not cls
        key = task, tuple(name for name, _ in controlnets), layout if looks else None
        if key not in self._pipes:
            nets = [net for _, net in controlnets]
            steered = {"controlnet": nets if len(nets) > 1 else nets[0]} if nets else {}
            if looks:
                made = cls.from_pipe(self._pipe, references_layout=layout)
            elif cls.family.draws_videos:
                made = cls.from_pipe(self._pipe)
            else:
                made = AUTOS[task].from_pipe(self._pipe, **steered)
            self._pipes[key] = made
        return self._pipes[key]

    def forget(self, controlnet: str) -> None:
        """Forgets the pipelines with a ControlNet."""
        self._pipes = {key: pipe for key, pipe in self._pipes.items() if controlnet not in key[1]}


class LoadedControlNet:
    """A ControlNet in memory."""

    def __init__(
        self, entry: FileEntry, *, dtype: Any = None, device: Any = None, weights: Any = "file"
    ):
        """Loads the ControlNet. dtype, device and weights: those of its models.

        Raises:
            ValueError: it cannot be read; says why.
        """
        self.entry = entry
        open_with = (
            ControlNetModel.from_single_file
            if is_single_file(entry.path)
            else ControlNetModel.from_pretrained
        )
        options = {"dtype": dtype or "float32", "device": device, "weights": weights}
        self.model: Model = open_with(entry.path, **options)
        self.nbytes = count_bytes(self.model.params)
        """The bytes of its parameters."""


def count_bytes(params: Any) -> int:
    """Returns the bytes of a tree of parameters."""
    return sum(map(array_bytes, jax.tree.leaves(params)))


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


_MOST_LORAS = 16
"""The LoRAs of a model that stay in memory."""


class Adapters:
    """Loads LoRAs into pipelines and evicts the least recently used. Any thread may call it."""

    def __init__(self, most: int = _MOST_LORAS):
        """Starts without LoRAs. most: those of a model that stay in memory."""
        self._most, self._lock = most, threading.Lock()
        self._used: weakref.WeakKeyDictionary[Any, collections.OrderedDict[str, Any]] = (
            weakref.WeakKeyDictionary()
        )

    def load(self, pipe: Any, weights: Mapping[str, Any], catalogue: Any) -> dict[str, Any]:
        """Loads the LoRAs that a request names and returns their weights for a call.

        Reads a file again if it has changed. Images under way keep the weights that they have.

        Args:
            pipe: the pipeline.
            weights: the weights by names of the catalogue: a number, or numbers by component, of
                which those of components that the pipeline lacks are left out.
            catalogue: the catalogue.

        Raises:
            NotFound: the catalogue has no LoRA of this name.
            Refused: a LoRA cannot be read or does not fit the model; says why.
        """
        found: dict[str, Any] = {}
        for name, weight in weights.items():
            # A LoRA may be named by its title, and twice.
            own = catalogue.lora(name).name
            if isinstance(weight, Mapping):
                weight = {k: v for k, v in weight.items() if k in pipe.component_names}
            found[own] = add_weights(found[own], weight) if own in found else weight
        with self._lock:
            used = self._used.setdefault(pipe.parts.adapters, collections.OrderedDict())
            for name in found:
                self._load(pipe, used, name, catalogue.lora(name).path)
            while len(used) > max(self._most, len(found)):
                oldest = next(iter(used))
                del used[oldest]
                pipe.delete_adapters(oldest)
        return found

    def _load(self, pipe: Any, used: Any, name: str, path: Any) -> None:
        version = path, path.stat().st_mtime_ns
        if used.get(name) != version:
            if name in used:
                del used[name]
                pipe.delete_adapters(name)
            try:
                pipe.load_lora_weights(path, adapter_name=name)
            except ValueError as error:
                message = f"adapters names {name!r}, which cannot be used here: {error}"
                raise Refused(message, param="adapters") from None
            used[name] = version
        used.move_to_end(name)
