"""Turns A1111's calls into `Generation`s."""

import dataclasses
import re
import secrets
from typing import Any

from PIL import Image, ImageFilter, ImageOps

from diffusax.images.conversion import resize
from diffusax.images.masks import mask_of
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import SEEDS, Generation, check_seed
from diffusax.serving.web.a1111.controlnet import fit, read_controls
from diffusax.serving.web.a1111.fields import ImageToImage, Shared, TextToImage
from diffusax.serving.web.a1111.missing import check_present, from_webui, with_noise
from diffusax.serving.web.a1111.state import Options
from diffusax.serving.web.images import as_rgb, image_from_base64
from diffusax.serving.web.settings import WebSettings, check_most
from diffusax.text.lora_tags import read_tags

_COMMENTS = re.compile(r"(?:(?:^|\n)#[^\n]*|#[^\n]*)(?:\n|$)")
"""Comments in prompts (stable-diffusion-webui, modules/processing_scripts/comments.py)."""
_RESIZE_MODES = ("default", "crop", "fill", "default")
"""How each of A1111's resize modes fits an image: just resize, crop, fill; and just resize for
the last, which resizes latents there."""
_BLURS = ((256, 1), (64, 1), (16, 2), (4, 4), (2, 2))
"""The radii in pixels whose blurs are laid over each other, and how often each is."""


def text_to_image(
    fields: TextToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Generation]:
    """Returns what a call without images asks for, one `Generation` for each iteration."""
    shared = _shared(fields, options, entry)
    width, height = size_of(fields, entry)
    controls = fit(read_controls(fields.alwayson_scripts, settings), width, height)
    return _iterations(Generation(**shared, width=width, height=height, controls=controls), fields)


def image_to_image(
    fields: ImageToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Generation]:
    """Returns what a call with images asks for, one `Generation` for each image and iteration."""
    if not fields.init_images:
        raise Refused("init_images must hold an image", param="init_images")
    check_most("init_images", len(fields.init_images), settings.most_images, "images")
    most_pixels = settings.most_pixels
    images = [
        image_from_base64(value, f"init_images[{i}]", most_pixels)
        for i, value in enumerate(fields.init_images)
    ]
    mask = None
    if fields.mask is not None:
        given = image_from_base64(fields.mask, "mask", most_pixels)
        mask = mask_of(given)
        mask = ImageOps.invert(mask) if fields.inpainting_mask_invert else mask
    shared = _shared(fields, options, entry)
    edits = entry.kind == "edit"
    if edits:
        shared["image_guidance_scale"] = fields.image_cfg_scale
    else:
        shared["strength"] = fields.denoising_strength
        shared["strength_rule"] = "exact" if options.fixes_steps else "webui"
    found: list[Generation] = []
    for i, image in enumerate(images):
        seed = (shared["seed"] + i * fields.batch_size * fields.n_iter) % SEEDS
        generation = Generation(**{**shared, "seed": seed}, **_images(fields, image, mask, entry))
        controls = read_controls(fields.alwayson_scripts, settings, image)
        size = size_of(fields, entry)
        found += _iterations(dataclasses.replace(generation, controls=fit(controls, *size)), fields)
    return found


def _shared(fields: Shared, options: Options, entry: ModelEntry) -> dict[str, Any]:
    """Returns the fields that both calls have."""
    check_present(fields, *size_of(fields, entry))
    check_seed(fields.seed)
    name = fields.sampler_name or fields.sampler_index
    sampler = entry.sampler if name is None else from_webui(name, fields.scheduler)
    sampler, eta = with_noise(fields, sampler)
    return {
        "prompt": read_prompt(fields, fields.prompt),
        "negative_prompt": _without_comments(fields.negative_prompt),
        "model": entry.name,
        "seed": secrets.randbits(32) if fields.seed == -1 else fields.seed % SEEDS,
        "num_inference_steps": fields.steps,
        "guidance_scale": fields.cfg_scale,
        "sampler": sampler,
        "eta": eta,
        "clip_skip": options.clip_skip,
    }


