"""txt2img and img2img of A1111's API, with hires fix, interrupt, skip and progress."""

import dataclasses
import time
from typing import Any, Generic, TypeVar

from PIL import Image
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax._version import __version__
from diffusax.infotext.samplers import to_webui
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.upscaling import Upscalers
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import Generation, write_infotext
from diffusax.serving.web.a1111.fields import (
    ImagesReply,
    ImageToImage,
    Shared,
    TextToImage,
    read_call,
)
from diffusax.serving.web.a1111.hires import (
    enlargement,
    second_pass,
    settings_of_second_pass,
    upscaler_of,
)
from diffusax.serving.web.a1111.reading import (
    call_warnings,
    image_to_image,
    size_of,
    style_names,
    text_to_image,
    with_own_styles,
)
from diffusax.serving.web.a1111.state import (
    Options,
    Work,
    describe_progress,
    option_warnings,
    state_of,
    without_hash,
)
from diffusax.serving.web.bodies import read_json
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import Json, encode, encode_json, in_base64
from diffusax.serving.web.security import check_most
from diffusax.serving.web.service import Service, client_of, ended, service_of
from diffusax.text.extra_networks import prompt_warnings

_ERRORS = (404, 413, 415, 422, 429, 503, 504)
_Fields = TypeVar("_Fields", bound=Shared)
_SENT_BACK = ("init_images", "mask")
"""Parameters that are sent back only where a client asks for them."""
_TRUE = ("true", "1", "on", "yes", "t", "y")


@operation(
    "POST",
    "/sdapi/v1/txt2img",
    "Generate images from a prompt, as with A1111's server.",
    group="A1111",
    body=TextToImage,
    answer=ImagesReply,
    errors=_ERRORS,
)
async def txt2img(request: Request) -> Response:
    """Generates images from a prompt."""
    return await in_thread(_reply, await from_prompt(request, await read_json(request)))


async def from_prompt(request: Request, values: dict[str, Any]) -> "Made":
    """Generates images from a prompt, for the values of a call of txt2img."""
    service = service_of(request)
    call = await _read(request, values, TextToImage)
    fields, entry = call.fields, call.entry
    generations = await in_thread(text_to_image, fields, call.options, entry, service.settings)
    if fields.enable_hr:
        if fields.hr_checkpoint_name is not None:
            entry = service.catalogue.entry(without_hash(fields.hr_checkpoint_name))
        await in_thread(_check_second_pass, service, fields, generations[0], entry)
    work = Work(client_of(request), 2 if fields.enable_hr else 1)
    with state_of(request).works.during(work):
        jobs = await _run(request, work, generations)
        first, hires = jobs[0].generation, {}
        if fields.enable_hr and not work.interrupted:
            upscalers = service.upscalers
            again = [
                one
                for job in jobs
                for one in await in_thread(_second_pass, fields, job, entry, upscalers)
            ]
            if again:
                jobs = await _run(request, work, again)
                hires = settings_of_second_pass(fields, first, jobs[0].generation)
    return Made(call, jobs, first, hires)


@operation(
    "POST",
    "/sdapi/v1/img2img",
    "Change or inpaint images, as with A1111's server.",
    group="A1111",
    body=ImageToImage,
    answer=ImagesReply,
    errors=_ERRORS,
)
async def img2img(request: Request) -> Response:
    """Generates images from images."""
    return await in_thread(_reply, await from_images(request, await read_json(request)))


async def from_images(request: Request, values: dict[str, Any]) -> "Made":
    """Generates images from images, for the values of a call of img2img."""
    call = await _read(request, values, ImageToImage)
    settings = service_of(request).settings
    generations = await in_thread(image_to_image, call.fields, call.options, call.entry, settings)
    work = Work(client_of(request), 1)
    with state_of(request).works.during(work):
        jobs = await _run(request, work, generations)
    return Made(call, jobs, jobs[0].generation, {})


