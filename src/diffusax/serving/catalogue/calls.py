"""Turns requests into arguments of calls: checks them and fills in what they leave open."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from PIL import Image

from diffusax.images.conversion import resize
from diffusax.images.masks import blur, mask_of
from diffusax.images.reading import load_image
from diffusax.pipelines.components.loading import EDITORS
from diffusax.pipelines.tasks.tasks import consistency_image_to_image
from diffusax.samplers import Scheduler
from diffusax.serving.catalogue.entries import Checkpoint, FileEntry, arguments_of
from diffusax.serving.catalogue.video_calls import (
    fitted,
    shape_of_source,
    video_arguments,
    with_frames,
)
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import (
    EDIT,
    IMAGE,
    IMAGE_VIDEO,
    INPAINT,
    TEXT,
    TEXT_VIDEO,
    VIDEO_TASKS,
    VIDEO_VIDEO,
    Generation,
)
from diffusax.text.extra_networks import read_tags
from diffusax.text.prompt_schedules import with_whole_steps

_NEEDS = (
    ("mask_image", "image"),
    ("more_images", "image"),
    ("last_image", "image"),
    ("mask_video", "video"),
    ("strength", "image"),
    ("mask_blur", "mask_image"),
    ("masked_fill", "mask_image"),
    ("padding_mask_crop", "mask_image"),
)
"""Fields that mean nothing without another one."""
_ARTICLES = {
    **{TEXT: "text to image", IMAGE: "image to image", INPAINT: "inpainting", EDIT: "edits"},
    **{TEXT_VIDEO: "text to video", IMAGE_VIDEO: "image to video", VIDEO_VIDEO: "video to video"},
}
_AS_THEY_ARE = (
    *("num_inference_steps", "guidance_scale", "guidance_scale_2", "guidance_rescale", "clip_skip"),
    *("long_prompt", "prompt_weighting", "height", "width", "image_guidance_scale", "strength"),
    "padding_mask_crop",
)
"""Fields that are arguments of calls."""
_WITH_ETA = ("DDIMScheduler", "TCDScheduler")
_LESS_THAN_ALL = 0.999
"""A1111's largest strength, for which its last step is left."""


def complete(
    checkpoint: Checkpoint,
    generation: Generation,
    controlnets: Mapping[str, FileEntry],
    layout: str | None = None,
) -> Generation:
    """Fills in the defaults of the model for all that a request leaves open.

    Its images become upright RGB. Without a mask, width and height are those of the image to start
    from, rounded down to a size that the model can generate, and the image gets this size. A video
    has the shape of what it starts from, see `video_calls`.

    Args:
        checkpoint: the model.
        generation: what to generate.
        controlnets: the ControlNets that it names, by name.
        layout: that of the LoRAs that it names, see `FileEntry.references_layout`.

    Raises:
        Refused: the model cannot generate it; says why, and what the model can do.
    """
    generation = _with_images(checkpoint, with_frames(checkpoint, generation))
    task = _task(checkpoint, generation, layout)
    if generation.controls and task == EDIT:
        raise Refused(f"controls must be empty for {checkpoint.entry.name}", param="controls")
    _check_controls(checkpoint, generation, controlnets)
    cls = _class(checkpoint, task, steered=bool(generation.controls), layout=layout)
    own = checkpoint.defaults(cls)
    filled: dict[str, Any] = {
        name: own[name]
        for name in ("num_inference_steps", "guidance_scale", "strength", "image_guidance_scale")
        if getattr(generation, name) is None and own.get(name) is not None
    }
    filled["sampler"] = _sampler(checkpoint, generation)
    filled |= dict(zip(("width", "height"), _size(checkpoint, generation)))
    generation = dataclasses.replace(generation, model=checkpoint.entry.name, **filled)
    for name in ("guidance_rescale", "guidance_scale_2"):
        if getattr(generation, name) and name not in own:
            raise Refused(
                f"{name} must be left out for {_ARTICLES[task]} with {checkpoint.entry.name!r}",
                param=name,
            )
    check_strength(cls, generation)
    return _resized(checkpoint, generation)


