"""What a catalogue lists: models with their tasks and defaults, and files beside them."""

import dataclasses
import functools
import inspect
import math
from pathlib import Path
from typing import Any, Literal

from diffusax.boundary.files import load_json
from diffusax.checkpoints import read_call_defaults, read_model_index, resolve, upscalers
from diffusax.checkpoints.files import CallDefaults, component_folder
from diffusax.checkpoints.networks import read_network, stored_tensors
from diffusax.checkpoints.single_file import is_single_file, read_contents
from diffusax.pipelines.classes.auto import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    AutoPipelineForText2Image,
)
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.loading import (
    EDITORS,
    class_for,
    load_scheduler,
    with_class_options,
)
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.pipelines.tasks.setup import pixel_range
from diffusax.pipelines.tasks.tasks import instruct
from diffusax.samplers import Scheduler, fitting_samplers, sampler_name, scheduler_from_name
from diffusax.serving.catalogue.video_models import (
    VideoTask,
    looks_at_all,
    video_class,
    video_inputs,
    video_kind,
    video_tasks,
)

Task = Literal["text-to-image", "image-to-image", "inpainting", "edit"] | VideoTask

TASKS: dict[Task, tuple[Task, ...]] = {
    "text-to-image": ("text-to-image", "image-to-image", "inpainting"),
    "image-to-image": ("image-to-image", "inpainting"),
    "inpainting": ("inpainting",),
    "edit": ("edit",),
}
"""The tasks of each kind of model of images: a plain one, a refiner, one for inpainting, one for
edits."""
AUTOS: dict[str, Any] = {
    "text-to-image": AutoPipelineForText2Image,
    "image-to-image": AutoPipelineForImage2Image,
    "inpainting": AutoPipelineForInpainting,
}
"""The classes that choose a pipeline for a task of images."""


_TEXTS = ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
"""What is read only when a model is loaded: writing tokenizers takes most of the time."""

_MOST_REFERENCES = 4
"""The most images that VACE is given to look at."""

_PICTURES = (".png", ".jpg", ".jpeg", ".webp")
"""The endings of the pictures beside files."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelDescription:
    """A model, with the defaults of its first task."""

    name: str
    title: str
    family: str
    kind: Task
    tasks: tuple[Task, ...]
    width: int
    """In pixels, as the height: the size that the model was trained at."""
    height: int
    multiple: int
    """Width and height are multiples of so many pixels."""
    pixels: tuple[int, int] | None
    """The fewest and the most pixels at which it generates well; None for any number."""
    steps: int
    guidance_scale: float
    image_guidance_scale: float | None
    """None unless the model edits images."""
    sampler: str
    """The checkpoint's own sampler."""
    samplers: tuple[str, ...]
    """The samplers that suit the model."""
    images: int
    """The most images that it looks at together, when it is given some; mostly 1."""
    strength: bool
    """Whether a strength says how much of an image, or a video, is generated anew; others look at
    it."""
    num_frames: int | None
    """The frames of a video by default; None for models that generate images."""
    frames_multiple: int | None
    """num_frames is one more than a multiple of so many frames."""
    fps: int | None
    """The frames per second of the videos that the model was trained on."""
    last_image: bool
    """Whether a video may end with an image."""
    needs_last_image: bool
    """Whether it must, as the model generates what is between two images."""
    mask_video: bool
    """Whether a mask says what of a video is generated anew."""
    guidance_scale_2: bool
    """Whether the less noisy steps, of a second transformer, have a guidance scale of their own."""
    loaded: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelEntry(ModelDescription):
    """A model that clients can name, with its place on the disk."""

    path: Path
    loaded: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A LoRA, an embedding, a ControlNet or an upscaler that clients can name."""

    name: str
    title: str
    path: Path
    context_dim: int | None = None
    """Of a ControlNet, the width of the text embeddings that it attends to, which must be the
    model's; None where it is not known."""
    changed: int = 0
    """When it was last changed, see `last_change`."""
    scale: float | None = None
    """How many times larger an upscaler makes images; None for the others."""
    alias: str | None = None
    """The name in a LoRA's header, by which A1111's prompts call it; None where it has none."""
    references_layout: str | None = None
    """The layout in a LoRA's header, by which it has learned to look at images; None where it has
    none."""
    preview: Path | None = None
    """The picture beside the file, which shows what it does; None where there is none."""


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A model that can be loaded."""

    entry: ModelEntry
    source: str | Path
    """What `from_pretrained` takes."""
    folder: Path
    """The checkpoint's folder in diffusers' layout, without text encoders where it stands for a
    single file."""
    origin: Any
    """The class of pipelines that the checkpoint names."""
    call_defaults: CallDefaults
    scheduler: Scheduler
    context_dim: int | None
    """The width of the text embeddings that its denoiser attends to."""
    changed: int
    """When it was last changed, see `last_change`; 0 for a Hub repository."""

    def pipeline_class(self, task: str, *, steered: bool = False, layout: str | None = None) -> Any:
        """Returns the class of pipelines for a task, with ControlNets or without.

        layout: that of the request's LoRAs, see `FileEntry.references_layout`.

        Raises:
            ValueError: diffusax has no such class for the family.
        """
        if task == "image-to-image" and layout is not None and self.origin.__name__ in EDITORS:
            return EDITORS[self.origin.__name__]
        return _class_for(self.origin, task, steered=steered)

    def sampler(self, name: str) -> Scheduler:
        """Returns the sampler of a name, which nobody may step by hand.

        Raises:
            ValueError: there is none, or it does not suit the model.
        """
        return _sampler_of(name, self.scheduler)

    def defaults(self, pipeline_class: Any) -> dict[str, Any]:
        """Returns the defaults of a call: the checkpoint's own, then those of the class."""
        return _defaults(pipeline_class, self.call_defaults)

    def count_parameters(self) -> int:
        """Returns the number of parameters, from the headers of the files.

        Those of a Hub repository are fetched, unless they were before.

        Raises:
            ValueError: they cannot be fetched or read; says why.
        """
        whole = resolve(self.source)
        _, listed, _ = read_model_index(whole)
        folders = [component_folder(whole, name) for name in listed]
        return sum(
            math.prod(entry.shape)
            for folder in folders
            if (folder / "config.json").is_file()
            for tensors in stored_tensors(folder)
            for entry in tensors.values()
        )


