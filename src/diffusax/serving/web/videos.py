"""OpenAI's videos API: a video is a job, which clients ask for until it is done."""

import dataclasses
import functools
from typing import Annotated, Any, Literal

from msgspec import Meta
from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.images.clips import is_still
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.engine.jobs import Job
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import (
    Frames,
    FramesPerSecond,
    Generation,
    LowNoiseScale,
    Prompt,
    Share,
    TextSettings,
)
from diffusax.serving.web.bodies import (
    content_type,
    decode_base64,
    image_from_bytes,
    read_form,
    read_json,
)
from diffusax.serving.web.fields import Deadline, SentImage, read_fields, read_size
from diffusax.serving.web.jobs import send_video
from diffusax.serving.web.openai import form_values, model_called
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import Json
from diffusax.serving.web.service import Service, client_of, read_video, service_of

_ERRORS = (404, 413, 415, 422, 429, 503)
_REFERENCE = "input_reference"
_USUAL, _MOST = 20, 100
"""The videos of a list by default, and at most."""
_OTHERS = {"queued": "queued", "loading": "queued", "compiling": "queued"}
_STATES = _OTHERS | {"running": "in_progress", "done": "completed"}
"""OpenAI's words for the states of jobs; the others have failed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoFields(TextSettings):
    """What the videos API takes: OpenAI's fields, our settings, and a deadline."""

    prompt: Prompt = dataclasses.field()
    size: Annotated[
        str, Meta(description='Width and height, such as "832x480", or "auto" for the model\'s.')
    ] = "auto"
    seconds: (
        Annotated[
            float,
            Meta(
                gt=0,
                le=3600,
                description="How long the video is, to the nearest number of frames that the model "
                "can have; also as a text.",
            ),
        ]
        | None
    ) = None
    num_frames: Frames | None = None
    fps: FramesPerSecond | None = None
    guidance_scale_2: LowNoiseScale | None = None
    strength: Share | None = None
    input_reference: Any = None
    """The image that the video begins with, or a video to start from: a file of a form, and in JSON
    base64, a data URI, or an object with it as image_url."""
    deadline: Deadline | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoForm(VideoFields):
    """A form for a video; input_reference is a file."""

    input_reference: SentImage | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class RemixFields:
    """Another prompt for a video."""

    prompt: Prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoError:
    """Why a video failed."""

    code: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoAnswer:
    """A video on its way. Times are seconds since 1970."""

    id: str
    object: Literal["video"]
    model: str
    status: Literal["queued", "in_progress", "completed", "failed"]
    progress: int
    """In percent."""
    created_at: int
    completed_at: int | None
    expires_at: int | None
    """When it may be forgotten."""
    prompt: str
    size: str
    seconds: str
    remixed_from_video_id: str | None
    error: VideoError | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideosAnswer:
    """Some of the client's videos."""

    object: Literal["list"]
    data: list[VideoAnswer]
    first_id: str | None
    last_id: str | None
    has_more: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeletedAnswer:
    """That a video is deleted."""

    id: str
    object: Literal["video.deleted"]
    deleted: bool


@operation(
    "POST",
    "/v1/videos",
    "Generate a video from a prompt, as with OpenAI's API; answers at once.",
    group="OpenAI",
    body=VideoFields,
    form=VideoForm,
    files=(_REFERENCE,),
    answer=VideoAnswer,
    errors=_ERRORS,
)
async def create(request: Request) -> Response:
    """Submits a job for a video."""
    service = service_of(request)
    fields, sent = await _read(request)
    generation = await in_thread(_generation, service, fields, sent)
    given = [generation], client_of(request), fields.deadline
    [job] = await in_thread(functools.partial(service.submit, videos=True), *given)
    return Json(_describe(service, job))


