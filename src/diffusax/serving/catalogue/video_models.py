"""What models of videos can do: their kinds, their tasks, and the class of pipelines of each."""

from pathlib import Path
from typing import Any, Literal

from diffusax.pipelines import classes
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.families.wan import LOW_NOISE
from diffusax.pipelines.tasks.tasks import text_to_image
from diffusax.pipelines.tasks.videos import control_video, image_to_video, video_to_video

VideoTask = Literal["text-to-video", "image-to-video", "video-to-video"]
_TASKS: dict[str, Any] = {
    "text-to-video": text_to_image,
    "image-to-video": image_to_video,
    "video-to-video": video_to_video,
}
"""The pipelines' tasks by those of videos; VACE's does all of them."""


def video_kind(parts: Components, source: str | Path) -> VideoTask:
    """Finds the kind of a model by the input channels of its network.

    Raises:
        ValueError: it is none of them.
    """
    latent, channels = parts.latents.channels, parts.denoiser.in_channels
    if channels not in (latent, 2 * latent + parts.latents.frames):
        raise ValueError(
            f"{source} has a network of {channels} input channels, which is made for no task here"
        )
    return "text-to-video" if channels == latent else "image-to-video"


def video_tasks(parts: Components, origin: Any, kind: VideoTask) -> tuple[VideoTask, ...]:
    """Returns the tasks of a model, of which not all look at an image.

    Args:
        parts: its networks without parameters.
        origin: the class of pipelines that its checkpoint names.
        kind: its kind.
    """
    if kind == "image-to-video":
        return (kind,)
    looks = looks_at_all(origin) or parts.options.get("expand_timesteps")
    return "text-to-video", *(("image-to-video",) if looks else ()), "video-to-video"  # type: ignore[return-value]


def video_inputs(parts: Components, origin: Any, kind: str) -> dict[str, bool]:
    """Returns which of the inputs that only some models of videos have a model has, by name.

    A network that reads CLIP's states of a first image alone was not trained with a last one.

    Args:
        parts: its networks without parameters.
        origin: the class of pipelines that its checkpoint names.
        kind: its kind, also one of images.
    """
    ends = needs = False
    if kind == "image-to-video" and not parts.options.get("expand_timesteps"):
        config = parts.denoiser.network.config
        needs = config.pos_embed_seq_len is not None
        ends = needs or config.image_dim is None
    return {
        "last_image": ends,
        "needs_last_image": needs,
        "mask_video": looks_at_all(origin),
        "guidance_scale_2": LOW_NOISE in parts.denoiser.components,
    }


def looks_at_all(pipeline_class: Any) -> bool:
    """Returns whether a class of pipelines, as VACE's, is shown videos and images alike."""
    return bool(pipeline_class.task is control_video)


def video_class(origin: Any, task: str, *, steered: bool) -> Any:
    """Returns the class of pipelines that generates videos for a task.

    Args:
        origin: the class that the checkpoint names.
        task: one of the model's tasks.
        steered: whether there are ControlNets.

    Raises:
        ValueError: there are, and no model of videos here has some.
    """
    if steered:
        raise ValueError(f"diffusax has no ControlNets for {origin.family.name}")
    wanted = _TASKS[task]
    if origin.task is wanted or looks_at_all(origin):
        return origin
    every = [getattr(classes, name) for name in classes.__all__]
    return next(c for c in every if c.task is wanted and c.__bases__ == origin.__bases__)
