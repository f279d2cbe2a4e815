"""Inpainting: generates images anew where a mask is white."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from diffusax.images.masks import apply_overlay, get_crop_region, to_mask
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import DecoderCondition, Images, Inpainting, PreparedRun
from diffusax.pipelines.run import programs
from diffusax.pipelines.run.images import check_latents
from diffusax.pipelines.tasks.prompts import prompt_for_each_image
from diffusax.pipelines.tasks.references import with_inpainted
from diffusax.pipelines.tasks.setup import (
    are_latents,
    image_size,
    pixel_size,
    require_channels,
    set_up,
)
from diffusax.pipelines.tasks.tasks import (
    check_count,
    encode,
    noised,
    prepare_run,
    read_pixels,
    required,
)
from diffusax.runtime.random.noise import Noise, TorchNoise


def inpaint(c: Components, call: Call) -> PreparedRun:
    """Prepares a run that generates images anew where the mask is white.

    A network with as many input channels as the latents keeps the rest of the image by replacing it
    after each row; one with more is given the mask and the masked image beside the latents. A
    denoiser that looks at images looks at the one to inpaint, and at those in image_reference.
    """
    call = c.family.inpaint.resize(c, prompt_for_each_image(call), image_size)
    size = height, width = _inpainted_size(c, call)
    setup = set_up(c, call, size, from_image=True)
    # diffusers puts the image back without noise after the last row, also where denoising_end or
    # the sampler leaves some (pipeline_stable_diffusion_xl_inpaint.py, the denoising loop).
    setup = dataclasses.replace(setup, schedule=setup.schedule.ending_clean)
    b, shape, schedule, noise = setup.images, setup.shape, setup.schedule, setup.noise
    crop = crop_options(call, height, width)
    pixels = read_pixels(c, call, height, width, **crop)
    crop_mask: dict[str, Any] = {**crop, "factor": c.latents.multiple}
    mask = to_mask(required(call, "mask_image"), height, width, **crop_mask)
    own_channels = c.denoiser.in_channels == shape[-1]
    if not own_channels:
        require_channels(c, 2 * shape[-1] + 1, "inpainting")

    given = None
    if call.latents is not None:
        given = check_latents(c.latents, call.latents, b, *shape[:2])
    whole = call.denoising_start is None and c.family.start.is_noise(call.strength)
    clean = eps = None
    if given is not None:
        eps = c.family.inpaint.noise(given, lambda: noise.draw("start", shape))
    if own_channels or (given is None and not whole):
        clean = encode(c, noise, pixels, b, normalize=c.family.inpaint.normalizes)
    if eps is None:
        eps = noise.draw("start", shape)
    check_count(mask, b, "mask_image")
    small = c.family.inpaint.shrink(mask, *shape[:2])
    small = np.tile(small, (b // len(mask), 1, 1, 1))
    if call.masked_fill is not None and clean is not None:
        # Source: stable-diffusion-webui, modules/processing.py, inpainting_fill.
        clean = clean * (1 - small) + (eps * small if call.masked_fill == "noise" else 0)
    if call.denoising_start is not None:
        x = clean
    elif whole or given is not None:
        x = eps if given is None else given
        x = programs.initial_latents(x, np.float32(schedule.init_noise_sigma), None, None)
    else:
        x = noised(schedule, clean, eps)

    own: dict[str, Any] = {}
    if own_channels:
        own["inpainting"] = Inpainting(small, clean, eps)
        encodes = call.masked_image_latents is None and not are_latents(pixels)
        if encodes and isinstance(noise, TorchNoise):
            # diffusers encodes the masked image in any case, which may take random numbers.
            count = max(len(pixels), len(mask))
            c.family.encoding(functools.partial(noise.draw, "masked", shape), count, count)
    else:
        masked = _masked_latents(c, call, noise, pixels, mask, b)
        own["channels"] = programs.join_channels(small, masked)
    run = prepare_run(setup, x, **own)
    run = with_inpainted(c, call, run, clean)
    shown = None if call.output_type == "latent" else c.family.inpaint.decoder(c, pixels, mask)
    if shown is not None:
        shown = DecoderCondition(*(np.tile(x, (b // len(x), 1, 1, 1)) for x in shown))
    overlay = _overlay(call, crop["crops_coords"]) if call.padding_mask_crop is not None else None
    return dataclasses.replace(run, decoder_condition=shown, overlay=overlay)


def crop_options(call: Call, height: int, width: int) -> dict[str, Any]:
    """Returns how images and masks are resized: as a whole, or cropped around the masked region."""
    if call.padding_mask_crop is None:
        return {"resize_mode": "default", "crops_coords": None}
    for name in ("image", "mask_image"):
        if not hasattr(getattr(call, name), "convert"):
            raise ValueError(f"{name} must be a PIL image where padding_mask_crop is given")
    if call.output_type != "pil":
        raise ValueError(
            f"output_type must be 'pil' where padding_mask_crop is given (got {call.output_type!r})"
        )
    coords = get_crop_region(call.mask_image, width, height, pad=call.padding_mask_crop)
    return {"resize_mode": "fill", "crops_coords": coords}


def _masked_latents(
    c: Components, call: Call, noise: Noise, pixels: np.ndarray, mask: np.ndarray, b: int
) -> Any:
    """Returns the latents of the image with the masked region blanked, b h w z."""
    if call.masked_image_latents is not None:
        given, name = call.masked_image_latents, "masked_image_latents"
        n = len(given) if getattr(given, "shape", ()) else b
        given = check_latents(
            c.latents, given, n, *c.latents.shape(*mask.shape[1:3])[:2], name=name
        )
        check_count(given, b, name)
        return programs.tile(given, b)
    if are_latents(pixels):
        raise ValueError(
            "masked_image_latents must be given where image is latents and the network takes the "
            "masked image"
        )
    return encode(c, noise, pixels * (mask < 0.5), b, purpose="masked")


def _inpainted_size(c: Components, call: Call) -> tuple[int, int]:
    """Returns height and width of the images to inpaint, by default the first image's own."""
    if call.height and call.width:
        return image_size(c, call)
    own = pixel_size(c, read_pixels(c, call, call.height, call.width))
    size = dataclasses.replace(call, height=call.height or own[0], width=call.width or own[1])
    return image_size(c, size)


def _overlay(call: Call, coords: Any) -> Callable[[Images], Images]:
    """Returns a function that pastes generated crops back into the original image."""
    return lambda images: [
        apply_overlay(call.mask_image, call.image, image, coords) for image in images
    ]