@operation(
    "GET",
    "/v1/videos",
    "The client's videos; order is desc or asc, and after the id of the one before the first.",
    group="OpenAI",
    query=("limit", "after", "order"),
    answer=VideosAnswer,
    errors=(404, 422),
)
async def list_videos(request: Request) -> Response:
    """Lists videos."""
    service = service_of(request)
    jobs = [job for job in service.jobs_of(request) if job.is_of_videos]
    if _order(request) == "asc":
        jobs.reverse()
    if (after := request.query_params.get("after")) is not None:
        ids = [job.id for job in jobs]
        if after not in ids:
            raise NotFound(f"there is no video {after[:50]!r}", param="after")
        jobs = jobs[ids.index(after) + 1 :]
    limit = _limit(request)
    data = [_describe(service, job) for job in jobs[:limit]]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    found = {"object": "list", "data": data, "first_id": None, "last_id": None, **ends}
    return Json({**found, "has_more": len(jobs) > limit})


@operation(
    "GET", "/v1/videos/{id}", "One video.", group="OpenAI", answer=VideoAnswer, errors=(404,)
)
async def retrieve(request: Request) -> Response:
    """Shows a video."""
    return Json(_describe(service_of(request), _job(request)))


@operation(
    "GET",
    "/v1/videos/{id}/content",
    "The file of a video; variant is video, thumbnail (WebP) or spritesheet (JPEG).",
    group="OpenAI",
    query=("variant",),
    answer="*/*",
    errors=(404, 409, 416, 422),
)
async def content(request: Request) -> Response:
    """Sends a video."""
    job = _job(request)
    return await in_thread(send_video, request, _video(job), f"diffusax-{job.seeds[0]}")


@operation(
    "DELETE",
    "/v1/videos/{id}",
    "Delete a video; one that is under way is cancelled.",
    group="OpenAI",
    answer=DeletedAnswer,
    errors=(404,),
)
async def delete(request: Request) -> Response:
    """Deletes a video."""
    job = _job(request)
    await in_thread(service_of(request).engine.forget, job)
    return Json({"id": job.id, "object": "video.deleted", "deleted": True})


@operation(
    "POST",
    "/v1/videos/{id}/remix",
    "Generate a video with another prompt, and otherwise as this one: its seed, too.",
    group="OpenAI",
    body=RemixFields,
    form=RemixFields,
    answer=VideoAnswer,
    errors=_ERRORS,
)
async def remix(request: Request) -> Response:
    """Submits a job like another one."""
    service, job = service_of(request), _job(request)
    if content_type(request) == "multipart/form-data":
        values, _ = await read_form(request, service.settings.most_body)
        fields = read_fields(RemixFields, values, strict=False)
    else:
        fields = read_fields(RemixFields, await read_json(request))
    generation = dataclasses.replace(job.generation, prompt=fields.prompt)
    given = [generation], client_of(request)
    [made] = await in_thread(functools.partial(service.submit, videos=True), *given)
    service.remixes[made] = job.id
    return Json(_describe(service, made))


async def _read(request: Request) -> tuple[VideoFields, bytes | None]:
    """Returns the fields of a request, from a form or from JSON, and its input_reference."""
    service = service_of(request)
    if content_type(request) != "multipart/form-data":
        fields = read_fields(VideoFields, _with_number(await read_json(request)))
        return fields, await in_thread(_json_reference, fields.input_reference)
    values, files = await read_form(request, service.settings.most_body)
    if unknown := set(files) - {_REFERENCE}:
        raise Refused(f"{min(unknown)[:100]!r} is no file here; send {_REFERENCE}")
    sent = files.get(_REFERENCE, [])
    if len(sent) > 1:
        raise Refused(f"{_REFERENCE} must be given at most once (got {len(sent)})")
    texts = form_values(values)
    named = [name for name in texts if name.startswith(_REFERENCE)]
    given = [texts.pop(name) for name in named]
    fields = read_fields(VideoFields, texts, strict=False)
    if given and not sent:
        return fields, await in_thread(_json_reference, given[0])
    return fields, sent[0] if sent else None


def _with_number(values: dict[str, Any]) -> dict[str, Any]:
    """Returns the values of a JSON body with OpenAI's seconds, a text, as a number."""
    text = values.get("seconds")
    if not isinstance(text, str):
        return values
    try:
        return {**values, "seconds": float(text)}
    except ValueError:
        return values


