"""What A1111's clients ask for besides new images: larger ones, edges, lists read again."""

import dataclasses
from typing import Annotated, Any

from msgspec import Meta
from PIL import Image
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.infotext.files import texts_of
from diffusax.infotext.others import webui_text
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.a1111.fields import Preprocessing, read_call
from diffusax.serving.web.a1111.scripts import module_of, preprocess
from diffusax.serving.web.bodies import (
    as_rgb,
    decode_base64,
    image_from_base64,
    open_with_texts,
    read_json,
)
from diffusax.serving.web.fields import SentImage, read_fields
from diffusax.serving.web.openapi import Operation, operation
from diffusax.serving.web.replies import Json, encode, in_base64
from diffusax.serving.web.security import check_most
from diffusax.serving.web.service import Service, service_of

_ERRORS = (413, 415, 422, 429)
Side = Annotated[int, Meta(ge=1, le=16_384)]
Visibility = Annotated[float, Meta(ge=0, le=1)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Extras:
    """How images are made larger; restorers of faces are not here, and read over."""

    resize_mode: Annotated[int, Meta(ge=0, le=1)] = 0
    show_extras_results: bool = True
    gfpgan_visibility: Visibility = 0.0
    codeformer_visibility: Visibility = 0.0
    codeformer_weight: Visibility = 0.0
    upscaling_resize: Annotated[float, Meta(gt=0, le=16)] = 2.0
    upscaling_resize_w: Side = 512
    upscaling_resize_h: Side = 512
    upscaling_crop: bool = True
    upscaler_1: str = "None"
    upscaler_2: str = "None"
    extras_upscaler_2_visibility: Visibility = 0.0
    upscale_first: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleImage(Extras):
    """An image to make larger."""

    image: SentImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchImages(Extras):
    """Images to make larger: objects with data and name."""

    imageList: Annotated[list[Any], Meta(min_length=1, max_length=1000)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SingleReply:
    """The larger image in base64, and a note in HTML."""

    html_info: str
    image: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchReply:
    """The larger images in base64, and a note in HTML."""

    html_info: str
    images: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Detection:
    """Images for which a preprocessor of ControlNets makes maps."""

    controlnet_module: str = "none"
    controlnet_input_images: list[Any]
    controlnet_processor_res: Annotated[int, Meta(le=2048)] = 512
    controlnet_threshold_a: Annotated[float, Meta(ge=-1, le=1_000_000)] = 64.0
    controlnet_threshold_b: Annotated[float, Meta(ge=-1, le=1_000_000)] = 64.0


@operation(
    "POST",
    "/sdapi/v1/extra-single-image",
    "Make an image larger.",
    group="A1111",
    body=SingleImage,
    answer=SingleReply,
    errors=_ERRORS,
)
async def extra_single_image(request: Request) -> Response:
    """Makes one image larger."""
    fields = read_call(SingleImage, await read_json(request))
    service = service_of(request)
    image = await in_thread(_enlarged, service, fields, fields.image, "image")
    return Json({"html_info": _note(service, fields), "image": image})


@operation(
    "POST",
    "/sdapi/v1/extra-batch-images",
    "Make images larger.",
    group="A1111",
    body=BatchImages,
    answer=BatchReply,
    errors=_ERRORS,
)
async def extra_batch_images(request: Request) -> Response:
    """Makes several images larger."""
    fields = read_call(BatchImages, await read_json(request))
    service, listed = service_of(request), fields.imageList
    check_most("imageList", len(listed), service.settings.most_images, "images")
    images = []
    for i, one in enumerate(listed):
        data = one.get("data") if isinstance(one, dict) else one
        images.append(await in_thread(_enlarged, service, fields, data, f"imageList[{i}]"))
    return Json({"html_info": _note(service, fields), "images": images})


def _enlarged(service: Service, fields: Extras, sent: Any, param: str) -> str:
    """Returns an image made larger, in base64, with the settings that its file had."""
    upscalers, most = service.upscalers, service.settings.most_pixels
    one, two = _upscalers(service, fields)
    data = decode_base64(sent, param)
    image = as_rgb(image_from_base64(sent, param, most), param)
    size = _target(fields, image)
    first = image
    if one != "None":
        first = upscalers.resize(one, image, size, "upscaling_resize")
        if two != "None" and fields.extras_upscaler_2_visibility:
            second = upscalers.resize(two, image, size, "upscaling_resize")
            first = Image.blend(first, second, fields.extras_upscaler_2_visibility)
        if fields.resize_mode == 1 and fields.upscaling_crop:
            first = _cropped(first, fields.upscaling_resize_w, fields.upscaling_resize_h)
    with open_with_texts(data, param, most) as opened:
        text = webui_text(texts_of(opened), opened.size)
    return in_base64(encode(first, text=text))


def _upscalers(service: Service, fields: Extras) -> list[str]:
    """Returns the names of both upscalers."""
    names = {"upscaler_1": fields.upscaler_1, "upscaler_2": fields.upscaler_2}
    return [
        name if name == "None" else service.upscalers.find(name, param)
        for param, name in names.items()
    ]


def _target(fields: Extras, image: Image.Image) -> tuple[int, int]:
    """Returns the width and the height of the larger image, multiples of 8.

    Source: stable-diffusion-webui, modules/upscaler.py, Upscaler.upscale.
    """
    scale = fields.upscaling_resize
    if fields.resize_mode == 1:
        sides = fields.upscaling_resize_w / image.width, fields.upscaling_resize_h / image.height
        scale = max(sides)
    width, height = (max(int(side * scale // 8 * 8), 8) for side in image.size)
    return width, height


def _cropped(image: Image.Image, width: int, height: int) -> Image.Image:
    """Returns the middle of an image, with black around where it is smaller."""
    canvas = Image.new("RGB", (width, height))
    canvas.paste(image, (width // 2 - image.width // 2, height // 2 - image.height // 2))
    return canvas


def _note(service: Service, fields: Extras) -> str:
    """Says in HTML what of a call is read over."""
    found = []
    if fields.gfpgan_visibility or fields.codeformer_visibility:
        found.append("There are no restorers of faces here; the images are only larger.")
    asked = fields.upscaler_1, fields.upscaler_2
    for name, used in zip(asked, _upscalers(service, fields)):
        if name.lower() != used.lower():
            found.append(f"There is no {name} here, so {used} made the image larger.")
    return "".join(f"<p>{text}</p>" for text in found)


@operation(
    "POST",
    "/controlnet/detect",
    "The maps that ControlNets read of images.",
    group="A1111",
    body=Detection,
    errors=_ERRORS,
)
async def detect(request: Request) -> Response:
    """Makes maps."""
    fields = read_call(Detection, await read_json(request))
    service = service_of(request)
    check_most(
        "controlnet_input_images",
        len(fields.controlnet_input_images),
        service.settings.most_images,
        "images",
    )
    images = await in_thread(_detected, fields, service.settings.most_pixels)
    return Json({"images": images, "info": "Success"})


def _detected(fields: Detection, most_pixels: int) -> list[str]:
    module = module_of(fields.controlnet_module, "controlnet_module")
    settings = Preprocessing(
        processor_res=fields.controlnet_processor_res,
        threshold_a=fields.controlnet_threshold_a,
        threshold_b=fields.controlnet_threshold_b,
    )
    found = []
    for i, sent in enumerate(fields.controlnet_input_images):
        param = f"controlnet_input_images[{i}]"
        image = as_rgb(image_from_base64(sent, param, most_pixels), param)
        found.append(in_base64(encode(preprocess(image, module, settings))))
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interrogation:
    """An image to describe."""

    image: SentImage = ""
    model: str = "clip"


@operation(
    "POST",
    "/sdapi/v1/interrogate",
    "Not there: no model here describes images.",
    group="A1111",
    body=Interrogation,
    errors=(415, 422, 501),
)
async def interrogate(request: Request) -> Response:
    """Says that nothing here describes images."""
    fields = read_fields(Interrogation, await read_json(request), tolerant=True)
    raise Refused(
        f"model must be one that describes images (got {fields.model[:60]!r}), of which there is "
        "none here; write the prompt, or read one from an image's file with png-info",
        param="model",
        code="not_supported",
        status=501,
    )


def _refresh(path: str, what: str, answer: Any = None) -> Operation:
    @operation(
        "POST",
        path,
        f"List {what} again.",
        group="A1111",
        answer=type(answer) if answer is not None else None,
        errors=(503,),
    )
    async def endpoint(request: Request) -> Response:
        """Lists the folder of models again."""
        try:
            await in_thread(service_of(request).catalogue.refresh)
        except ValueError as error:
            raise Refused(str(error), status=503, code="failed") from None
        return Json(answer)

    found: Operation = endpoint
    return found


@operation(
    "POST",
    "/sdapi/v1/unload-checkpoint",
    "Free the models that no request uses.",
    group="A1111",
)
async def unload_checkpoint(request: Request) -> Response:
    """Frees the memory of unused models, which the next request loads again."""
    await in_thread(service_of(request).catalogue.free_unused)
    return Json({})


@operation(
    "POST",
    "/sdapi/v1/reload-checkpoint",
    "Nothing: models are loaded when a request needs them.",
    group="A1111",
)
async def reload_checkpoint(request: Request) -> Response:
    """Answers that all is well."""
    return Json({})


_REFRESHED = {
    "/sdapi/v1/refresh-checkpoints": "the folder of models",
    "/sdapi/v1/refresh-loras": "LoRAs",
    "/sdapi/v1/refresh-embeddings": "embeddings",
    "/sdapi/v1/refresh-vae": "the folder of models",
}

OPERATIONS = (
    extra_single_image,
    extra_batch_images,
    detect,
    interrogate,
    unload_checkpoint,
    reload_checkpoint,
    *(_refresh(path, what) for path, what in _REFRESHED.items()),
)