def describe_model(source: str | Path, name: str, title: str) -> Checkpoint:
    """Reads from configs and headers what a checkpoint can do; loads no parameters.

    Args:
        source: a folder in diffusers' layout, a single file, an embedded name or a Hub repository.
        name: the name for clients.
        title: the title for people.

    Raises:
        ValueError: it cannot be read, or diffusax cannot generate with it from a prompt; says why.
    """
    folder = resolve(source, weights=False, skip=_TEXTS)
    class_name, listed, options = read_model_index(folder)
    origin = class_for(DiffusionPipeline, folder)
    family = origin.family
    path = Path(source)
    if is_single_file(path) and not set(_TEXTS) & set(read_contents(path).parts):
        raise ValueError(f"{path} holds no text encoder; make a whole model of it")
    if not family.text_encoders:
        raise ValueError(f"{source} is a {class_name}, which takes no prompt")
    absent = {one.name for one in family.components if one.optional} - {*listed}
    every = (*family.names("denoiser"), *family.names("autoencoder"))
    names = [name for name in every if name not in absent]
    networks = {part: read_network(component_folder(folder, part)) for part in names}
    known = {k: v for k, v in options.items() if k in dict(family.options)}
    rest: dict[str, Any] = {"tokenizers": {}, "scheduler": None}
    parts = Components.of(family, networks, {}, **rest, options={**dict(family.options), **known})
    kind, tasks, strength = _abilities(parts, origin, source)
    scheduler = _scheduler(folder, listed, origin)
    height, width = parts.default_size
    call_defaults = read_call_defaults(folder)
    own = _defaults(_class_for(origin, kind), call_defaults)
    entry = ModelEntry(
        name=name,
        title=title,
        family=family.name,
        kind=kind,
        tasks=tasks,
        width=width,
        height=height,
        multiple=parts.latents.multiple,
        pixels=pixel_range(parts),
        steps=int(own["num_inference_steps"]),
        guidance_scale=float(own["guidance_scale"]),
        image_guidance_scale=own.get("image_guidance_scale"),
        sampler=sampler_name(scheduler),
        samplers=_samplers_for(scheduler),
        images=_MOST_REFERENCES if looks_at_all(origin) else family.edits.most,
        strength=strength,
        num_frames=own.get("num_frames"),
        frames_multiple=parts.latents.frames or None,
        fps=family.frame_rate(parts.options) if family.frame_rate else None,
        **video_inputs(parts, origin, kind),
        path=Path(source),
    )
    dim = parts.denoiser.context_dim
    changed = last_change(path.expanduser())
    return Checkpoint(entry, source, folder, origin, call_defaults, scheduler, dim, changed)


