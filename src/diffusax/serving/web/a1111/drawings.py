"""Makes drawings of A1111's calls."""

import dataclasses
import secrets
from collections.abc import Mapping
from typing import Any

from PIL import Image

from diffusax.serving.drawing import Drawing
from diffusax.serving.entries import ModelEntry
from diffusax.serving.errors import Refused
from diffusax.serving.samplers import from_webui
from diffusax.serving.web.a1111.controlnet import fit, read_controls
from diffusax.serving.web.a1111.fields import ImageToImage, Shared, TextToImage
from diffusax.serving.web.a1111.inpainting import fill_masked, fit_image, read_mask
from diffusax.serving.web.a1111.options import Options
from diffusax.serving.web.pictures import decode_picture
from diffusax.serving.web.settings import WebSettings, check_most

_UPSCALERS = {
    "None": Image.Resampling.LANCZOS,
    "Lanczos": Image.Resampling.LANCZOS,
    "Nearest": Image.Resampling.NEAREST,
    "Latent": Image.Resampling.BILINEAR,
    "Latent (antialiased)": Image.Resampling.BILINEAR,
    "Latent (bicubic)": Image.Resampling.BICUBIC,
    "Latent (bicubic antialiased)": Image.Resampling.BICUBIC,
    "Latent (nearest)": Image.Resampling.NEAREST,
    "Latent (nearest-exact)": Image.Resampling.NEAREST,
}
"""The filters of hires fix by A1111's names. Those for latents work on the picture here."""
UPSCALERS = tuple(name for name in _UPSCALERS if not name.startswith("Latent"))
LATENT_MODES = tuple(name for name in _UPSCALERS if name.startswith("Latent"))


def text_to_image(
    fields: TextToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Drawing]:
    """Returns the drawings of a call without a picture, one for each iteration."""
    shared = _shared(fields, options, entry)
    width, height = size_of(fields, entry)
    controls = fit(read_controls(fields.alwayson_scripts, settings), width, height)
    return _iterations(Drawing(**shared, width=width, height=height, controls=controls), fields)


def image_to_image(
    fields: ImageToImage, options: Options, entry: ModelEntry, settings: WebSettings
) -> list[Drawing]:
    """Returns the drawings of a call with pictures, one for each picture and iteration."""
    if not fields.init_images:
        raise Refused("init_images must hold a picture", param="init_images")
    check_most("init_images", len(fields.init_images), settings.most_images, "images")
    most_pixels = settings.most_pixels
    images = [
        decode_picture(value, f"init_images[{i}]", most_pixels)
        for i, value in enumerate(fields.init_images)
    ]
    mask = None
    if fields.mask is not None:
        given = decode_picture(fields.mask, "mask", most_pixels)
        mask = read_mask(given, invert=bool(fields.inpainting_mask_invert))
    shared = _shared(fields, options, entry)
    edits = entry.kind == "edit"
    if edits:
        shared["image_guidance_scale"] = fields.image_cfg_scale
    else:
        shared["strength"] = fields.denoising_strength
    found: list[Drawing] = []
    for i, image in enumerate(images):
        seed = (shared["seed"] + i * fields.batch_size * fields.n_iter) % 2**32
        drawing = Drawing(**{**shared, "seed": seed}, **_pictures(fields, image, mask, entry))
        controls = read_controls(fields.alwayson_scripts, settings, image)
        size = size_of(fields, entry)
        found += _iterations(dataclasses.replace(drawing, controls=fit(controls, *size)), fields)
    return found


