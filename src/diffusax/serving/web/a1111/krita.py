"""The API that auto-sd-paint-ext gives A1111's server, for its plugin of Krita.

Source: Interpause/auto-sd-paint-ext, backend/app.py and backend/utils.py.
"""

import dataclasses
import math
from typing import Annotated, Any

from msgspec import Meta
from PIL import Image
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.infotext.samplers import WEBUI_SAMPLERS
from diffusax.serving.web.a1111.fields import read_call
from diffusax.serving.web.a1111.generation import Made, from_images, from_prompt
from diffusax.serving.web.bodies import as_rgb, image_from_base64, read_json
from diffusax.serving.web.fields import SentImage
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import Json, encode, in_base64
from diffusax.serving.web.service import service_of

_ERRORS = (404, 413, 415, 422, 429, 503, 504)
Side = Annotated[int, Meta(ge=1, le=16_384)]
_SAME = (
    *("prompt", "negative_prompt", "steps", "sampler_name", "cfg_scale", "seed", "batch_size"),
    *("denoising_strength", "tiling", "restore_faces", "subseed", "subseed_strength"),
    *("inpainting_fill", "resize_mode"),
)
"""The fields that have A1111's names."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the plugin adds to A1111's fields; `base_size` and `max_size` are the model's sides."""

    base_size: Side = 512
    max_size: Side = 768
    disable_sddebz_highres: bool = False
    batch_count: int = 1
    sd_model: str = ""
    upscaler_name: str = "None"
    do_exact_steps: bool = False
    script: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromPrompt(Sizes):
    """A prompt; the image is generated at about the model's size, and resized."""

    orig_width: Side
    orig_height: Side
    highres_fix: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class FromImage(Sizes):
    """An image to change, or to inpaint where the mask is opaque."""

    src_img: SentImage
    mask_img: SentImage | None = None
    mode: int = 0
    is_inpaint: bool = False
    invert_mask: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Larger:
    """An image to make larger."""

    src_img: SentImage
    upscaler_name: str = "Lanczos"
    downscale_first: bool = False


@operation("GET", "/sdapi/interpause/config", "What Krita's plugin lists.", group="Krita")
async def config(request: Request) -> Response:
    """Lists what the plugin offers."""
    service = service_of(request)
    samplers = [one.name for one in WEBUI_SAMPLERS]
    return Json(
        {
            "sample_path": "",
            "upscalers": ["None", *service.upscalers.names()],
            "samplers": samplers,
            "samplers_img2img": samplers,
            "scripts_txt2img": {"None": []},
            "scripts_img2img": {"None": []},
            "face_restorers": ["None"],
            "sd_models": [entry.title for entry in service.catalogue.models],
            "sd_vaes": ["None"],
        }
    )


@operation(
    "POST",
    "/sdapi/interpause/txt2img",
    "Generate images from a prompt, for Krita's plugin.",
    group="Krita",
    body=FromPrompt,
    errors=_ERRORS,
)
async def txt2img(request: Request) -> Response:
    """Generates images of the size that is asked for."""
    values = await read_json(request)
    fields = read_call(FromPrompt, values)
    size = fields.orig_width, fields.orig_height
    call = _call(fields, values, size)
    if fields.highres_fix:
        call |= {"enable_hr": True, "hr_upscaler": fields.upscaler_name}
        call |= {"hr_resize_x": size[0], "hr_resize_y": size[1]}
    service_of(request).check_size(*size)
    return await in_thread(_outputs, await from_prompt(request, call), size)


@operation(
    "POST",
    "/sdapi/interpause/img2img",
    "Change or inpaint an image, for Krita's plugin.",
    group="Krita",
    body=FromImage,
    errors=_ERRORS,
)
async def img2img(request: Request) -> Response:
    """Generates images of the size of the given one."""
    values = await read_json(request)
    fields = read_call(FromImage, values)
    service = service_of(request)
    most = service.settings.most_pixels
    image = await in_thread(image_from_base64, fields.src_img, "src_img", most)
    service.check_size(*image.size)
    call = _call(fields, values, image.size) | {"init_images": [fields.src_img]}
    mask = None
    if (fields.is_inpaint or fields.mode == 1) and fields.mask_img is not None:
        mask = await in_thread(image_from_base64, fields.mask_img, "mask_img", most)
        call |= {"mask": fields.mask_img, "mask_blur": 0, "inpaint_full_res": False}
        call["inpainting_mask_invert"] = int(fields.invert_mask)
    return await in_thread(
        _outputs, await from_images(request, call), image.size, mask, fields.invert_mask
    )


@operation(
    "POST",
    "/sdapi/interpause/upscale",
    "Make an image larger, for Krita's plugin.",
    group="Krita",
    body=Larger,
    errors=_ERRORS,
)
async def upscale(request: Request) -> Response:
    """Makes an image larger by its upscaler's own factor, or four times."""
    fields = read_call(Larger, await read_json(request))
    return Json({"output": await in_thread(_larger, service_of(request), fields)})


def _larger(service: Any, fields: Larger) -> str:
    most = service.settings.most_pixels
    image = as_rgb(image_from_base64(fields.src_img, "src_img", most), "src_img")
    if fields.upscaler_name == "None":
        return in_base64(encode(image))
    name = service.upscalers.find(fields.upscaler_name, "upscaler_name")
    if fields.downscale_first:
        image = image.resize((max(image.width // 2, 1), max(image.height // 2, 1)))
    entry = service.catalogue.upscalers.get(name)
    scale = 4 if entry is None else entry.scale
    size = int(image.width * scale), int(image.height * scale)
    return in_base64(encode(service.upscalers.resize(name, image, size, "src_img")))


def _call(fields: Sizes, values: dict[str, Any], size: tuple[int, int]) -> dict[str, Any]:
    """Returns the values of A1111's call that a call of the plugin stands for."""
    call = {name: values[name] for name in _SAME if values.get(name) is not None}
    width, height = _generated_size(fields, *size)
    call |= {"width": width, "height": height, "n_iter": fields.batch_count}
    if fields.script not in (None, "", "None"):
        call["script_name"] = fields.script
    options: dict[str, Any] = {"img2img_fix_steps": fields.do_exact_steps}
    if fields.sd_model:
        options["sd_model_checkpoint"] = fields.sd_model
    return {**call, "override_settings": options}


def _generated_size(fields: Sizes, width: int, height: int) -> tuple[int, int]:
    """Returns the size to generate at: the shorter side is the model's, the longer one bounded."""

    def rounded(value: float) -> int:
        return math.ceil(value / 64) * 64

    if fields.disable_sddebz_highres:
        return rounded(width), rounded(height)
    base, most, ratio = fields.base_size, fields.max_size, max(width, height) / min(width, height)
    short, long = base, rounded(ratio * base)
    if long > most:
        short, long = rounded(most / ratio), most
    return (long, short) if width > height else (short, long)


def _outputs(
    made: Made, size: tuple[int, int], mask: Image.Image | None = None, inverted: bool = False
) -> Response:
    """Returns a call's images in a size, transparent where a mask has them stay as they are."""
    outputs = []
    for single, image in made.images:
        shown = image if image.size == size else image.resize(size, Image.Resampling.LANCZOS)
        if mask is not None:
            alpha = mask.convert("RGBA").getchannel("A").resize(size)
            shown = shown.convert("RGB")
            shown.putalpha(alpha.point(lambda value: 255 - value) if inverted else alpha)
        outputs.append(in_base64(encode(shown, text=made.text(single))))
    return Json({"outputs": outputs, "info": made.info()})


OPERATIONS = (config, txt2img, img2img, upscale)
