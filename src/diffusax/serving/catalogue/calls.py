"""Turns requests into arguments of calls: checks them and fills in what they leave open."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from diffusax.images.conversion import resize
from diffusax.images.masks import blur, mask_of
from diffusax.images.reading import load_image
from diffusax.samplers import Scheduler, scheduler_from_name
from diffusax.serving.catalogue.entries import Checkpoint, FileEntry
from diffusax.serving.drawings.drawing import EDIT, IMAGE, INPAINT, TEXT, Drawing
from diffusax.serving.drawings.errors import Refused
from diffusax.serving.drawings.strength import check_strength, step_arguments
from diffusax.text.lora_tags import read_tags

_NEEDS = (
    ("mask_image", "image"),
    ("strength", "image"),
    ("mask_blur", "mask_image"),
    ("padding_mask_crop", "mask_image"),
)
"""Fields that mean nothing without another one."""
_ARTICLES = {TEXT: "text to image", IMAGE: "image to image", INPAINT: "inpainting", EDIT: "edits"}
_WITH_ETA = ("DDIMScheduler", "TCDScheduler")


def complete(
    checkpoint: Checkpoint, drawing: Drawing, controlnets: Mapping[str, FileEntry]
) -> Drawing:
    """Fills in the defaults of the model for all that a request leaves open.

    Its images become upright RGB. Without a mask, width and height are those of the image to start
    from, rounded down to a size that the model can generate, and the image gets this size.

    Args:
        checkpoint: the model.
        drawing: what to generate.
        controlnets: the ControlNets that it names, by name.

    Raises:
        Refused: the model cannot generate it; says why, and what the model can do.
    """
    drawing = _with_images(checkpoint, drawing)
    task = _task(checkpoint, drawing)
    if drawing.controls and task == EDIT:
        raise Refused(f"controls must be empty for {checkpoint.entry.name}", param="controls")
    _check_controls(checkpoint, drawing, controlnets)
    cls = _class(checkpoint, task, steered=bool(drawing.controls))
    own = checkpoint.defaults(cls)
    filled: dict[str, Any] = {
        name: own[name]
        for name in ("num_inference_steps", "guidance_scale", "strength", "image_guidance_scale")
        if getattr(drawing, name) is None and own.get(name) is not None
    }
    filled["sampler"] = _sampler(checkpoint, drawing.sampler)
    filled |= dict(zip(("width", "height"), _size(checkpoint, drawing)))
    drawing = dataclasses.replace(drawing, model=checkpoint.entry.name, **filled)
    if drawing.guidance_rescale and "guidance_rescale" not in own:
        raise Refused(
            f"guidance_rescale must be 0 for {_ARTICLES[task]} with {checkpoint.entry.name} "
            f"(got {drawing.guidance_rescale:g})",
            param="guidance_rescale",
        )
    _check_eta(checkpoint, drawing)
    check_strength(cls, drawing)
    return _resized(drawing)


def arguments(pipeline_class: Any, drawing: Drawing, scheduler: Scheduler) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call for one image of a completed request.

    The seed, the sampler and the adapters are left out, and the prompt is without the tags of
    LoRAs. A negative prompt is left out for pipelines that have none (consistency models).

    scheduler: the model's.
    """
    scheduler = scheduler_from_name(drawing.sampler or "", scheduler)
    own = step_arguments(pipeline_class, drawing, scheduler)
    return _taken(pipeline_class, {**_settings(drawing), **own, **_images(drawing)})


def adapters_of(drawing: Drawing) -> dict[str, Any]:
    """Returns the weights of the LoRAs that a request and its prompt name.

    Raises:
        Refused: a tag in the prompt cannot be read.
    """
    try:
        _, named = read_tags(drawing.prompt)
    except ValueError as error:
        raise Refused(str(error), param="prompt") from None
    return {**drawing.adapters, **named}


def _settings(drawing: Drawing) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": read_tags(drawing.prompt)[0],
        "negative_prompt": drawing.negative_prompt or None,
        "num_inference_steps": drawing.num_inference_steps,
        "eta": drawing.eta or None,
        "guidance_scale": drawing.guidance_scale,
        "guidance_rescale": drawing.guidance_rescale,
        "clip_skip": drawing.clip_skip,
        "long_prompt": drawing.long_prompt,
        "prompt_weighting": drawing.prompt_weighting,
        "height": drawing.height,
        "width": drawing.width,
        "image_guidance_scale": drawing.image_guidance_scale,
        "strength": drawing.strength,
        "padding_mask_crop": drawing.padding_mask_crop,
    }
    if drawing.controls:
        found["controlnet_conditioning_scale"] = _each(drawing, "scale")
        found["control_guidance_start"] = _each(drawing, "start")
        found["control_guidance_end"] = _each(drawing, "end")
    return found


def _images(drawing: Drawing) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if drawing.image is not None:
        found["image"] = drawing.image
    if drawing.mask_image is not None:
        mask = drawing.mask_image
        found["mask_image"] = blur(mask, drawing.mask_blur) if drawing.mask_blur else mask
    if drawing.controls:
        found["image" if drawing.task == TEXT else "control_image"] = _each(drawing, "image")
    return found


