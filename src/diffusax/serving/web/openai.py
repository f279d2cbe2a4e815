"""OpenAI's images API: generations, edits, variations and the list of models."""

import contextlib
import dataclasses
import re
import time
from collections.abc import AsyncIterator
from typing import Any, TypeVar

from PIL import Image, ImageOps
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.images.masks import mask_of
from diffusax.images.reading import in_srgb
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.engine.jobs import Job
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import Generation, write_infotext
from diffusax.serving.web.bodies import (
    content_type,
    decode_base64,
    image_from_bytes,
    read_form,
    read_json,
)
from diffusax.serving.web.fields import (
    IGNORED,
    EditFields,
    EditForm,
    GenerationFields,
    ImageFields,
    ImagesAnswer,
    OpenAIModel,
    OpenAIModels,
    VariationForm,
    read_fields,
    read_size,
)
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import (
    KEEP_ALIVE,
    Json,
    encode,
    error_body,
    in_base64,
    sse,
    stream,
)
from diffusax.serving.web.service import (
    Service,
    client_of,
    ended,
    events_of,
    images_of,
    service_of,
    to_generation,
)

_SHARED = {field.name for field in dataclasses.fields(GenerationFields)}
_USAGE = {
    "input_tokens": 0,
    "input_tokens_details": {"image_tokens": 0, "text_tokens": 0},
    "output_tokens": 0,
    "total_tokens": 0,
}
_ERRORS = (404, 409, 413, 415, 422, 429, 503, 504)
_OWN_NAMES = re.compile("(dall-e|gpt-image|chatgpt-image|sora)-")
"""How OpenAI's own models of images and videos are called; they mean the default model."""
_WITH_ADDRESSES = "dall-e-"
"""How those are called that answer with addresses unless base64 is asked for."""
_VARIATION = 0.6
"""The strength of a variation. OpenAI's has none to choose."""
_Edit = TypeVar("_Edit", bound=EditFields)


@operation(
    "POST",
    "/v1/images/generations",
    "Generate images from a prompt, as with OpenAI's API; with stream, as server-sent events.",
    group="OpenAI",
    body=ImageFields,
    answer=ImagesAnswer,
    errors=_ERRORS,
)
async def generations(request: Request) -> Response:
    """Generates images."""
    fields = read_fields(ImageFields, await read_json(request), ignored=IGNORED)
    generation = await in_thread(_generation, service_of(request), fields, {})
    return await _answer(request, fields, generation, "image_generation")


@operation(
    "POST",
    "/v1/images/edits",
    "Change an image, or the transparent part of a mask, as with OpenAI's API.",
    group="OpenAI",
    body=EditFields,
    form=EditForm,
    files=("image", "mask"),
    answer=ImagesAnswer,
    errors=_ERRORS,
)
async def edits(request: Request) -> Response:
    """Changes an image."""
    fields, images = await _read_edit(request, EditFields)
    generation = await in_thread(_generation, service_of(request), fields, images)
    return await _answer(request, fields, generation, "image_edit")


@operation(
    "POST",
    "/v1/images/variations",
    "Generate images that are like an image, as with OpenAI's API.",
    group="OpenAI",
    form=VariationForm,
    files=("image",),
    answer=ImagesAnswer,
    errors=_ERRORS,
)
async def variations(request: Request) -> Response:
    """Varies an image."""
    fields, images = await _read_edit(request, VariationForm)
    if fields.mask is not None:
        raise Refused("mask must be left out of a variation; edits take one", param="mask")
    # Only DALL-E 2 has variations there, so that no client needs to name it.
    strength = _VARIATION if fields.strength is None else fields.strength
    fields = dataclasses.replace(fields, strength=strength, model=fields.model or "dall-e-2")
    # What is transparent is varied, too.
    images.pop("mask_image", None)
    generation = await in_thread(_generation, service_of(request), fields, images)
    return await _answer(request, fields, generation, "image_edit")


@operation("GET", "/v1/models", "The models.", group="OpenAI", answer=OpenAIModels)
async def models(request: Request) -> Response:
    """Lists the models, and the other names that were given to some."""
    service = service_of(request)
    names = [entry.name for entry in service.catalogue.models]
    found = dict.fromkeys([*names, *service.settings.aliases])
    return Json({"object": "list", "data": [_model(name) for name in found]})


