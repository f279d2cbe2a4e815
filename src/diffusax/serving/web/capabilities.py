"""What the server can do, whether it lives, and whether it may be sent requests."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diffusax._version import __version__
from diffusax.images.clips import video_type
from diffusax.infotext.samplers import sampler_titles
from diffusax.samplers.names import SAMPLER_NAMES
from diffusax.serving.catalogue.entries import ModelDescription
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.service import service_of

_UPSCALE = "/sdapi/v1/extra-single-image"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileAnswer:
    """A LoRA, an embedding or a ControlNet."""

    name: str
    title: str
    preview: bool = False
    """Whether a picture lies beside a LoRA's file, see /loras/NAME/preview."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelAnswer(ModelDescription):
    """A model, with the defaults of its first task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsAnswer:
    """The most that a request may ask for."""

    steps: int
    pixels: int
    images: int
    frames: int
    """Those of a video."""
    video_pixels: int
    """Those of all frames of a video together."""
    prompt: int
    body: int
    queue: int
    jobs: int | None
    controls: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class CapabilitiesAnswer:
    """All that the server offers; the first model is the default."""

    version: str
    models: list[ModelAnswer]
    samplers: list[str]
    sampler_titles: dict[str, str]
    """What A1111's users call the samplers, the most usual ones first."""
    video_type: str
    """The media type of videos that are generated: video/mp4, or image/webp without ffmpeg."""
    upscales: bool
    """Whether /sdapi/v1/extra-single-image makes images larger."""
    loras: list[FileAnswer]
    embeddings: list[FileAnswer]
    controlnets: list[FileAnswer]
    limits: LimitsAnswer
    api_key_needed: bool


@operation(
    "GET",
    "/capabilities",
    "Models, samplers, LoRAs, embeddings, ControlNets and limits.",
    group="Server",
    answer=CapabilitiesAnswer,
)
async def capabilities(request: Request) -> Response:
    """Lists what the server can do."""
    service = service_of(request)
    catalogue, settings = service.catalogue, service.settings
    names = [field.name for field in dataclasses.fields(ModelAnswer)]

    def files(entries: Any) -> list[dict[str, Any]]:
        return [
            {"name": entry.name, "title": entry.title, "preview": entry.preview is not None}
            for entry in entries
        ]

    limits = {
        "steps": settings.most_steps,
        "pixels": settings.most_image_pixels,
        "images": settings.most_images,
        "frames": settings.most_frames,
        "video_pixels": settings.most_video_pixels,
        "prompt": settings.most_prompt,
        "body": settings.most_body,
        "queue": service.engine.settings.most_queued,
        "jobs": service.engine.settings.most_per_client,
        "controls": settings.most_controls,
    }
    return Json(
        {
            "version": __version__,
            "models": [
                {name: getattr(entry, name) for name in names} for entry in catalogue.models
            ],
            "samplers": SAMPLER_NAMES,
            "sampler_titles": sampler_titles(),
            "video_type": video_type(),
            "upscales": any(getattr(one, "path", "") == _UPSCALE for one in request.app.routes),
            "loras": files(catalogue.loras),
            "embeddings": files(catalogue.embeddings),
            "controlnets": files(catalogue.controlnets),
            "limits": limits,
            "api_key_needed": bool(settings.keys),
        }
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StatusAnswer:
    """That all is well."""

    status: str


@operation(
    "GET", "/health", "Whether the server lives.", group="Server", answer=StatusAnswer, open=True
)
async def health(request: Request) -> Response:
    """Answers as long as the server does."""
    return Json({"status": "ok"})


@operation(
    "GET",
    "/ready",
    "Whether requests may be sent: the first model is loaded, and the server is not stopping.",
    group="Server",
    answer=StatusAnswer,
    errors=(503,),
    open=True,
)
async def ready(request: Request) -> Response:
    """Answers 200 once requests may come, and 503 before and while the server stops."""
    service = service_of(request)
    if service.draining:
        raise Refused("the server is stopping; ask another one", status=503, code="closing")
    if service.failure:
        raise Refused(service.failure, status=503, code="failed")
    if not service.opened.is_set():
        raise Refused(
            "the model is loading; ask again later", status=503, code="loading", retry_after=1.0
        )
    return Json({"status": "ready"})


OPERATIONS = (capabilities, health, ready)