@operation(
    "GET",
    "/sdapi/v1/progress",
    "The progress of the client's calls.",
    group="A1111",
    query=("skip_current_image",),
)
async def progress(request: Request) -> Response:
    """Tells the progress, with a preview unless the client wants none."""
    works = state_of(request).works.of(client_of(request))
    found = describe_progress(works)
    found["current_image"] = None
    live = [job for work in works for job in work.jobs if not job.is_over]
    if live and request.query_params.get("skip_current_image", "").lower() not in _TRUE:
        live[0].want_preview()
        preview = live[0].preview
        if preview is not None:
            found["current_image"] = in_base64(await in_thread(encode, preview))
    return Json(found)


@operation("POST", "/sdapi/v1/interrupt", "End the client's calls.", group="A1111")
async def interrupt(request: Request) -> Response:
    """Ends the client's calls, which answer with the images that are done; later ones go on."""
    for work in state_of(request).works.of(client_of(request)):
        work.interrupt()
    return Json({})


@operation("POST", "/sdapi/v1/skip", "End one iteration of the client's call.", group="A1111")
async def skip(request: Request) -> Response:
    """Ends the current iteration of the client's oldest call."""
    for work in state_of(request).works.of(client_of(request))[:1]:
        work.skip()
    return Json({})


@dataclasses.dataclass(frozen=True)
class _Call(Generic[_Fields]):
    """A call that has been read."""

    values: dict[str, Any]
    """What the client sent."""
    fields: _Fields
    options: Options
    entry: ModelEntry
    """The model."""
    warnings: tuple[str, ...]
    """What is read over, in sentences."""


async def _read(request: Request, values: dict[str, Any], kind: type[_Fields]) -> _Call[_Fields]:
    """Reads a call, and checks how much it asks for."""
    fields = read_call(kind, values)
    service, client, kept = service_of(request), client_of(request), state_of(request).options
    options = kept.get(client).changed(fields.override_settings, service.catalogue)
    if not fields.override_settings_restore_afterwards:
        kept.set(client, options)
    entry = service.catalogue.entry(options.model)
    service.check_size(*size_of(fields, entry))
    count = fields.batch_size * fields.n_iter
    named = "batch_size" if fields.n_iter == 1 else "n_iter"
    check_most(named, count, service.settings.most_images, "images")
    styles = service.catalogue.styles
    warnings = (
        *call_warnings(fields, entry, styles),
        *_upscaler_warnings(service, fields),
        *option_warnings(fields.override_settings),
    )
    return _Call(values, with_own_styles(fields, styles), options, entry, warnings)


def _upscaler_warnings(service: Service, fields: Shared) -> list[str]:
    """Returns a sentence where another upscaler stands for the second pass's."""
    if not isinstance(fields, TextToImage) or not fields.enable_hr:
        return []
    name = upscaler_of(fields)
    used = service.upscalers.find(name, "hr_upscaler")
    same = name.lower() == used.lower()
    return [] if same else [f"hr_upscaler is {used} here, as there is no {name}"]


def _check_second_pass(
    service: Service, fields: TextToImage, first: Generation, entry: ModelEntry
) -> None:
    """Refuses an impossible second pass before the first one begins."""
    first = service.check(first)
    larger = enlargement(fields, first.width or 8, first.height or 8, entry.multiple)
    # Before they are cropped, images are larger than the result.
    try:
        service.check_size(larger.width, larger.height)
    except Refused as error:
        text = f"hr_scale makes images of the second pass too large: {error}"
        raise Refused(text, param="hr_scale", code=error.code) from None
    # Of an image that has its size already, so that nothing is computed.
    blank = Image.new("RGB", (larger.width, larger.height))
    for generation in second_pass(fields, first, [(first, blank)], entry, service.upscalers):
        service.check(generation)


def _second_pass(
    fields: TextToImage, job: Job, entry: ModelEntry, upscalers: Upscalers
) -> list[Generation]:
    """Returns the second pass over a job's images that are done."""
    done = [(own, image) for own, image in zip(job.singles, job.images) if image is not None]
    return second_pass(fields, job.generation, done, entry, upscalers)


async def _run(request: Request, work: Work, generations: list[Generation]) -> list[Job]:
    """Submits jobs and waits until they have ended; raises the error of one that failed."""
    service = service_of(request)
    jobs = await in_thread(service.submit, generations, work.client)
    work.add(jobs)
    if work.interrupted:
        work.interrupt()
    await ended(request, jobs)
    for job in jobs:
        if job.error is not None:
            raise job.error
    return jobs


