"""The route of Hugging Face's inference clients, which answers with the bytes of a file."""

import dataclasses
import functools
from typing import Annotated, Any

from msgspec import Meta
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.serving.engine.videos import Video
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Generation, Pixels, Text, write_infotext
from diffusax.serving.web.bodies import (
    content_type,
    decode_base64,
    image_from_bytes,
    read_bytes,
    read_json,
)
from diffusax.serving.web.fields import GenerationFields, read_fields
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import encode
from diffusax.serving.web.service import (
    Service,
    client_of,
    ended,
    images_of,
    service_of,
    to_generation,
)

_MEDIA_TYPES = ("image/png", "image/jpeg", "image/webp")
_BEGINNINGS = ("iVBORw0KGgo", "/9j/", "UklGR", "data:image/")
"""How PNG, JPEG and WebP begin in base64."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetSize:
    """The size of a changed image."""

    width: Pixels
    height: Pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubFields:
    """A prompt, or an image to change, with parameters."""

    inputs: Annotated[Text, Meta(description="A prompt, or an image in base64.")]
    parameters: dict[str, Any] = dataclasses.field(default_factory=dict)
    """scheduler, target_size {width, height}, and the fields of `Generation`."""
    options: Any = None


@operation(
    "POST",
    "/models/{id:path}",
    "Generate or change an image, or generate a video, as with Hugging Face's inference API.",
    group="Hub",
    body=HubFields,
    raw_body=_MEDIA_TYPES,
    answer="*/*",
    errors=(404, 409, 413, 415, 422, 429, 503, 504),
)
async def generate(request: Request) -> Response:
    """Generates one image."""
    service = service_of(request)
    name = service.catalogue.entry(request.path_params["id"]).name
    # Hugging Face's client names no type where it sends bytes that it has not read from a file.
    if content_type(request) in (*_MEDIA_TYPES, "", "application/octet-stream"):
        data: str | bytes | None = await read_bytes(request)
        values: dict[str, Any] = {}
    else:
        fields = read_fields(HubFields, await read_json(request))
        values = dict(fields.parameters)
        is_image = "prompt" in values or fields.inputs.startswith(_BEGINNINGS)
        data = fields.inputs if is_image else None
        if not is_image:
            values["prompt"] = fields.inputs
    generation = await in_thread(_generation, service, name, data, values)
    given = [generation], client_of(request)
    [job] = await in_thread(functools.partial(service.submit, videos=True), *given)
    await ended(request, [job])
    [image] = images_of(job)
    headers = {"X-Seed": str(job.seeds[0])}
    if isinstance(image, Video):
        return Response(image.file.data, media_type=image.file.media_type, headers=headers)
    text = write_infotext(job.singles[0], job.seeds[0])
    return Response(
        await in_thread(encode, image, "png", text), media_type="image/png", headers=headers
    )


def _generation(
    service: Service, model: str, data: str | bytes | None, values: dict[str, Any]
) -> Generation:
    """Returns what a request's parameters and its image ask for."""
    scheduler, size = values.pop("scheduler", None), values.pop("target_size", None)
    if values.get("model") or values.get("num_images", 1) != 1:
        raise Refused("parameters must ask for one image of the model in the address")
    if scheduler is not None:
        values.setdefault("sampler", scheduler)
    if size is not None:
        if not isinstance(size, dict):
            raise Refused("target_size must be an object with width and height")
        values |= vars(read_fields(TargetSize, size))
    fields = read_fields(GenerationFields, {**values, "model": model})
    generation = to_generation(fields, service.settings)
    if data is None:
        return generation
    data = decode_base64(data, "inputs") if isinstance(data, str) else data
    image = image_from_bytes(data, "inputs", service.settings.most_pixels)
    return dataclasses.replace(generation, image=image)


OPERATIONS = (generate,)