@operation(
    "GET", "/v1/models/{id:path}", "One model.", group="OpenAI", answer=OpenAIModel, errors=(404,)
)
async def model(request: Request) -> Response:
    """Shows a model."""
    name = request.path_params["id"]
    entry = model_called(service_of(request), name)
    return Json(_model(name if name in service_of(request).settings.aliases else entry.name))


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "created": 0, "object": "model", "owned_by": "diffusax"}


def model_called(service: Service, name: str, *, videos: bool = False) -> ModelEntry:
    """Returns the model that a client of OpenAI's calls by a name.

    The names that the settings give come first, then those of the catalogue; any other name of
    OpenAI's own models, and none, mean the first model that generates what is asked for.

    videos: whether that is videos, and not images.

    Raises:
        NotFound: there is none.
    """
    given = service.settings.aliases.get(name)
    if given is not None:
        return service.catalogue.entry(given)
    fitting = (one for one in service.catalogue.models if (one.fps is not None) == videos)
    if not name:
        return next(fitting, service.catalogue.entry())
    try:
        return service.catalogue.entry(name)
    except NotFound:
        if _OWN_NAMES.match(name):
            return next(fitting, service.catalogue.entry())
        raise


async def _read_edit(request: Request, kind: type[_Edit]) -> tuple[_Edit, dict[str, Any]]:
    """Returns the fields of an edit, from a form or from JSON, and its images by our names."""
    service = service_of(request)
    if content_type(request) == "multipart/form-data":
        values, files = await read_form(request, service.settings.most_body)
        sent = [*files.get("image", []), *files.get("image[]", [])]
        masks = files.get("mask", [])
        unknown = set(files) - {"image", "image[]", "mask"}
        if unknown:
            raise Refused(f"{min(unknown)[:100]!r} is no file here; send image and mask")
        for name in ("image", "image[]", "mask"):
            if name in values:
                raise Refused(f"{name} must be a file in a form (got a text)", param=name)
        texts = form_values(values)
        # They are files, which have no text.
        filled = {name: "" for name, given in (("image", sent), ("mask", masks)) if given}
        fields = read_fields(kind, {**texts, **filled}, strict=False, ignored=IGNORED)
    else:
        fields = read_fields(kind, await read_json(request), ignored=IGNORED)
        sent, masks = await in_thread(_json_images, fields)
    return fields, await in_thread(_images, service, sent, masks)