def read_prompt(fields: Shared, prompt: str) -> str:
    """Returns a prompt without comments, and without LoRAs where a call wants none.

    Raises:
        Refused: a tag of a LoRA cannot be read.
    """
    prompt = _without_comments(prompt)
    if not fields.disable_extra_networks:
        return prompt
    try:
        return read_tags(prompt)[0]
    except ValueError as error:
        raise Refused(str(error), param="prompt") from None


def _without_comments(text: str) -> str:
    return _COMMENTS.sub("\n", text).strip() if "#" in text else text


def size_of(fields: Shared, entry: ModelEntry) -> tuple[int, int]:
    """Returns width and height, rounded down to a size for the model, as A1111 does."""

    def rounded(value: int) -> int:
        return max(value // entry.multiple * entry.multiple, entry.multiple)

    width, height = fields.width or entry.width, fields.height or entry.height
    first = getattr(fields, "firstphase_width", 0), getattr(fields, "firstphase_height", 0)
    if any(first):
        width, height = (own or side for own, side in zip(first, (width, height)))
    return rounded(width), rounded(height)


def _iterations(generation: Generation, fields: Shared) -> list[Generation]:
    """Returns one `Generation` for each iteration; the seeds go on from one to the next."""
    count, seed = fields.batch_size, generation.seed or 0
    return [
        dataclasses.replace(generation, num_images=count, seed=(seed + i * count) % SEEDS)
        for i in range(fields.n_iter)
    ]


def _images(
    fields: ImageToImage, image: Image.Image, mask: Image.Image | None, entry: ModelEntry
) -> dict[str, Any]:
    """Returns the fields that come from an image and a mask."""
    width, height = size_of(fields, entry)
    found: dict[str, Any] = {"width": width, "height": height}
    if mask is None:
        return {**found, "image": _fit_image(image, width, height, fields.resize_mode)}
    mask = mask if mask.size == image.size else mask.resize(image.size)
    if fields.inpaint_full_res:
        # The part around the mask is generated in full size, and the image keeps its own.
        image = _fit_image(image, image.width, image.height, 0)
        found["padding_mask_crop"] = fields.inpaint_full_res_padding
    else:
        # A mask is fitted like its image, so that it stays where it was.
        mask = _fit_image(mask, width, height, fields.resize_mode).convert("L")
        image = _fit_image(image, width, height, fields.resize_mode)
    blur = max(fields.mask_blur_x, fields.mask_blur_y)
    found["mask_blur"] = blur if fields.mask_blur is None else fields.mask_blur
    found["image"] = _fill_masked(image, mask, fields.inpainting_fill)
    return {**found, "mask_image": mask}


def _fit_image(image: Image.Image, width: int, height: int, mode: int) -> Image.Image:
    """Returns an image as RGB in the size to generate."""
    return resize(as_rgb(image, "init_images"), height, width, _RESIZE_MODES[mode])


def _fill_masked(image: Image.Image, mask: Image.Image, mode: int) -> Image.Image:
    """Fills the masked part of an image as A1111's `inpainting_fill` says.

    Arguments:
        image: the image, RGB.
        mask: white where the image is generated anew; of the image's size.
        mode: 0 fills with the colours around, 1 leaves the image as it is.

    Raises:
        Refused: mode is 2 or 3, which fill latents.
    """
    if mode == 1:
        return image
    if mode != 0:
        raise Refused(
            f"inpainting_fill must be 0 (colours around) or 1 (the image) here (got {mode})",
            param="inpainting_fill",
        )
    kept = image.convert("RGBA")
    kept.putalpha(ImageOps.invert(mask))
    filled = Image.new("RGBA", image.size)
    for radius, times in _BLURS:
        # Premultiplied, so that the colours under the mask do not bleed into the blur.
        blurred = kept.convert("RGBa").filter(ImageFilter.GaussianBlur(radius)).convert("RGBA")
        for _ in range(times):
            filled.alpha_composite(blurred)
    filled.alpha_composite(kept)
    result = image.copy()
    result.paste(filled.convert("RGB"), mask=filled.getchannel("A"))
    return result
