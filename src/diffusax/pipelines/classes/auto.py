"""Pipelines by task: classes that choose the pipeline for a checkpoint's family."""

from pathlib import Path
from typing import Any, ClassVar

from diffusax.checkpoints import resolve
from diffusax.checkpoints.keywords import hub_keywords
from diffusax.pipelines import classes
from diffusax.pipelines.components.foreign import own_pipeline
from diffusax.pipelines.components.loading import EDITORS, class_for
from diffusax.pipelines.components.references import learned_layout, lora_layout
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.pipelines.tasks import flux, inpainting, steering, tasks, videos


def looks_at_images(
    path_or_repo: str | Path, *, references_layout: str | None = None, **hub: Any
) -> bool:
    """Returns whether image to image with a checkpoint looks at images, instead of starting there.

    references_layout: see `AutoPipelineForImage2Image.from_pretrained`. hub: the options of
        `resolve`.

    Raises:
        ValueError: the checkpoint cannot be read.
    """
    target = class_for(DiffusionPipeline, resolve(path_or_repo, **hub))
    if references_layout is not None:
        target = EDITORS.get(target.__name__, target)
    kept = target.task in AutoPipelineForImage2Image.served_by
    return kept or tasks.image_to_image in target.more_tasks


class _Auto:
    """The methods that the three classes share. Their results are instances of other classes."""

    task: ClassVar[Any]
    controlled: ClassVar[tuple[Any, ...]]
    distilled: ClassVar[Any] = None
    served_by: ClassVar[tuple[Any, ...]] = ()
    """Other tasks whose classes do what this one is for, and are kept."""

    @classmethod
    def from_pretrained(cls, path_or_repo: str | Path, **options: Any) -> DiffusionPipeline:
        """Loads a checkpoint for this task, as `DiffusionPipeline.from_pretrained` does.

        It takes the same options; with `controlnet=` the pipeline is the one with ControlNets, and
        with `references_layout=` the one that looks at images as LoRAs of Krea 2 and Z-Image do.

        Raises:
            ValueError: the checkpoint cannot be read, or diffusax has no such task for it.
        """
        names = ("revision", "token", "local_files_only", "cache_dir", "variant")
        hub = {k: v for k, v in options.items() if k in names} | hub_keywords(options)
        folder = resolve(path_or_repo, **hub)
        options.pop("force_download", None)
        target = class_for(DiffusionPipeline, folder)
        steered = options.get("controlnet") is not None
        if options.get("references_layout") is not None and target.__name__ in EDITORS:
            target = EDITORS[target.__name__]
        return cls.find_class(target, steered).from_pretrained(path_or_repo, **options)

    @classmethod
    def from_pipe(cls, pipe: Any, **components: Any) -> DiffusionPipeline:
        """Makes this task's pipeline of another's components; nothing is copied or compiled.

        A pipeline of PyTorch diffusers is converted first.
        """
        pipe = own_pipeline(DiffusionPipeline, pipe)
        origin = type(pipe)
        if cls.task is tasks.image_to_image and _looks_at_images(pipe):
            origin = EDITORS.get(origin.__name__, origin)
        steered = components.get("controlnet", getattr(pipe, "controlnet", None)) is not None
        if "controlnet" in components and components["controlnet"] is None:
            del components["controlnet"]
        return cls.find_class(origin, steered).from_pipe(pipe, **components)

    @classmethod
    def find_class(cls, origin: Any, steered: bool) -> Any:
        """Returns the task's class for the family of `origin`, distilled if `origin` is.

        origin: a class of pipelines. steered: whether the pipeline has ControlNets.

        Raises:
            ValueError: diffusax has no such task for the family.
        """
        if origin.task in cls.served_by and not steered:
            return origin
        wanted = cls.controlled if steered else (cls.task, cls.distilled)
        every = [getattr(classes, name) for name in classes.__all__]
        found = [
            c
            for c in every
            if c.family is origin.family and not {c.task, *c.more_tasks}.isdisjoint(wanted)
        ]
        if not found:
            name = wanted[0].__name__.replace("_", " ")
            raise ValueError(f"diffusax has no {name} for {origin.family.name}")
        distilled = [c for c in found if _is_distilled(c) == _is_distilled(origin)]
        return (distilled or found)[0]


def _looks_at_images(pipe: DiffusionPipeline) -> bool:
    """Returns whether a network of text to image, or a LoRA of it, has learned to look at some."""
    name = pipe.family.names("denoiser")[0]
    network = pipe.parts.networks.get(name)
    learned = network is not None and learned_layout(network) is not None
    return learned or lora_layout(pipe.adapters) is not None


def _is_distilled(cls: type) -> bool:
    return "Consistency" in cls.__name__


class AutoPipelineForText2Image(_Auto):
    """Generates images from prompts, with ControlNets if they are given."""

    task = staticmethod(tasks.text_to_image)
    controlled = (steering.control_text_to_image, flux.control)
    served_by = (flux.kontext, tasks.edit)


class AutoPipelineForImage2Image(_Auto):
    """Generates images from images, with ControlNets if they are given."""

    task = staticmethod(tasks.image_to_image)
    controlled = (steering.control_image_to_image,)
    distilled = staticmethod(tasks.consistency_image_to_image)
    served_by = (flux.kontext, tasks.edit, videos.image_to_video)


class AutoPipelineForInpainting(_Auto):
    """Inpaints images, with ControlNets if they are given."""

    task = staticmethod(inpainting.inpaint)
    controlled = (steering.control_inpaint,)
    # diffusers makes a FluxInpaintPipeline of FLUX.1 Fill, whose network sees the mask.
    served_by = (flux.fill,)
