"""The catalogue: the models that a server offers by name, and those in memory."""

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from diffusax.checkpoints.hub import EMBEDDED
from diffusax.lora import called, layout_of, output_name
from diffusax.models.transformers.references import Layout
from diffusax.samplers import Scheduler
from diffusax.serving.catalogue.calls import adapters_of, arguments, complete
from diffusax.serving.catalogue.entries import (
    Checkpoint,
    FileEntry,
    ModelEntry,
    arguments_of,
    describe_controlnet,
    describe_model,
    describe_upscaler,
    last_change,
    preview_of,
)
from diffusax.serving.catalogue.folders import Found, find_files
from diffusax.serving.catalogue.residents import Residents
from diffusax.serving.catalogue.styles import Style, find_styles
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import Generation, typed

log = logging.getLogger(__name__)


class Catalogue:
    """The models, LoRAs, embeddings and ControlNets of a server, and the pipelines in memory.

    Clients name what is listed; a name from a client is looked up and never becomes a path. Models
    are loaded when a request first needs them. Any thread may call the methods.
    """

    def __init__(
        self,
        model: str | Path | None = "emoji",
        folder: str | Path | None = None,
        *,
        dtype: Any = None,
        device: Any = None,
        mesh: Any = None,
        weights: str | None = "file",
        memory: int | None = None,
    ):
        """Lists what there is; loads nothing.

        Args:
            model: the model for requests that name none: a folder in diffusers' layout, a single
                file, a Hub repository id, "emoji", or a name in the folder of models. None takes
                the folder's first.
            folder: the folder of models, in the layout of A1111 or ComfyUI or of your own.
            dtype: the dtype of parameters and computation; float32 by default.
            device: the device to generate on, see `DiffusionPipeline.from_pretrained`.
            mesh: the devices to generate on, see `DiffusionPipeline.from_pretrained`.
            weights: what kernels are stored as, see `DiffusionPipeline.from_pretrained`.
            memory: the bytes that parameters may take; six tenths of a device's by default. Unused
                models are evicted, least recently used first.

        Raises:
            ValueError: the model or the folder cannot be read; says why.
        """
        self._folder = None if folder is None else Path(folder).expanduser()
        self._given, self._listed = model, False
        options = {"dtype": dtype, "device": device, "mesh": mesh, "weights": weights}
        self._residents = Residents(options, memory)
        self._read: dict[Any, Checkpoint] = {}
        self._headers: dict[tuple[Path, int], dict[str, str | None]] = {}
        self.unreadable: Mapping[Path, str] = MappingProxyType({})
        """The files in the folder that cannot be used, with the reasons."""
        self.refresh()

    @property
    def models(self) -> list[ModelEntry]:
        """The models that clients can name, the default first."""
        return [self._current(checkpoint.entry) for checkpoint in self._models.values()]

    @property
    def loras(self) -> list[FileEntry]:
        """The LoRAs that clients can name; loading one tells whether it fits a model."""
        return list(self._loras.values())

    @property
    def embeddings(self) -> list[FileEntry]:
        """The embeddings, whose names are words in prompts; a model has those that fit it."""
        return list(self._embeddings.values())

    @property
    def controlnets(self) -> list[FileEntry]:
        """The ControlNets that clients can name."""
        return list(self._controlnets.values())

    def refresh(self) -> None:
        """Lists the folder again and evicts what is gone or has changed, once no image uses it.

        Raises:
            ValueError: the folder, or the default model, is not there any more.
        """
        found, unreadable = ([], {}) if self._folder is None else find_files(self._folder)
        styles = find_styles(self._folder)
        models: dict[str, Checkpoint] = {}
        controlnets: dict[str, FileEntry] = {}
        upscalers: dict[str, FileEntry] = {}
        for one in found:
            try:
                if one.kind == "model":
                    models[one.name] = self._described(one)
                elif one.kind == "controlnet":
                    controlnets[one.name] = describe_controlnet(one.path, one.name, one.title)
                elif one.kind == "upscaler":
                    upscalers[one.name] = describe_upscaler(one.path, one.name, one.title)
            except (ValueError, OSError) as error:
                unreadable[one.path] = str(error)
        if self._listed and self._given not in models:
            raise ValueError(f"model {self._given!r} is no longer in {self._folder}; put it back")
        self._listed = self._given in models
        default = _add_default(models, self._given, self._folder)
        for path in set(unreadable) - set(self.unreadable):
            log.warning("%s is left out: %s", path, unreadable[path])
        # Readers see the old lists or the new ones, each of them whole; the default is the first.
        self._models = {default: models[default], **models}
        self._controlnets = controlnets
        self.upscalers: Mapping[str, FileEntry] = MappingProxyType(upscalers)
        """The networks that make images larger, by name."""
        self.styles: Mapping[str, Style] = MappingProxyType(styles)
        """The styles of the folder's styles.csv by name."""
        self._loras = _files(found, "lora", self._header)
        self._embeddings = _files(found, "embedding")
        self.unreadable = MappingProxyType(unreadable)
        self._residents.keep_only(models, controlnets, self.embeddings)

    def entry(self, name: str = "") -> ModelEntry:
        """Returns the model of a name, a title or a file's name; of an empty name, the default.

        Raises:
            NotFound: there is none.
        """
        return self._current(self._checkpoint(name).entry)

    def lora(self, name: str) -> FileEntry:
        """Returns the LoRA of a name: its file's, or the one in its header.

        Raises:
            NotFound: there is none, or several are called so.
        """
        named = called(name, {key: (key, one.alias) for key, one in self._loras.items()})
        if len(named) == 1:
            return self._loras[named[0]]
        return _look_up(self._loras, name, "adapters", "LoRA")

    def tokenizer(self, name: str = "") -> tuple[Any, int | None] | None:
        """Returns the tokenizer of a model in memory, the one that reads most of several.

        And the tokens that the model reads by default, or None where its tokenizer says so itself.
        Returns None for a model that is not in memory.

        Raises:
            NotFound: there is no such model.
        """
        checkpoint = self._checkpoint(name)
        found = self._residents.tokenizer(checkpoint.entry.name)
        own = arguments_of(checkpoint.pipeline_class(checkpoint.entry.kind))
        return None if found is None else (found, own.get("max_sequence_length"))

    def check(self, generation: Generation) -> Generation:
        """Checks a request and fills in the defaults of its model; loads nothing.

        Raises:
            Refused: its model cannot generate it; says why.
            NotFound: the catalogue lacks its model, or a ControlNet or LoRA that it names.
        """
        generation = typed(generation)
        checkpoint = self._checkpoint(generation.model)
        nets = {c.model: self._controlnet(c.model) for c in generation.controls}
        return complete(checkpoint, generation, nets, self._layout(generation))

    def acquire(self, generation: Generation) -> tuple[Any, dict[str, Any]]:
        """Returns the pipeline for a request that `check` returned, and the arguments of its call.

        Loads the model if it is not in memory, and keeps it there until `release`. The arguments
        lack the seed, the sampler and the adapters.

        Raises:
            Refused: the model cannot be loaded; says why.
            NotFound: the catalogue no longer has something that it names.
        """
        nets = [self._controlnet(control.model) for control in generation.controls]
        model = self._checkpoint(generation.model)
        layout = self._layout(generation)
        pipe = self._residents.acquire(model, generation.task, nets, self.embeddings, layout)
        return pipe, arguments(type(pipe), generation, model.sampler(generation.sampler or ""))

    def sampler(self, generation: Generation) -> Scheduler:
        """Returns the sampler of a request that `check` returned.

        Raises:
            NotFound: the catalogue no longer has the model.
        """
        return self._checkpoint(generation.model).sampler(generation.sampler or "")

    def free_unused(self) -> None:
        """Evicts the models and ControlNets that no image uses."""
        self._residents.free_unused()

    def release(self, pipe: Any) -> None:
        """Releases a pipeline, once for each `acquire`."""
        self._residents.release(pipe)

    def _described(self, found: Found) -> Checkpoint:
        """Describes a model of the folder; reads a single file again only after a change."""
        stat = found.path.stat()
        key = found, stat.st_mtime_ns, stat.st_size
        if key not in self._read:
            made = describe_model(found.path, found.name, found.title)
            if found.path.is_dir():
                # What is inside may change without the folder.
                return made
            self._read[key] = made
        return self._read[key]

    def _header(self, path: Path) -> dict[str, str | None]:
        """Returns what a LoRA's header says for its entry; reads it again only after a change."""
        key = path, path.stat().st_mtime_ns
        if key not in self._headers:
            found = {"alias": output_name(path), "references_layout": layout_of(path)}
            self._headers[key] = found
        return self._headers[key]

    def _layout(self, generation: Generation) -> str | None:
        """Returns the layout of the LoRAs that a request names; None where none has one.

        Raises:
            NotFound: the catalogue lacks one.
            Refused: they have several.
        """
        entries = [self.lora(name) for name in adapters_of(generation)]
        layouts = {one.references_layout for one in entries} & {*get_args(Layout)}
        if len(layouts) > 1:
            raise Refused(
                "adapters must have learned to look at images in one way (got LoRAs with "
                f"references_layout {' and '.join(map(repr, sorted(map(str, layouts))))})",
                param="adapters",
            )
        return next(iter(layouts), None)

    def _checkpoint(self, name: str) -> Checkpoint:
        models = self._models
        return _look_up(models, name or next(iter(models)), "model", "model")

    def _controlnet(self, name: str) -> FileEntry:
        return _look_up(self._controlnets, name, "controls", "ControlNet")

    def _current(self, entry: ModelEntry) -> ModelEntry:
        return dataclasses.replace(entry, loaded=entry.name in self._residents.models())