@dataclasses.dataclass(frozen=True)
class Made:
    """What a call has made."""

    call: _Call[Any]
    jobs: list[Job]
    """Those of the last pass."""
    first: Generation
    """What the first pass generated."""
    hires: dict[str, Any]
    """The settings of the second pass for the images' texts; empty without one."""

    @property
    def images(self) -> list[tuple[Generation, Image.Image]]:
        """The images that are done, each with what generates it by itself."""
        return [
            (single, image)
            for job in self.jobs
            for single, image in zip(job.singles, job.images)
            if image is not None
        ]

    def text(self, single: Generation) -> str:
        """Returns the settings of an image as text."""
        shown = _with_seeds(self.first, single) if self.hires else single
        return write_infotext(shown, single.seed or 0, self.hires)

    def info(self) -> str:
        """Returns what A1111's clients read of the images, in JSON."""
        done = [single for single, _ in self.images]
        texts = [self.text(single) for single in done]
        return encode_json(_info(self.call, self.first, texts, done, self.hires)).decode()


def _reply(made: Made) -> Response:
    """Returns the images that are done, with what A1111's clients read about them."""
    fields = made.call.fields
    images = [
        in_base64(encode(image, text=made.text(single)))
        for single, image in (made.images if fields.send_images else [])
    ]
    kept = _SENT_BACK if getattr(fields, "include_init_images", False) else ()
    left_out = {*_SENT_BACK, "alwayson_scripts"} - {*kept}
    parameters = {name: value for name, value in made.call.values.items() if name not in left_out}
    return Json({"images": images, "parameters": parameters, "info": made.info()})


def _with_seeds(generation: Generation, single: Generation) -> Generation:
    """Returns a request with the seeds of one image."""
    return dataclasses.replace(generation, seed=single.seed, variation_seed=single.variation_seed)


def _info(
    call: _Call[Any],
    generation: Generation,
    texts: list[str],
    done: list[Generation],
    hires: dict[str, Any],
) -> dict[str, Any]:
    fields = call.fields
    seeds = [single.seed or 0 for single in done or [generation]]
    subseeds = [single.variation_seed or 0 for single in done or [generation]]
    prompts = [single.prompt for single in done]
    return {
        "prompt": generation.prompt,
        "all_prompts": prompts,
        "negative_prompt": generation.negative_prompt,
        "all_negative_prompts": [single.negative_prompt for single in done],
        "seed": seeds[0],
        "all_seeds": seeds,
        "subseed": subseeds[0],
        "all_subseeds": subseeds,
        "subseed_strength": generation.variation_strength,
        "width": generation.width,
        "height": generation.height,
        "sampler_name": to_webui(generation.sampler or "")[0],
        "cfg_scale": generation.guidance_scale,
        "steps": generation.num_inference_steps,
        "batch_size": fields.batch_size,
        "restore_faces": False,
        "face_restoration_model": None,
        "sd_model_name": generation.model,
        "sd_model_hash": "",
        "sd_vae_name": None,
        "sd_vae_hash": None,
        "seed_resize_from_w": -1,
        "seed_resize_from_h": -1,
        "denoising_strength": getattr(fields, "denoising_strength", None)
        if hires
        else generation.strength,
        "extra_generation_params": {k: v for k, v in hires.items() if v is not None},
        "index_of_first_image": 0,
        "infotexts": texts,
        "styles": style_names(fields),
        "job_timestamp": time.strftime("%Y%m%d%H%M%S"),
        "clip_skip": (generation.clip_skip or 0) + 1,
        "is_using_inpainting_conditioning": False,
        "version": f"diffusax {__version__}",
        "warnings": [*_prompt_warnings(fields, generation), *call.warnings],
    }


def _prompt_warnings(fields: Shared, generation: Generation) -> tuple[str, ...]:
    """Returns warnings of what is not applied in the prompts of both passes."""
    second = getattr(fields, "hr_prompt", "") if getattr(fields, "enable_hr", False) else ""
    found = prompt_warnings(generation.prompt, generation.negative_prompt)
    return tuple(dict.fromkeys(found + prompt_warnings(second)))


OPERATIONS = (txt2img, img2img, progress, interrupt, skip)