def describe_controlnet(path: Path, name: str, title: str) -> FileEntry:
    """Reads what a ControlNet is for from its config or header.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    if is_single_file(path):
        part = read_contents(path).parts.get("controlnet")
        if part is None:
            raise ValueError(f"{path} holds no ControlNet")
        dim: Any = part.context_dim
    else:
        config = load_json(path / "config.json")
        if config.get("_class_name") != "ControlNetModel":
            raise ValueError(f"{path} holds a {config.get('_class_name')}, not a ControlNetModel")
        dim = config.get("cross_attention_dim")
    return FileEntry(
        name=name,
        title=title,
        path=path,
        context_dim=dim if isinstance(dim, int) else None,
        changed=last_change(path),
    )


def describe_upscaler(path: Path, name: str, title: str) -> FileEntry:
    """Reads from its header how many times larger an upscaler makes images.

    Raises:
        ValueError: it cannot be read, or is none.
    """
    scale = upscalers.describe_upscaler(path).scale
    changed = last_change(path)
    return FileEntry(name=name, title=title, path=path, changed=changed, scale=scale)


def last_change(path: Path) -> int:
    """Returns when a file, or one in a folder, was last changed, in nanoseconds; 0 for none."""
    files = path.rglob("*") if path.is_dir() else [path]
    return max((file.stat().st_mtime_ns for file in files if file.is_file()), default=0)


def preview_of(path: Path) -> Path | None:
    """Returns the picture beside a file, named as A1111's users do: name.preview.png, name.png."""
    names = (f"{path.stem}{part}{suffix}" for part in (".preview", "") for suffix in _PICTURES)
    return next((found for name in names if (found := path.with_name(name)).is_file()), None)


def _abilities(
    parts: Components, origin: Any, source: str | Path
) -> tuple[Task, tuple[Task, ...], bool]:
    """Returns the kind of a model, its tasks, and whether a strength counts in one of them."""
    kind: Task
    if parts.family.draws_videos:
        kind = video_kind(parts, source)
        tasks: tuple[Task, ...] = video_tasks(parts, origin, kind)
        started: Task = "video-to-video"
        starts = started in tasks
    else:
        kind = _kind(parts, origin, source)
        tasks = tuple(task for task in TASKS[kind] if _does(origin, task))
        started = "image-to-image"
        starts = _does(origin, started)
    return kind, tasks, starts and "strength" in arguments_of(_class_for(origin, started))


def _kind(parts: Components, origin: Any, source: str | Path) -> Task:
    """Finds the kind of a model by the input channels of its network."""
    latent, channels = parts.latents.channels, parts.denoiser.in_channels
    if channels == 2 * latent and origin.task is instruct:
        return "edit"
    if channels == 2 * latent + 1:
        return "inpainting"
    if channels != latent:
        raise ValueError(
            f"{source} is a {origin.__name__} with a network of {channels} input channels, which "
            "is made for no task here"
        )
    return "image-to-image" if parts.options.get("requires_aesthetics_score") else "text-to-image"


@functools.lru_cache(256)
def _class_for(origin: Any, task: str, *, steered: bool = False) -> Any:
    if origin.family.draws_videos:
        return video_class(origin, task, steered=steered)
    return origin if task == "edit" else AUTOS[task].find_class(origin, steered)


def _defaults(pipeline_class: Any, call_defaults: CallDefaults) -> dict[str, Any]:
    found = dict(arguments_of(pipeline_class))
    if found.get("guidance_scale") is None:
        found["guidance_scale"] = found.get("true_cfg_scale", 1.0)
    return {**found, **{k: v for k, v in call_defaults.items() if k in found}}


def _does(origin: Any, task: Task) -> bool:
    """Returns whether diffusax has a class of pipelines for a task and a model's family."""
    try:
        _class_for(origin, task)
    except ValueError:
        return False
    return True


def _scheduler(folder: Path, listed: dict[str, Any], origin: Any) -> Scheduler:
    """Returns the scheduler that pipelines of the checkpoint have."""
    own = next(c for c in origin.all_components if c.role == "scheduler")
    if "scheduler" in listed:
        scheduler = load_scheduler(folder, "scheduler", listed["scheduler"][1])
    elif own.make is not None:
        scheduler = own.make()
    else:
        raise ValueError(f"{folder / 'model_index.json'} has no scheduler")
    return with_class_options(scheduler, origin.scheduler_options)


@functools.lru_cache(256)
def arguments_of(pipeline_class: Any) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call with their defaults."""
    parameters = inspect.signature(pipeline_class.__call__).parameters
    return {name: parameter.default for name, parameter in parameters.items()}


@functools.lru_cache(256)
def _sampler_of(name: str, own: Scheduler) -> Scheduler:
    return scheduler_from_name(name, own)


@functools.lru_cache(256)
def _samplers_for(scheduler: Scheduler) -> tuple[str, ...]:
    return tuple(fitting_samplers(scheduler)[0])
