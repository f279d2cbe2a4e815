"""Images that a denoiser looks at while it generates others."""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image

from diffusax.images.conversion import Box, to_pixels
from diffusax.images.references import as_images, reference_images
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import PreparedRun
from diffusax.pipelines.run import autoencoding, programs
from diffusax.pipelines.run.images import encode_pixels
from diffusax.pipelines.tasks.setup import are_latents


def with_references(c: Components, call: Call, run: PreparedRun) -> PreparedRun:
    """Returns a run whose denoiser looks at the call's images, in a family that has such images.

    Raises:
        ValueError: an image cannot be read, is too small or too narrow.
    """
    edits, multiple = c.family.edits, c.latents.multiple
    images = edits.references(call, multiple)
    run = looking_at(run, [_encoded(c, pixels) for pixels in images])
    box = edits.kept_part(call, multiple)
    if box is None or call.output_type == "latent":
        return run
    return dataclasses.replace(run, overlay=functools.partial(cropped, call.output_type, box))


def sized_by_first(c: Components, call: Call) -> Call:
    """Returns a call with the height and width of its first image to look at, if it lacks them.

    Raises:
        ValueError: the image cannot be read.
    """
    if call.image is None or (call.height and call.width):
        return call
    alone = dataclasses.replace(call, image=as_images(call.image)[0])
    (first,) = c.family.edits.references(alone, c.latents.multiple)
    height, width = first.shape[1:3]
    return dataclasses.replace(call, height=call.height or height, width=call.width or width)


def cropped(output_type: str, box: Box, images: Any) -> Any:
    """Returns the part of images of an output type that is in a box."""
    left, top, right, bottom = box
    match output_type:
        case "pil":
            return [image.crop(box) for image in images]
        case "pt":
            return images[..., top:bottom, left:right]
    return images[:, top:bottom, left:right]


def with_inpainted(c: Components, call: Call, run: PreparedRun, clean: Any) -> PreparedRun:
    """Returns a run that looks at the image to inpaint and at those in image_reference, if any.

    Several of the latter are looked at for each image; as many as there are images to generate are
    one for each.

    clean: the latents of the image to inpaint, b h w c.
    """
    maps = list(c.family.edits.inpainted(clean))
    if call.image_reference is not None:
        maps += _reference_maps(c, call, len(clean))
    return looking_at(run, maps)


def looking_at(run: PreparedRun, maps: Sequence[jax.Array]) -> PreparedRun:
    """Returns a run whose denoiser looks at images. maps: their latents, 1 or b h w c each."""
    if not maps:
        return run
    conditions = run.plan.conditions
    count = len(conditions.context)
    whole = [x if len(x) == count else programs.tile(x, count) for x in maps]
    added = {"references": tuple(x.astype(np.float32)[:, None] for x in whole)}
    conditions = conditions._replace(added={**(conditions.added or {}), **added})
    return dataclasses.replace(run, plan=run.plan._replace(conditions=conditions))


def _reference_maps(c: Components, call: Call, b: int) -> list[jax.Array]:
    """Returns the latents of the images in image_reference, 1 or b h w c each."""
    images = as_images(call.image_reference)
    if all(isinstance(image, str | Path | Image.Image) for image in images):
        pixels = reference_images(images, c.latents.multiple)
    else:
        channels, factor = c.latents.channels, c.latents.multiple
        pixels = to_pixels(call.image_reference, factor=factor, latent_channels=channels)
    if are_latents(pixels):
        found = autoencoding.normalized(c.autoencoder, c.autoencoder_params, pixels)
    else:
        found = _encoded(c, pixels)
    return [found] if len(found) in (1, b) else [found[i : i + 1] for i in range(len(found))]


def _encoded(c: Components, pixels: Any) -> jax.Array:
    """Returns the mode of the latents of images n H W 3, n h w c."""
    options = {"upcast": c.latents.upcast, "normalize": c.latents.normalize}
    return encode_pixels(c, pixels, None, **options)