def second_pass(
    fields: TextToImage, first: Drawing, images: Mapping[int, Image.Image]
) -> list[Drawing]:
    """Returns the drawings of hires fix's second pass, one for each image by its seed."""
    upscaler = fields.hr_upscaler or "Latent"
    if upscaler not in _UPSCALERS:
        known = ", ".join(_UPSCALERS)
        raise Refused(
            f"hr_upscaler must be one of {known} (got {upscaler[:60]!r})", param="hr_upscaler"
        )
    width, height = hires_size(fields, first)
    prompts: dict[str, Any] = {
        "prompt": fields.hr_prompt or first.prompt,
        "negative_prompt": fields.hr_negative_prompt or first.negative_prompt,
    }
    sampler = first.sampler
    if fields.hr_sampler_name not in (None, "", "Use same sampler"):
        scheduler = fields.hr_scheduler
        scheduler = fields.scheduler if scheduler == "Use same scheduler" else scheduler
        sampler = from_webui(fields.hr_sampler_name, scheduler)
    steps = fields.hr_second_pass_steps or first.num_inference_steps
    strength = 0.7 if fields.denoising_strength is None else fields.denoising_strength
    return [
        dataclasses.replace(
            first,
            **prompts,
            image=image.resize((width, height), _UPSCALERS[upscaler]),
            strength=strength,
            width=width,
            height=height,
            num_inference_steps=steps,
            sampler=sampler,
            guidance_scale=first.guidance_scale if fields.hr_cfg is None else fields.hr_cfg,
            seed=seed,
            num_images=1,
        )
        for seed, image in images.items()
    ]


def hires_size(fields: TextToImage, first: Drawing) -> tuple[int, int]:
    """Returns the width and height of hires fix's second pass, in multiples of 8 pixels."""
    width, height = first.width or 8, first.height or 8
    to_x, to_y = fields.hr_resize_x, fields.hr_resize_y
    if to_x and to_y:
        size: tuple[float, float] = to_x, to_y
    elif to_x or to_y:
        # One side alone keeps the proportions.
        scale = to_x / width if to_x else to_y / height
        size = width * scale, height * scale
    else:
        size = width * fields.hr_scale, height * fields.hr_scale
    return max(int(size[0]) // 8 * 8, 8), max(int(size[1]) // 8 * 8, 8)


def _shared(fields: Shared, options: Options, entry: ModelEntry) -> dict[str, Any]:
    """Returns the fields of a drawing that both calls have."""
    name = fields.sampler_name or fields.sampler_index
    return {
        "prompt": fields.prompt,
        "negative_prompt": fields.negative_prompt,
        "model": entry.name,
        "seed": secrets.randbits(32) if fields.seed < 0 else fields.seed,
        "num_inference_steps": fields.steps,
        "guidance_scale": fields.cfg_scale,
        "sampler": None if name is None else from_webui(name, fields.scheduler),
        "clip_skip": options.clip_skip,
    }


def size_of(fields: Shared, entry: ModelEntry) -> tuple[int, int]:
    """Returns width and height, rounded down to what the model can draw, as A1111 does."""

    def rounded(value: int) -> int:
        return max(value // entry.multiple * entry.multiple, entry.multiple)

    return rounded(fields.width or entry.width), rounded(fields.height or entry.height)


def _iterations(drawing: Drawing, fields: Shared) -> list[Drawing]:
    """Returns a drawing for each iteration; the seeds go on from one to the next."""
    count, seed = fields.batch_size, drawing.seed or 0
    return [
        dataclasses.replace(drawing, num_images=count, seed=(seed + i * count) % 2**32)
        for i in range(fields.n_iter)
    ]


def _pictures(
    fields: ImageToImage, image: Image.Image, mask: Image.Image | None, entry: ModelEntry
) -> dict[str, Any]:
    """Returns the fields of a drawing that come from a picture and a mask."""
    width, height = size_of(fields, entry)
    found: dict[str, Any] = {"width": width, "height": height}
    if mask is None:
        return {**found, "image": fit_image(image, width, height, fields.resize_mode)}
    mask = mask if mask.size == image.size else mask.resize(image.size)
    if fields.inpaint_full_res:
        # The part around the mask is drawn in full size, and the picture keeps its own.
        image = fit_image(image, image.width, image.height, 0)
        found["padding_mask_crop"] = fields.inpaint_full_res_padding
    else:
        # A mask is fitted like its picture, so that it stays where it was.
        mask = fit_image(mask, width, height, fields.resize_mode).convert("L")
        image = fit_image(image, width, height, fields.resize_mode)
    blur = max(fields.mask_blur_x, fields.mask_blur_y)
    found["mask_blur"] = blur if fields.mask_blur is None else fields.mask_blur
    found["image"] = fill_masked(image, mask, fields.inpainting_fill)
    return {**found, "mask_image": mask}
