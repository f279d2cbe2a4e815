"""Requests for videos: checks what only they have, and fills in frames, frame rate and size."""

import dataclasses
from typing import Any

from PIL import Image

from diffusax.images.clips import Clip
from diffusax.images.conversion import resize
from diffusax.images.masks import mask_of
from diffusax.serving.catalogue.entries import Checkpoint, ModelEntry
from diffusax.serving.catalogue.video_models import looks_at_all
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import IMAGE_VIDEO, Generation

_OF_VIDEOS = ("video", "mask_video", "last_image", "num_frames", "fps", "guidance_scale_2")
_OF_IMAGES = ("mask_image", "controls", "padding_mask_crop")
"""Fields that models of videos lack."""
_OF_SOME = {
    "last_image": "whose videos end with no given image",
    "mask_video": "which reads no mask of a video; name a model of VACE",
    "guidance_scale_2": "which has one transformer",
}
"""Fields that only some models of videos have, and what the others are."""
_RATES = 1, 240


def with_frames(checkpoint: Checkpoint, generation: Generation) -> Generation:
    """Checks the fields of videos, and fills in the number of frames and the frame rate.

    A video to start from says both where the request leaves them open. Nothing is filled in for
    models of images.

    Raises:
        Refused: the model lacks a field, or cannot generate so many frames.
    """
    entry = checkpoint.entry
    if entry.fps is None:
        for name in _OF_VIDEOS:
            if getattr(generation, name) is not None:
                raise Refused(
                    f"{name} must be left out for {entry.name!r}, which generates images; or name "
                    "a model that generates videos",
                    param=name,
                )
        return generation
    for name in _OF_IMAGES:
        if getattr(generation, name) not in (None, ()):
            raise Refused(
                f"{name} must be left out for {entry.name!r}, which generates videos", param=name
            )
    _check_inputs(entry, generation)
    if generation.image is not None and generation.video is not None:
        _check_both(checkpoint)
    clip = _clip(generation)
    rate = entry.fps if clip is None or not clip.fps else round(clip.fps)
    fps = generation.fps or min(max(rate, _RATES[0]), _RATES[1])
    count = _count(entry, generation)
    _check_mask(generation, count)
    return dataclasses.replace(generation, num_frames=count, fps=fps)


def shape_of_source(checkpoint: Checkpoint, generation: Generation) -> tuple[int, int]:
    """Returns the width and height of a video that has the shape of what it starts from.

    It has about as many pixels as the model's own size, as in diffusers' examples of Wan. Images
    that VACE looks at say nothing of it.
    """
    entry = checkpoint.entry
    own, clip = (entry.width, entry.height), _clip(generation)
    if clip is not None:
        source = clip.size
    elif generation.image is not None and not looks_at_all(checkpoint.origin):
        source = generation.image.size
    else:
        return own
    scale = (own[0] * own[1] / (source[0] * source[1])) ** 0.5
    width, height = (max(round(s * scale) // entry.multiple, 1) * entry.multiple for s in source)
    return width, height


def fitted(checkpoint: Checkpoint, generation: Generation) -> Generation:
    """Cuts a completed request's video to its frames, and makes what it starts from its size."""
    size = generation.height or 0, generation.width or 0
    clip = _clip(generation)
    try:
        if clip is not None:
            frames = clip.frames[: generation.num_frames]
            whole = tuple(resize(frame, *size, mode="crop") for frame in frames)
            mask = _fitted_mask(generation, clip, size)
            return dataclasses.replace(generation, video=Clip(whole, clip.fps), mask_video=mask)
        if generation.task == IMAGE_VIDEO and not looks_at_all(checkpoint.origin):
            image, last = generation.image, generation.last_image
            ends = None if last is None else resize(last, *size, mode="crop")
            begins = resize(image, *size, mode="crop")
            return dataclasses.replace(generation, image=begins, last_image=ends)
    except ValueError as error:
        raise Refused(str(error), param="image" if clip is None else "video") from None
    return generation


def video_arguments(pipeline_class: Any, generation: Generation) -> dict[str, Any]:
    """Returns the arguments of a pipeline's call that only videos have."""
    clip = _clip(generation)
    found: dict[str, Any] = {"num_frames": generation.num_frames, "output_type": "pil"}
    found["last_image"] = generation.last_image
    if clip is not None:
        found["video"] = list(clip.frames)
    if generation.mask_video is not None:
        found["mask"] = list(generation.mask_video.frames)
    if generation.image is not None and looks_at_all(pipeline_class):
        found["reference_images"] = [generation.image, *generation.more_images]
    return found


def _clip(generation: Generation) -> Clip | None:
    clip = generation.video
    if clip is not None and not isinstance(clip, Clip):
        raise Refused(f"video must be a Clip (got {type(clip).__name__})", param="video")
    return clip


def _check_inputs(entry: ModelEntry, generation: Generation) -> None:
    """Raises Refused for a field that the model lacks, or one that it needs and that is missing."""
    for name, why in _OF_SOME.items():
        if getattr(generation, name) is not None and not getattr(entry, name):
            raise Refused(f"{name} must be left out for {entry.name!r}, {why}", param=name)
    ends = generation.image is None or generation.last_image is not None
    if entry.needs_last_image and not ends:
        raise Refused(
            f"last_image must be given for {entry.name!r}, which generates what is between two "
            "images",
            param="last_image",
        )


def _check_mask(generation: Generation, count: int) -> None:
    """Raises Refused for a mask that is none, or a video of fewer frames than are generated."""
    mask = generation.mask_video
    if not isinstance(mask, Clip | Image.Image | None):
        raise Refused(
            f"mask_video must be a Clip or a PIL image (got {type(mask).__name__})",
            param="mask_video",
        )
    if isinstance(mask, Clip) and len(mask.frames) < count:
        raise Refused(
            f"mask_video must have the {count} frames of the video (got {len(mask.frames)}); send "
            "as many, or one image for all",
            param="mask_video",
        )


def _fitted_mask(generation: Generation, clip: Clip, size: tuple[int, int]) -> Clip | None:
    """Returns the mask of each frame of a completed request's video, cut like this."""
    mask, count = generation.mask_video, generation.num_frames or 1
    if mask is None:
        return None
    given = mask.frames[:count] if isinstance(mask, Clip) else (mask,)
    greys = [mask_of(frame).resize(clip.size) for frame in given]
    cut = [resize(grey.convert("RGB"), *size, mode="crop") for grey in greys]
    return Clip(tuple(cut if isinstance(mask, Clip) else cut * count), clip.fps)


def _check_both(checkpoint: Checkpoint) -> None:
    if not looks_at_all(checkpoint.origin):
        raise Refused(
            f"image and video cannot be given together for {checkpoint.entry.name!r}; leave one "
            "out, or name a model of VACE",
            param="image",
        )


def _count(entry: ModelEntry, generation: Generation) -> int:
    """Returns the number of frames; raises Refused where there can be none such."""
    count, step, clip = generation.num_frames, entry.frames_multiple or 1, _clip(generation)
    if count is None:
        count = entry.num_frames or 1
        most = count if clip is None else min(count, len(clip.frames))
        return most - (most - 1) % step
    if count % step != 1 % step:
        low = max((count - 1) // step, 0) * step + 1
        raise Refused(
            f"num_frames must be one more than a multiple of {step} (got {count}); use {low} or "
            f"{low + step}",
            param="num_frames",
        )
    if clip is not None and count > len(clip.frames):
        raise Refused(
            f"num_frames must be at most the {len(clip.frames)} frames of video (got {count})",
            param="num_frames",
        )
    return count