def arguments(pipeline_class: Any, generation: Generation, scheduler: Scheduler) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call for one image of a completed request.

    The seed, the sampler and the adapters are left out, and the prompt is without the tags of
    LoRAs. A negative prompt is left out for pipelines that have none (consistency models).

    scheduler: the request's sampler.
    """
    own = step_arguments(pipeline_class, generation, scheduler)
    if generation.task in VIDEO_TASKS:
        own |= video_arguments(pipeline_class, generation)
    return _taken(pipeline_class, {**_settings(generation), **own, **_images(generation)})


def adapters_of(generation: Generation) -> dict[str, Any]:
    """Returns the weights of the LoRAs that a request and its prompt name.

    Raises:
        Refused: a tag in the prompt cannot be read.
    """
    try:
        _, named = read_tags(generation.prompt)
    except ValueError as error:
        raise Refused(str(error), param="prompt") from None
    return {**generation.adapters, **named}


def _settings(generation: Generation) -> dict[str, Any]:
    found: dict[str, Any] = {
        "prompt": read_tags(generation.prompt)[0],
        "negative_prompt": generation.negative_prompt or None,
        "eta": generation.eta or None,
        **{name: getattr(generation, name) for name in _AS_THEY_ARE},
    }
    if generation.controls:
        found["controlnet_conditioning_scale"] = _each(generation, "scale")
        found["control_guidance_start"] = _each(generation, "start")
        found["control_guidance_end"] = _each(generation, "end")
    return found


def _images(generation: Generation) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if generation.image is not None:
        more = generation.more_images
        found["image"] = [generation.image, *more] if more else generation.image
    if generation.mask_image is not None:
        mask = generation.mask_image
        found["mask_image"] = blur(mask, generation.mask_blur) if generation.mask_blur else mask
    if generation.controls:
        found["image" if generation.task == TEXT else "control_image"] = _each(generation, "image")
    return found


def _taken(pipeline_class: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments that a pipeline's call has and that have values."""
    known = arguments_of(pipeline_class)
    return {k: v for k, v in given.items() if k in known and v is not None}


def _each(generation: Generation, name: str) -> Any:
    values = [getattr(control, name) for control in generation.controls]
    return values if len(values) > 1 else values[0]


def _with_images(checkpoint: Checkpoint, generation: Generation) -> Generation:
    """Converts the images to the right modes and drops fields that the model lacks."""
    for name, needs in _NEEDS:
        off = getattr(generation, name) in (None, 0, 0.0, "image", ())
        if name == "strength" and generation.video is not None:
            continue
        if not off and getattr(generation, needs) is None:
            raise Refused(f"{name} needs {needs}; give both, or neither", param=name)
    images: dict[str, Any] = {}
    if generation.image is not None:
        images["image"] = _read("image", generation.image, load_image)
        more = [_read("image", image, load_image) for image in generation.more_images]
        images["more_images"] = tuple(more)
        _check_count(checkpoint, generation)
    if generation.last_image is not None:
        images["last_image"] = _read("last_image", generation.last_image, load_image)
    if generation.mask_image is not None:
        images["mask_image"] = _read("mask_image", generation.mask_image, mask_of)
    controls = tuple(
        dataclasses.replace(control, image=_read("controls", control.image, load_image))
        for control in generation.controls
    )
    if "mask_image" in images and images["mask_image"].size != images["image"].size:
        images["mask_image"] = images["mask_image"].resize(images["image"].size)
    edits = checkpoint.entry.kind == EDIT
    scale = generation.image_guidance_scale if edits else None
    if edits and scale is None:
        scale = checkpoint.entry.image_guidance_scale
    return dataclasses.replace(generation, controls=controls, image_guidance_scale=scale, **images)


def _check_count(checkpoint: Checkpoint, generation: Generation) -> None:
    """Raises Refused for more images than the model looks at, or beside a mask."""
    count, name = 1 + len(generation.more_images), checkpoint.entry.name
    most = checkpoint.entry.images if generation.mask_image is None else 1
    if count > most:
        task = "with a mask" if most == 1 and generation.mask_image is not None else "together"
        raise Refused(
            f"image must be given at most {most} times for {name!r} {task} (got {count})",
            param="image",
        )


def _read(name: str, image: Any, read: Callable[[Any], Any]) -> Any:
    """Reads an image. Refuses paths, which might come from a client."""
    if not isinstance(image, Image.Image):
        raise Refused(f"{name} must be a PIL image (got {type(image).__name__})", param=name)
    try:
        return read(image)
    except ValueError as error:
        raise Refused(str(error), param=name) from None


def _task(checkpoint: Checkpoint, generation: Generation, layout: str | None) -> str:
    """Returns the task; raises Refused unless the model can do it."""
    entry, task = checkpoint.entry, generation.task
    looks = task == IMAGE and layout is not None and checkpoint.origin.__name__ in EDITORS
    if task in entry.tasks or looks:
        return task
    mend = {
        EDIT: "give it an image and no mask_image",
        INPAINT: "give it an image and a mask_image",
        IMAGE: "give it an image",
        IMAGE_VIDEO: "give it an image",
        TEXT_VIDEO: "give it a prompt alone",
    }[entry.kind]
    named = "image" if generation.image is None else "mask_image"
    if task in VIDEO_TASKS:
        named = "image" if generation.video is None else "video"
    raise Refused(
        f"model {entry.name!r} is made for {_ARTICLES[entry.kind]}, not for {_ARTICLES[task]}; "
        f"{mend}, or name another model",
        param=named,
    )


def _class(checkpoint: Checkpoint, task: str, *, steered: bool, layout: str | None) -> Any:
    try:
        return checkpoint.pipeline_class(task, steered=steered, layout=layout)
    except ValueError as error:
        raise Refused(str(error), param="controls" if steered else "model") from None


def _check_controls(
    checkpoint: Checkpoint, generation: Generation, controlnets: Mapping[str, FileEntry]
) -> None:
    """Raises Refused for ControlNets that are made for another family of models."""
    for control in generation.controls:
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