def form_values(values: dict[str, str]) -> dict[str, Any]:
    """Returns a form's values by the fields' names; JSON stands in those of ours that need it."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        key = name.partition("[")[0]
        if key == "adapters" and name != key:
            # The client of OpenAI writes {"adapters": {"a": 1}} so.
            found.setdefault(key, {})[name[len(key) + 1 :].removesuffix("]")] = value
        elif value != "":
            found[name] = value
    return found


def _json_images(fields: EditFields) -> tuple[list[bytes], list[bytes]]:
    """Returns the images and the masks of a JSON body: texts, or objects with image_url."""

    def listed(value: Any) -> list[Any]:
        return value if isinstance(value, list) else [] if value is None else [value]

    def data(value: Any, param: str) -> bytes:
        value = value.get("image_url") if isinstance(value, dict) else value
        return decode_base64(value, param)

    images = [data(value, "image") for value in (*listed(fields.image), *listed(fields.images))]
    return images, [data(value, "mask") for value in listed(fields.mask)]


def _images(service: Service, images: list[bytes], masks: list[bytes]) -> dict[str, Any]:
    """Returns the images of an edit, and the mask: white where the given mask is transparent."""
    if not images:
        raise Refused("image must be given (got none)", param="image")
    if len(masks) > 1:
        raise Refused(f"mask must be given at most once (got {len(masks)})", param="mask")
    most = service.settings.most_pixels
    image, *more = (image_from_bytes(sent, "image", most) for sent in images)
    mask = image_from_bytes(masks[0], "mask", most) if masks else image
    found: dict[str, Any] = {"image": image, "more_images": tuple(more)}
    if mask.has_transparency_data:
        alpha = mask.convert("RGBA").getchannel("A")
        if masks or alpha.getextrema()[0] == 0:
            found["mask_image"] = ImageOps.invert(alpha)
            found["image"] = in_srgb(image).convert("RGB")
    elif masks:
        found["mask_image"] = mask_of(mask)
    if "mask_image" in found and found["mask_image"].size != image.size:
        raise Refused(
            f"mask must be as large as image, {image.width}x{image.height} "
            f"(got {mask.width}x{mask.height})",
            param="mask",
        )
    return found


def _generation(service: Service, fields: ImageFields, images: dict[str, Any]) -> Generation:
    """Returns what a request asks for."""
    width, height = read_size(fields.size)
    own = {name: value for name, value in vars(fields).items() if name in _SHARED}
    own |= {"image": None, "model": model_called(service, fields.model).name}
    shared = GenerationFields(**own, width=width, height=height, num_images=fields.n)
    generation = to_generation(shared, service.settings)
    return dataclasses.replace(generation, **images)


async def _answer(
    request: Request, fields: ImageFields, generation: Generation, kind: str
) -> Response:
    """Submits a job and answers with its images, or with events on the way to them."""
    service = service_of(request)
    [job] = await in_thread(service.submit, [generation], client_of(request), fields.deadline)
    if fields.stream:
        return stream(_stream(request, fields, job, kind))
    await ended(request, [job])
    first, *_ = images_of(job)
    data = [await in_thread(_datum, request, fields, job, i) for i in range(len(job.images))]
    about = {**_about(fields, first), "usage": _USAGE}
    return Json({"created": int(time.time()), "data": data, **about})


def _datum(request: Request, fields: ImageFields, job: Job, index: int) -> dict[str, Any]:
    """Returns one image of an answer, as an address or as base64."""
    found: dict[str, Any] = {"seed": job.seeds[index], "revised_prompt": fields.prompt}
    if _wants_address(fields):
        # Clients save it under a name with the ending that it has here.
        url = request.url.replace(path=f"/jobs/{job.id}/images/{index}.png", query="")
        return {**found, "url": str(url)}
    text = write_infotext(job.singles[index], job.seeds[index])
    return {**found, "b64_json": _encoded(fields, job.images[index], text)}


def _wants_address(fields: ImageFields) -> bool:
    """Returns whether images are answered as addresses; where nothing is said, by the model."""
    usual = "url" if fields.model.startswith(_WITH_ADDRESSES) and not fields.stream else "b64_json"
    return (fields.response_format or usual) == "url"


def _encoded(fields: ImageFields, image: Image.Image, text: str = "") -> str:
    kind, quality = fields.output_format, fields.output_compression
    return in_base64(encode(image, kind, text=text, quality=quality))


async def _stream(
    request: Request, fields: ImageFields, job: Job, kind: str
) -> AsyncIterator[bytes]:
    """Yields partial images at even parts of the way, each image, and [DONE]."""
    sent = dict.fromkeys(range(len(job.images)), 0)
    try:
        async with contextlib.aclosing(
            events_of(job, previews=fields.partial_images > 0)
        ) as events:
            async for event in events:
                if event is None:
                    yield KEEP_ALIVE
                elif event.kind == "preview" and _is_due(job, fields, sent[event.index]):
                    name, index = f"{kind}.partial_image", sent[event.index]
                    sent[event.index] += 1
                    partial = await in_thread(_encoded, fields, event.image)
                    data = {"b64_json": partial, "partial_image_index": index}
                    yield sse(name, {**_event(fields, event.image, name), **data})
                elif event.kind == "image":
                    name = f"{kind}.completed"
                    datum = await in_thread(_datum, request, fields, job, event.index)
                    about = _event(fields, job.images[event.index], name)
                    yield sse(name, {**about, **datum, "usage": _USAGE})
        images_of(job)
    except Refused as error:
        yield sse("error", error_body("/v1/", error))
    finally:
        if not job.is_over:
            job.cancel()
    yield b"data: [DONE]\n\n"


def _is_due(job: Job, fields: ImageFields, sent: int) -> bool:
    """Whether the next partial image of an image should be sent by now."""
    wanted = fields.partial_images
    return sent < wanted and job.progress >= sent / (wanted + 1)


def _event(fields: ImageFields, image: Image.Image, kind: str) -> dict[str, Any]:
    own = {"type": kind, "created_at": int(time.time()), "quality": "auto"}
    return {**own, **_about(fields, image)}


def _about(fields: ImageFields, image: Image.Image) -> dict[str, Any]:
    return {
        "output_format": fields.output_format,
        "size": f"{image.width}x{image.height}",
        "background": "opaque",
    }


OPERATIONS = (generations, edits, variations, models, model)
