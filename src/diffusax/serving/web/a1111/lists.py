"""What A1111's clients list: samplers, models, LoRAs and the rest; its options; png-info."""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.batch.sizes import memory_in_use
from diffusax.infotext.files import texts_of
from diffusax.infotext.others import webui_text
from diffusax.infotext.samplers import SCHEDULES, WEBUI_SAMPLERS
from diffusax.infotext.text import webui_parameters
from diffusax.runtime.devices.memory import device_memory, host_memory
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.a1111.hires import LATENT_MODES, UPSCALERS
from diffusax.serving.web.a1111.state import shown, state_of
from diffusax.serving.web.bodies import decode_base64, open_with_texts, read_json
from diffusax.serving.web.fields import SentImage, read_fields
from diffusax.serving.web.openapi import Operation, operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.service import Service, client_of, service_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class PictureFields:
    """An image."""

    image: SentImage


@operation("GET", "/sdapi/v1/options", "The client's options.", group="A1111")
async def get_options(request: Request) -> Response:
    """Shows the client's options."""
    own = state_of(request).options.get(client_of(request))
    return Json(shown(own, service_of(request).catalogue))


@operation(
    "POST",
    "/sdapi/v1/options",
    "Set the client's model and clip skip; other options are ignored.",
    group="A1111",
    body=dict,
    answer=None,
    errors=(404, 415, 422),
)
async def set_options(request: Request) -> Response:
    """Sets the client's options."""
    kept, client = state_of(request).options, client_of(request)
    values = await read_json(request)
    kept.set(client, kept.get(client).changed(values, service_of(request).catalogue))
    return Json(None)


@operation(
    "POST",
    "/sdapi/v1/refresh-checkpoints",
    "List the folder of models again.",
    group="A1111",
    answer=None,
)
async def refresh_checkpoints(request: Request) -> Response:
    """Lists the folder of models again."""
    try:
        await in_thread(service_of(request).catalogue.refresh)
    except ValueError as error:
        raise Refused(str(error), status=503, code="failed") from None
    return Json(None)


@operation(
    "POST",
    "/sdapi/v1/png-info",
    "The settings that an image's file holds.",
    group="A1111",
    body=PictureFields,
    errors=(413, 415, 422),
)
async def png_info(request: Request) -> Response:
    """Reads the settings of an image."""
    most = service_of(request).settings.most_pixels
    fields = read_fields(PictureFields, await read_json(request), tolerant=True)
    return Json(await in_thread(_read_image, fields.image, most))


def _read_image(sent: str, most_pixels: int) -> dict[str, Any]:
    """Describes the texts in an image sent in base64, as webui does."""
    image = open_with_texts(decode_base64(sent, "image"), "image", most_pixels)
    texts = texts_of(image)
    text = webui_text(texts, image.size)
    items = {**texts, "parameters": text} if text else texts
    return {"info": text, "items": items, "parameters": webui_parameters(text)}


def _samplers(service: Service) -> Any:
    return [
        {"name": one.name, "aliases": list(one.aliases), "options": {}} for one in WEBUI_SAMPLERS
    ]


def _schedulers(service: Service) -> Any:
    shared = {"aliases": None, "default_rho": -1, "need_inner_model": False}
    return [{"name": name, "label": label, **shared} for name, label in SCHEDULES.items()]


def _models(service: Service) -> Any:
    return [
        {
            "title": entry.title,
            "model_name": entry.name,
            "hash": None,
            "sha256": None,
            "filename": entry.path.name,
            "config": None,
        }
        for entry in service.catalogue.models
    ]


def _loras(service: Service) -> Any:
    return [
        {
            "name": entry.name,
            "alias": entry.alias or entry.name,
            "path": entry.path.name,
            "metadata": {},
        }
        for entry in service.catalogue.loras
    ]


def _embeddings(service: Service) -> Any:
    unknown = {"step": None, "sd_checkpoint": None, "sd_checkpoint_name": None}
    unknown |= {"shape": None, "vectors": None}
    return {
        "loaded": {entry.name: unknown for entry in service.catalogue.embeddings},
        "skipped": {},
    }


def _upscalers(service: Service) -> Any:
    shared = {"model_name": None, "model_path": None, "model_url": None, "scale": 4}
    return [{"name": name, **shared} for name in UPSCALERS]


def _scripts(service: Service) -> Any:
    # The extension's names stand here in small letters.
    return {"txt2img": ["controlnet"], "img2img": ["controlnet"]}


def _memory(service: Service) -> Any:
    device = jax.local_devices()[0]
    memory = {"ram": _shares(host_memory(), _free_bytes())}
    if device.platform == "cpu":
        return {**memory, "cuda": {"error": "images are generated on the CPU"}}
    total = device_memory(device) or 0
    return {**memory, "cuda": {"system": _shares(total, total - memory_in_use())}}


def _free_bytes() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return 0


def _shares(total: int | None, free: int) -> dict[str, int]:
    """Returns free, used and all bytes of a memory; 0 where they are not known."""
    total = total or 0
    return {"free": free, "used": max(total - free, 0), "total": total}


def _controlnets(service: Service) -> Any:
    return {"model_list": [entry.name for entry in service.catalogue.controlnets]}


_LISTS: dict[str, tuple[str, type, Callable[[Service], Any]]] = {
    "/sdapi/v1/samplers": ("The samplers.", list, _samplers),
    "/sdapi/v1/schedulers": ("The schedules of noise.", list, _schedulers),
    "/sdapi/v1/sd-models": ("The models.", list, _models),
    "/sdapi/v1/loras": ("The LoRAs.", list, _loras),
    "/sdapi/v1/embeddings": ("The embeddings.", dict, _embeddings),
    "/sdapi/v1/upscalers": ("The filters that make images larger.", list, _upscalers),
    "/sdapi/v1/latent-upscale-modes": (
        "The filters for hires fix.",
        list,
        lambda service: [{"name": name} for name in LATENT_MODES],
    ),
    "/sdapi/v1/sd-vae": ("None: models bring their own autoencoder.", list, lambda service: []),
    "/sdapi/v1/hypernetworks": ("None.", list, lambda service: []),
    "/sdapi/v1/face-restorers": ("None.", list, lambda service: []),
    "/sdapi/v1/realesrgan-models": ("None.", list, lambda service: []),
    "/sdapi/v1/prompt-styles": ("None.", list, lambda service: []),
    "/sdapi/v1/scripts": ("The scripts.", dict, _scripts),
    "/sdapi/v1/cmd-flags": ("None.", dict, lambda service: {}),
    "/sdapi/v1/memory": ("The memory in bytes.", dict, _memory),
    "/controlnet/version": (
        "The version of ControlNet's API.",
        dict,
        lambda service: {"version": 3},
    ),
    "/controlnet/model_list": ("The ControlNets.", dict, _controlnets),
    "/controlnet/module_list": (
        "The preprocessors: none.",
        dict,
        lambda service: {"module_list": ["none"]},
    ),
}
"""What each path lists: its summary, whether it answers with a list or an object, and how."""


def _listing(path: str, summary: str, answer: type, find: Callable[[Service], Any]) -> Operation:
    @operation("GET", path, summary, group="A1111", answer=answer)
    async def endpoint(request: Request) -> Response:
        return Json(find(service_of(request)))

    found: Operation = endpoint
    return found


OPERATIONS = (
    get_options,
    set_options,
    refresh_checkpoints,
    png_info,
    *(_listing(path, *rest) for path, rest in _LISTS.items()),
)
