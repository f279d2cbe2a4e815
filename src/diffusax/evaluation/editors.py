"""Calls the pipelines that edit images, each as it wants to be called, in batches."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from PIL import Image

from diffusax.batch.image import count_shares
from diffusax.batch.running_batch import RunningBatch
from diffusax.evaluation.edits import Edit, EditSettings
from diffusax.pipelines.families.policies import References

Editor = Callable[[Sequence[Edit], float | None], list[Image.Image]]
"""A function (edits of one size, image guidance or None) -> the images after the edits."""


@contextlib.contextmanager
def opened_editor(pipe: Any, settings: EditSettings) -> Iterator[Editor]:
    """Yields the function that edits with a pipeline.

    InstructPix2Pix takes a batch in one call. Pipelines that look at images show each prompt all
    images of a call; there each edit is a call of its own, and they share a running batch.

    Args:
        pipe: an InstructPix2Pix pipeline, or one that looks at images, such as FLUX.1 Kontext's.
        settings: the guidance, steps and batch size.

    Raises:
        ValueError: the pipeline does not edit images, or lacks an option.
    """
    if not looks_at_images(pipe):
        check_guided_by_image(pipe)
        yield lambda edits, scale: edit_batch(pipe, edits, settings, scale)
        return
    if settings.image_guidance:
        raise ValueError(
            f"image_guidance={settings.image_guidance} does nothing for {type(pipe).__name__}, "
            "which looks at images; leave it out"
        )
    options = _options(pipe, settings)
    with RunningBatch(pipe, lanes=_lanes(pipe, settings.batch_size)) as running:

        def edit(edits: Sequence[Edit], scale: float | None) -> list[Image.Image]:
            futures = [running.submit(**_call(pipe, edit), **options) for edit in edits]
            return [future.result().images[0] for future in futures]

        yield edit


def looks_at_images(pipe: Any) -> bool:
    """Returns whether a pipeline's denoiser looks at the images that a call gives it to edit."""
    others = {"strength", "mask_image", "control_image"}
    names = set(inspect.signature(type(pipe).__call__).parameters)
    return isinstance(pipe.family.edits, References) and "image" in names and not names & others


def check_guided_by_image(pipe: Any) -> None:
    """Raises ValueError where a pipeline is none of InstructPix2Pix's."""
    if "image_guidance_scale" not in inspect.signature(type(pipe).__call__).parameters:
        raise ValueError(
            f"{type(pipe).__name__} does not edit images by instructions; give a checkpoint of "
            "InstructPix2Pix, FLUX.1 Kontext, FLUX.2 or FLUX.3 klein, or Qwen-Image-Edit"
        )


def edit_batch(
    pipe: Any, batch: Sequence[Edit], settings: EditSettings, image_guidance: float | None = None
) -> list[Image.Image]:
    """Returns InstructPix2Pix's images of a batch, which is filled up to be of one shape."""
    filled = [*batch, *[batch[-1]] * (settings.batch_size - len(batch))]
    width, height = batch[0].image.size
    size = pipe.family.edits.resize.keeping(height, width)
    negative = settings.negative_prompt
    given = {
        "negative_prompt": None if negative is None else [negative] * len(filled),
        "num_inference_steps": settings.steps,
        "guidance_scale": settings.guidance,
        "image_guidance_scale": image_guidance,
    }
    images = pipe(
        [edit.instruction for edit in filled],
        image=[edit.image for edit in filled],
        seed=[edit.seed for edit in filled],
        **{name: value for name, value in given.items() if value is not None},
        **size,
    ).images
    return list(images[: len(batch)])


def _call(pipe: Any, edit: Edit) -> dict[str, Any]:
    """Returns the arguments of one edit's call, whose result has the size of its image."""
    width, height = edit.image.size
    names = inspect.signature(type(pipe).__call__).parameters
    sizes = {"height": height, "width": width}
    # Kontext's height and width are a shape, and its images come in sizes of its own by default.
    area = {"max_area": height * width, "_auto_resize": False}
    images = list(edit.images)
    return {
        "prompt": edit.instruction,
        "image": images if len(images) > 1 else images[0],
        "seed": edit.seed,
        **sizes,
        **{name: value for name, value in area.items() if name in names},
    }


def _options(pipe: Any, settings: EditSettings) -> dict[str, Any]:
    """Returns the arguments that all calls share.

    Raises:
        ValueError: a negative prompt is given that the pipeline would not read.
    """
    names = inspect.signature(type(pipe).__call__).parameters
    guidance, negative = settings.guidance, settings.negative_prompt
    guided = "true_cfg_scale" in names and names["true_cfg_scale"].default > 1
    if negative is not None and ("true_cfg_scale" in names) != guided:
        raise ValueError(
            f"{type(pipe).__name__} reads no negative_prompt, as it is guided by an input of its "
            "network; leave it out"
        )
    if guidance is None and guided:
        # Without a negative prompt, Qwen-Image-Edit's own scale would guide nothing.
        guidance = names["true_cfg_scale"].default
    given = {
        **{name: value for name, value in pipe.call_defaults.items() if name in names},
        "num_inference_steps": settings.steps,
        "guidance_scale": guidance,
        "negative_prompt": negative,
    }
    if negative is not None and "negative_prompt" not in names:
        raise ValueError(f"{type(pipe).__name__} has no negative_prompt; leave it out")
    return {name: value for name, value in given.items() if value is not None and name in names}


def _lanes(pipe: Any, images: int) -> int:
    """Returns the entries of a running batch for so many images: a power of two for each device."""
    devices = count_shares(pipe.mesh)
    share = max(4, -(-2 * images // devices))
    return devices * 2 ** (share - 1).bit_length()
