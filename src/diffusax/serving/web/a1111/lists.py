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
from diffusax.serving.web.a1111.hires import LATENT_MODES
from diffusax.serving.web.a1111.scripts import MODULES
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
    networks = service.catalogue.upscalers
    shared = {"model_path": None, "model_url": None}
    names = ["None", *(name for name in service.upscalers.names() if name not in networks)]
    return [
        *({"name": name, "model_name": None, **shared, "scale": 4} for name in names),
        *(
            {"name": entry.name, "model_name": entry.title, **shared, "scale": entry.scale}
            for entry in networks.values()
        ),
    ]


def _realesrgan_models(service: Service) -> Any:
    return [
        {"name": entry.name, "path": entry.path.name, "scale": int(entry.scale or 1)}
        for entry in service.catalogue.upscalers.values()
    ]


def _styles(service: Service) -> Any:
    return [vars(style) for style in service.catalogue.styles.values()]


_SCRIPTS = ("controlnet", "comments", "extra options", "refiner", "sampler", "seed")
"""The extension's name, and those of A1111's own scripts, which stand here in small letters."""


def _scripts(service: Service) -> Any:
    return {"txt2img": [*_SCRIPTS], "img2img": [*_SCRIPTS]}


def _script_infos(service: Service) -> Any:
    return [
        {"name": name, "is_alwayson": True, "is_img2img": of_images, "args": []}
        for of_images in (False, True)
        for name in _SCRIPTS
    ]


def _extensions(service: Service) -> Any:
    shared = {"remote": "", "branch": "", "commit_hash": "", "version": "", "commit_date": 0}
    return [{"name": "sd-webui-controlnet", **shared, "enabled": True}]


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


_INVERT = "invert (from white bg & black line)"


def _modules(service: Service) -> Any:
    names = [_INVERT if name == "invert" else name for name in MODULES]
    thresholds = [
        {"name": "Preprocessor resolution", "value": 512, "min": 64, "max": 2048},
        {"name": "Low Threshold", "value": 100, "min": 1, "max": 255},
        {"name": "High Threshold", "value": 200, "min": 1, "max": 255},
    ]
    sliders = {name: thresholds if name == "canny" else [] for name in names}
    detail = {name: {"model_free": False, "sliders": own} for name, own in sliders.items()}
    return {"module_list": names, "module_detail": detail}


def _control_types(service: Service) -> Any:
    models = ["None", *(entry.name for entry in service.catalogue.controlnets)]
    kinds = {"All": _modules(service)["module_list"], "Canny": ["none", "canny"]}
    return {
        "control_types": {
            kind: {
                "module_list": modules,
                "model_list": models,
                "default_option": modules[-1] if kind != "All" else "none",
                "default_model": "None",
            }
            for kind, modules in kinds.items()
        }
    }


def _control_settings(service: Service) -> Any:
    return {"control_net_unit_count": service.settings.most_controls}


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
    "/sdapi/v1/realesrgan-models": ("The upscalers.", list, _realesrgan_models),
    "/sdapi/v1/prompt-styles": ("The styles of styles.csv.", list, _styles),
    "/sdapi/v1/scripts": ("The scripts.", dict, _scripts),
    "/sdapi/v1/script-info": ("The scripts, without arguments.", list, _script_infos),
    "/sdapi/v1/extensions": ("ControlNet's.", list, _extensions),
    "/sdapi/v1/sd-modules": ("None.", list, lambda service: []),
    "/internal/ping": ("That the server lives.", dict, lambda service: {}),
    "/sdapi/v1/cmd-flags": ("None.", dict, lambda service: {}),
    "/sdapi/v1/memory": ("The memory in bytes.", dict, _memory),
    "/controlnet/version": (
        "The version of ControlNet's API.",
        dict,
        lambda service: {"version": 3},
    ),
    "/controlnet/model_list": ("The ControlNets.", dict, _controlnets),
    "/controlnet/module_list": (
        "The preprocessors.",
        dict,
        _modules,
    ),
    "/controlnet/control_types": ("The kinds of ControlNets.", dict, _control_types),
    "/controlnet/settings": ("The most ControlNets of a call.", dict, _control_settings),
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
    png_info,
    *(_listing(path, *rest) for path, rest in _LISTS.items()),
)
