"""What the server can do, for pages and programs that offer it to people."""

import dataclasses
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from diffusax._version import __version__
from diffusax.samplers.names import SAMPLER_NAMES
from diffusax.serving.catalogue.entries import ModelDescription
from diffusax.serving.web.operations import operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.service import service_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class FileAnswer:
    """A LoRA, an embedding or a ControlNet."""

    name: str
    title: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelAnswer(ModelDescription):
    """A model, with the defaults of its first task."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LimitsAnswer:
    """The most that a request may ask for."""

    steps: int
    pixels: int
    images: int
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

    def files(entries: Any) -> list[dict[str, str]]:
        return [{"name": entry.name, "title": entry.title} for entry in entries]

    limits = {
        "steps": settings.most_steps,
        "pixels": settings.most_image_pixels,
        "images": settings.most_images,
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
            "loras": files(catalogue.loras),
            "embeddings": files(catalogue.embeddings),
            "controlnets": files(catalogue.controlnets),
            "limits": limits,
            "api_key_needed": bool(settings.keys),
        }
    )


OPERATIONS = (capabilities,)