def _sampler(checkpoint: Checkpoint, generation: Generation) -> str:
    """Returns the name of the sampler; raises Refused unless it suits the model and reads eta."""
    own = generation.sampler
    name = checkpoint.entry.sampler if own is None else own
    try:
        scheduler = checkpoint.sampler(name)
    except ValueError:
        raise Refused(
            f"sampler must be one that suits {checkpoint.entry.name!r} (got {name!r}); use one of "
            f"{', '.join(checkpoint.entry.samplers)}",
            param="sampler",
        ) from None
    if generation.eta and scheduler.class_name not in _WITH_ETA:
        raise Refused(
            f"eta must be 0 for the sampler {name!r} (got {generation.eta:g}); ddim and tcd have "
            "it",
            param="eta",
        )
    return name


def _size(checkpoint: Checkpoint, generation: Generation) -> tuple[int, int]:
    """Returns width and height in pixels."""
    entry, factor = checkpoint.entry, checkpoint.entry.multiple
    own = entry.width, entry.height
    if entry.fps is not None:
        own = shape_of_source(checkpoint, generation)
    elif generation.image is not None and generation.padding_mask_crop is None:
        own = tuple(max(side // factor, 1) * factor for side in generation.image.size)
    size = generation.width or own[0], generation.height or own[1]
    for name, value in zip(("width", "height"), size):
        if value < factor or value % factor:
            low = max(value // factor, 1) * factor
            raise Refused(
                f"{name} must be divisible by {factor} (got {value}); use {low} or {low + factor}",
                param=name,
            )
    return size


def _resized(checkpoint: Checkpoint, generation: Generation) -> Generation:
    """Resizes the image to start from to the size to generate, except for inpainting."""
    if generation.task in VIDEO_TASKS:
        return fitted(checkpoint, generation)
    if generation.task not in (IMAGE, EDIT):
        return generation
    size = generation.height or 0, generation.width or 0
    try:
        image = resize(generation.image, *size, mode="crop")
    except ValueError as error:
        raise Refused(str(error), param="image") from None
    return dataclasses.replace(generation, image=image)


def check_strength(pipeline_class: Any, generation: Generation) -> None:
    """Raises Refused where diffusers' rule leaves no step of a completed request."""
    steps, strength = generation.num_inference_steps, generation.strength
    if not _begins_late(pipeline_class, generation) or generation.strength_rule != "diffusers":
        return
    first_step = pipeline_class.family.start.first_step
    if steps and strength is not None and first_step(steps, strength) >= steps:
        raise Refused(
            f"strength leaves none of num_inference_steps={steps} (got {strength:g}); use a "
            f"strength of at least {1 / steps:.3g}, or more steps",
            param="strength",
        )


def step_arguments(
    pipeline_class: Any, generation: Generation, scheduler: Scheduler
) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call that run a request's steps.

    These are the number of steps and the strength, and for a schedule that is longer than the run
    prompts whose changes are counted in its steps. Where a strength would need a schedule of more
    steps than the network was trained for, fewer steps than all are run.

    Source: stable-diffusion-webui, modules/sd_samplers_common.py, setup_img2img_steps.

    Args:
        pipeline_class: the class of the pipeline.
        generation: the completed request.
        scheduler: its sampler.
    """
    steps, strength = generation.num_inference_steps, generation.strength
    most = scheduler.num_train_timesteps
    plain: dict[str, Any] = {"num_inference_steps": steps, "strength": strength}
    rule = generation.strength_rule
    if rule == "diffusers" or not steps or strength is None:
        return plain
    if not _begins_late(pipeline_class, generation):
        return plain
    part = min(strength, _LESS_THAN_ALL)
    if rule == "webui":
        whole, last = steps, int(part * steps) + 1
    elif steps <= part * most:
        whole, last = int(steps / part), steps
    else:
        whole, last = most, min(max(int(part * most), 1), steps)
    # Half a step away from where a part of a step would count as one more or less.
    halves, first_step = (last - 0.5, last + 0.5), pipeline_class.family.start.first_step
    strengths = [min(half / whole, 1.0) for half in halves]
    (kept,) = [s for s in strengths if whole - first_step(whole, s) == last][:1]
    own = {"num_inference_steps": whole, "strength": kept}
    return own if rule == "webui" else {**own, **_prompts(generation, steps * scheduler.order)}


def _prompts(generation: Generation, steps: int) -> dict[str, str]:
    """Returns the prompts with their changes counted in steps."""
    texts = {
        "prompt": read_tags(generation.prompt)[0],
        "negative_prompt": generation.negative_prompt,
    }
    return {name: with_whole_steps(text, steps) for name, text in texts.items() if text}


def _begins_late(pipeline_class: Any, generation: Generation) -> bool:
    """Returns whether the run leaves out the first steps of its sampler."""
    return generation.task in (IMAGE, INPAINT, VIDEO_VIDEO) and (
        pipeline_class.task is not consistency_image_to_image
    )