def _add_default(
    models: dict[str, Checkpoint], model: str | Path | None, folder: Path | None
) -> str:
    """Adds the default model to those of the folder, unless it is one of them; returns its name.

    Raises:
        ValueError: there is no such model.
    """
    if model is None:
        if not models:
            raise ValueError(f"models has no checkpoint in {folder}; name one with model")
        return next(iter(models))
    if str(model) in models:
        return str(model)
    path = Path(model).expanduser()
    if path.exists():
        same = [n for n, c in models.items() if c.entry.path.resolve() == path.resolve()]
        if same:
            return same[0]
    whole = path.is_file() or path.is_dir()
    name = str(model) if str(model) in EMBEDDED or not whole else path.resolve().stem
    while name in models:
        name = f"{name}_"
    models[name] = describe_model(path if whole else str(model), name, path.name)
    return name


def _files(
    found: Sequence[Found], kind: str, header: Callable[[Path], Any] = lambda path: {}
) -> dict[str, FileEntry]:
    """Returns the entries of a kind by name, for kinds of which only headers are read."""
    own = [one for one in found if one.kind == kind]
    return {
        one.name: FileEntry(
            name=one.name,
            title=one.title,
            path=one.path,
            changed=last_change(one.path),
            **header(one.path),
            preview=preview_of(one.path),
        )
        for one in own
    }


def _look_up(listed: Mapping[str, Any], name: str, param: str, kind: str) -> Any:
    """Finds an entry by its name, or else by its title or its file's name.

    Raises:
        NotFound: there is none, or several that are called so.
    """
    if name in listed:
        return listed[name]
    entries = {key: getattr(value, "entry", value) for key, value in listed.items()}
    wanted = name.lower().replace("\\", "/")
    found = [
        key
        for key, entry in entries.items()
        if wanted in (key.lower(), entry.title.lower(), entry.path.name.lower())
    ]
    # A title without its ending, as A1111 writes a model in a folder below.
    found = found or [
        key for key, e in entries.items() if wanted == str(Path(e.title).with_suffix("")).lower()
    ]
    if len(found) == 1:
        return listed[found[0]]
    names = ", ".join(list(listed)[:20]) + (", ..." if len(listed) > 20 else "")
    there = f"it is one of {names}" if listed else "there are none"
    raise NotFound(f"{param} names the {kind} {name!r}, which is not listed; {there}", param=param)