def _taken(pipeline_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a pipeline's call has and that have values."""
    known = inspect.signature(pipeline_class.__call__).parameters
    return {k: v for k, v in given.items() if k in known and v is not None}


def _each(drawing: Drawing, name: str) -> Any:
    values = [getattr(control, name) for control in drawing.controls]
    return values if len(values) > 1 else values[0]


def _with_images(checkpoint: Checkpoint, drawing: Drawing) -> Drawing:
    """Converts the images to the right modes and drops fields that the model lacks."""
    for name, needs in _NEEDS:
        if getattr(drawing, name) not in (None, 0, 0.0) and getattr(drawing, needs) is None:
            raise Refused(f"{name} needs {needs}; give both, or neither", param=name)
    images: dict[str, Any] = {}
    if drawing.image is not None:
        images["image"] = _read("image", drawing.image, load_image)
    if drawing.mask_image is not None:
        images["mask_image"] = _read("mask_image", drawing.mask_image, mask_of)
    controls = tuple(
        dataclasses.replace(control, image=_read("controls", control.image, load_image))
        for control in drawing.controls
    )
    if "mask_image" in images and images["mask_image"].size != images["image"].size:
        images["mask_image"] = images["mask_image"].resize(images["image"].size)
    edits = checkpoint.entry.kind == EDIT
    scale = drawing.image_guidance_scale if edits else None
    if edits and scale is None:
        scale = checkpoint.entry.image_guidance_scale
    return dataclasses.replace(drawing, controls=controls, image_guidance_scale=scale, **images)


def _read(name: str, image: Any, read: Callable[[Any], Any]) -> Any:
    """Reads an image. Refuses paths, which might come from a client."""
    if not isinstance(image, Image.Image):
        raise Refused(f"{name} must be a PIL image (got {type(image).__name__})", param=name)
    try:
        return read(image)
    except ValueError as error:
        raise Refused(str(error), param=name) from None


def _task(checkpoint: Checkpoint, drawing: Drawing) -> str:
    """Returns the task; raises Refused unless the model can do it."""
    entry, task = checkpoint.entry, drawing.task
    if task in entry.tasks:
        return task
    mend = {
        EDIT: "give it an image and no mask_image",
        INPAINT: "give it an image and a mask_image",
        IMAGE: "give it an image",
    }[entry.kind]
    named = "image" if drawing.image is None else "mask_image"
    raise Refused(
        f"model {entry.name!r} is made for {_ARTICLES[entry.kind]}, not for {_ARTICLES[task]}; "
        f"{mend}, or name another model",
        param=named,
    )


def _class(checkpoint: Checkpoint, task: str, *, steered: bool) -> Any:
    try:
        return checkpoint.pipeline_class(task, steered=steered)
    except ValueError as error:
        raise Refused(str(error), param="controls" if steered else "model") from None


def _check_controls(
    checkpoint: Checkpoint, drawing: Drawing, controlnets: Mapping[str, FileEntry]
) -> None:
    """Raises Refused for ControlNets that are made for another family of models."""
    for control in drawing.controls:
        width = controlnets[control.model].context_dim
        if None not in (width, checkpoint.context_dim) and width != checkpoint.context_dim:
            raise Refused(
                f"controls has {control.model!r}, which is made for models with text embeddings of "
                f"{width} numbers, and {checkpoint.entry.name!r} has {checkpoint.context_dim}; "
                "name one that fits it",
                param="controls",
            )
        if control.start >= control.end:
            raise Refused(
                f"controls must have a start below its end (got {control.start:g} and "
                f"{control.end:g})",
                param="controls",
            )


def _sampler(checkpoint: Checkpoint, name: str | None) -> str:
    """Returns the name of the sampler; raises Refused unless it suits the model."""
    if name is None:
        return checkpoint.entry.sampler
    try:
        scheduler_from_name(name, checkpoint.scheduler)
    except ValueError:
        raise Refused(
            f"sampler must be one that suits {checkpoint.entry.name!r} (got {name!r}); use one of "
            f"{', '.join(checkpoint.entry.samplers)}",
            param="sampler",
        ) from None
    return name


def _check_eta(checkpoint: Checkpoint, drawing: Drawing) -> None:
    """Raises Refused for an eta that the sampler would not read."""
    scheduler = scheduler_from_name(drawing.sampler or "", checkpoint.scheduler)
    if drawing.eta and scheduler.class_name not in _WITH_ETA:
        raise Refused(
            f"eta must be 0 for the sampler {drawing.sampler!r} (got {drawing.eta:g}); ddim and "
            "tcd have it",
            param="eta",
        )


def _size(checkpoint: Checkpoint, drawing: Drawing) -> tuple[int, int]:
    """Returns width and height in pixels."""
    entry, factor = checkpoint.entry, checkpoint.entry.multiple
    own = entry.width, entry.height
    if drawing.image is not None and drawing.padding_mask_crop is None:
        own = tuple(max(side // factor, 1) * factor for side in drawing.image.size)
    size = drawing.width or own[0], drawing.height or own[1]
    for name, value in zip(("width", "height"), size):
        if value < factor or value % factor:
            low = max(value // factor, 1) * factor
            raise Refused(
                f"{name} must be divisible by {factor} (got {value}); use {low} or {low + factor}",
                param=name,
            )
    return size


def _resized(drawing: Drawing) -> Drawing:
    """Resizes the image to start from to the size to generate, except for inpainting."""
    if drawing.task not in (IMAGE, EDIT):
        return drawing
    size = drawing.height or 0, drawing.width or 0
    try:
        image = resize(drawing.image, *size, mode="crop")
    except ValueError as error:
        raise Refused(str(error), param="image") from None
    return dataclasses.replace(drawing, image=image)