def _json_reference(value: Any) -> bytes | None:
    """Returns the file that a JSON body has: base64, or an object with image_url."""
    if isinstance(value, dict):
        if value.get("file_id"):
            raise Refused(
                f"{_REFERENCE} must have an image_url, as no files are kept here (got a file_id)",
                param=_REFERENCE,
            )
        value = value.get("image_url")
    return None if value is None else decode_base64(value, _REFERENCE)


def _generation(service: Service, fields: VideoFields, sent: bytes | None) -> Generation:
    """Returns what a request asks for; decodes what it starts from, which takes a while."""
    entry = model_called(service, fields.model, videos=True)
    if entry.fps is None:
        raise Refused(
            f"model {entry.name!r} generates images, which /v1/images is for; name a model that "
            "generates videos",
            param="model",
        )
    width, height = read_size(fields.size)
    count = _count(entry, fields)
    own = {one.name: getattr(fields, one.name) for one in dataclasses.fields(TextSettings)}
    settings = service.settings
    given: dict[str, Any] = {}
    if sent is not None and is_still(sent):
        given["image"] = image_from_bytes(sent, _REFERENCE, settings.most_pixels)
    elif sent is not None:
        given["video"] = read_video(sent, _REFERENCE, settings, count)
    given |= {"fps": fields.fps, "strength": fields.strength, "num_frames": count}
    given["guidance_scale_2"] = fields.guidance_scale_2
    return Generation(**{**own, **given, "model": entry.name, "width": width, "height": height})


def _count(entry: ModelEntry, fields: VideoFields) -> int | None:
    """Returns the number of frames; None for the model's own."""
    if fields.seconds is None:
        return fields.num_frames
    if fields.num_frames is not None:
        raise Refused("seconds must be left out where num_frames is given", param="seconds")
    step = entry.frames_multiple or 1
    return 1 + step * round(fields.seconds * (fields.fps or entry.fps or 1) / step)


def _job(request: Request) -> Job:
    """Returns the job of the video that a path names.

    Raises:
        NotFound: there is none, or it belongs to another key, or generates images.
    """
    job = service_of(request).job(request)
    if not job.is_of_videos:
        raise NotFound(f"there is no video {job.id!r}; the job of this id generates images")
    return job


def _video(job: Job) -> Any:
    """Returns a job's video; raises Refused where there is none, or not yet."""
    if job.state == "done":
        return job.images[0]
    if job.error is not None:
        raise job.error
    why = "was cancelled" if job.is_over else "is not done yet; ask for its status first"
    raise Refused(f"the video {why}", status=409, code="not_ready")


def _describe(service: Service, job: Job) -> dict[str, Any]:
    """Returns what a client reads of a video."""
    generation, error = job.generation, None
    if job.is_over and job.state != "done":
        code, message = "cancelled", "the job was cancelled"
        if job.error is not None:
            code, message = job.error.code, str(job.error)
        error = {"code": code, "message": message}
    ended = None if job.ended is None else int(job.ended)
    kept = None if ended is None else ended + int(service.engine.settings.keep_seconds)
    return {
        "id": job.id,
        "object": "video",
        "model": generation.model,
        "status": _STATES.get(job.state, "failed"),
        "progress": int(100 * job.progress),
        "created_at": int(job.created),
        "completed_at": ended if job.state == "done" else None,
        "expires_at": kept,
        "prompt": generation.prompt,
        "size": f"{generation.width}x{generation.height}",
        # The first frame is there at the beginning, so that what was asked for is answered.
        "seconds": f"{((generation.num_frames or 1) - 1) / (generation.fps or 1):.3g}",
        "remixed_from_video_id": service.remixes.get(job),
        "error": error,
    }


def _order(request: Request) -> str:
    order = request.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise Refused(f"order must be one of asc, desc (got {order[:40]!r})", param="order")
    return order


def _limit(request: Request) -> int:
    text = request.query_params.get("limit", str(_USUAL))
    limit = int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
    if not 1 <= limit <= _MOST:
        raise Refused(
            f"limit must be a whole number from 1 up to {_MOST} (got {text[:40]!r})", param="limit"
        )
    return limit


OPERATIONS = (create, list_videos, retrieve, content, delete, remix)
