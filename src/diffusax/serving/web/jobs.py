"""Jobs: submit one, watch it, fetch its images, cancel it."""

import contextlib
import dataclasses
import functools
from collections.abc import AsyncIterator
from typing import Any

from starlette.concurrency import run_in_threadpool as in_thread
from starlette.requests import Request
from starlette.responses import Response

from diffusax.images.clips import SUFFIXES, text_of
from diffusax.serving.engine.jobs import Job, State
from diffusax.serving.engine.videos import MovingPreview, Video
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.requests.generation import (
    read_image,
    read_text,
    settings_of,
    write_infotext,
)
from diffusax.serving.web.bodies import (
    content_type,
    decode_base64,
    open_with_texts,
    read_form,
    read_json,
)
from diffusax.serving.web.fields import Deadline, GenerationFields, SentImage, read_fields
from diffusax.serving.web.openapi import operation
from diffusax.serving.web.replies import KEEP_ALIVE, Json, data_uri, encode, send_file, sse, stream
from diffusax.serving.web.service import (
    client_of,
    events_of,
    service_of,
    to_generation,
)
from diffusax.text.extra_networks import prompt_warnings


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobFields(GenerationFields):
    """What to generate, and by when. Fields that are left out take the model's own values."""

    deadline: Deadline | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobError:
    """Why a job failed."""

    message: str
    param: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobAnswer:
    """A job. Times are seconds since 1970; eta is in seconds from now."""

    id: str
    state: State
    position: int
    progress: float
    steps_done: int
    steps: int
    eta: float | None
    seeds: list[int]
    created: float | None
    started: float | None
    ended: float | None
    deadline: float | None
    """When it fails unless it is done."""
    error: JobError | None
    images: list[str | None]
    """The addresses of the images that are done."""
    videos: list[str | None]
    """The addresses of the videos that are done, for models that generate videos."""
    settings: dict[str, Any]
    """The request without its images, with all values of its model."""
    warnings: list[str]
    """What in the prompts is read differently than A1111 reads it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobsAnswer:
    """The client's jobs, newest first."""

    jobs: list[JobAnswer]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PngInfoFields:
    """An image with settings in its file."""

    image: SentImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class PngInfoAnswer:
    """The settings of an image as fields of a job, and as text in A1111's form."""

    settings: dict[str, Any]
    text: str
    left_out: list[str]
    """What the file states and the fields lack."""


def describe(job: Job, *, settings: bool = True) -> dict[str, Any]:
    """Returns what a client reads of a job."""
    error = job.error and {"message": str(job.error), "param": job.error.param}
    found: dict[str, Any] = {
        "id": job.id,
        "state": job.state,
        "position": job.position,
        "progress": round(job.progress, 4),
        "steps_done": job.steps_done,
        "steps": job.steps,
        "eta": job.eta,
        "seeds": job.seeds,
        "created": job.created,
        "started": job.started,
        "ended": job.ended,
        "deadline": job.deadline,
        "error": error,
        "images": [],
        "videos": [],
    }
    kind = "videos" if job.is_of_videos else "images"
    found[kind] = [
        None if image is None else f"/jobs/{job.id}/{kind}/{i}"
        for i, image in enumerate(job.images)
    ]
    if not settings:
        return found
    warnings = prompt_warnings(job.generation.prompt, job.generation.negative_prompt)
    return {**found, "settings": settings_of(job.generation), "warnings": list(warnings)}


@operation(
    "POST",
    "/jobs",
    "Submit a job; answers at once.",
    group="Jobs",
    body=JobFields,
    answer=JobAnswer,
    status=202,
    errors=(404, 413, 422, 429, 503),
)
async def submit(request: Request) -> Response:
    """Submits a job."""
    service = service_of(request)
    fields = read_fields(JobFields, await read_json(request))
    generation = await in_thread(to_generation, fields, service.settings)
    given = [generation], client_of(request), fields.deadline
    [job] = await in_thread(functools.partial(service.submit, videos=True), *given)
    return Json(describe(job), status_code=202, headers={"Location": f"/jobs/{job.id}"})


@operation("GET", "/jobs", "The client's jobs, newest first.", group="Jobs", answer=JobsAnswer)
async def list_jobs(request: Request) -> Response:
    """Lists jobs."""
    return Json({"jobs": [describe(job) for job in service_of(request).jobs_of(request)]})


@operation("GET", "/jobs/{id}", "One job.", group="Jobs", answer=JobAnswer, errors=(404,))
async def show(request: Request) -> Response:
    """Shows a job."""
    return Json(describe(service_of(request).job(request)))


@operation("DELETE", "/jobs/{id}", "Cancel a job.", group="Jobs", answer=JobAnswer, errors=(404,))
async def cancel(request: Request) -> Response:
    """Cancels a job, if it has not ended."""
    job = service_of(request).job(request)
    await in_thread(job.cancel)
    return Json(describe(job))


@operation(
    "GET",
    "/jobs/{id}/events",
    "What happens to a job, as server-sent events: state, progress, preview, image, end. A preview "
    "of a video is its middle frame, and has frames from the first to the last besides.",
    group="Jobs",
    query=("previews",),
    answer="text/event-stream",
    errors=(404,),
)
async def events(request: Request) -> Response:
    """Streams a job's events, the first of which tells the present state."""
    job = service_of(request).job(request)
    previews = request.query_params.get("previews", "1") not in ("0", "false")
    return stream(_events(job, previews))


async def _events(job: Job, previews: bool) -> AsyncIterator[bytes]:
    async with contextlib.aclosing(events_of(job, previews=previews)) as found:
        async for event in found:
            if event is None:
                yield KEEP_ALIVE
                continue
            data = describe(job, settings=False)
            if event.kind in ("preview", "image"):
                data["index"] = event.index
            if event.kind == "preview":
                data |= await in_thread(_shown, event.image)
            yield sse(event.kind, data)


def _shown(preview: Any) -> dict[str, Any]:
    """Returns a preview as a data URI; of a video its middle frame, and some of all of it."""
    if not isinstance(preview, MovingPreview):
        return {"preview": data_uri(encode(preview, "jpeg"), "jpeg")}
    frames = [data_uri(encode(frame, "jpeg"), "jpeg") for frame in preview.frames]
    return {"preview": data_uri(encode(preview.middle, "jpeg"), "jpeg"), "frames": frames}


@operation(
    "GET",
    "/jobs/{id}/images/{number}",
    "An image of a job, with its settings in the text of the PNG. The id is the key to it.",
    group="Jobs",
    answer="image/png",
    errors=(404,),
    open=True,
)
async def image(request: Request) -> Response:
    """Sends an image. Its address is enough, as img elements send no key."""
    job, number, found = _result(request, "image")
    text = write_infotext(job.singles[number], job.seeds[number])
    data = await in_thread(encode, found, "png", text)
    name = f'inline; filename="diffusax-{job.seeds[number]}.png"'
    return Response(data, media_type="image/png", headers={"Content-Disposition": name})


@operation(
    "GET",
    "/jobs/{id}/videos/{number}",
    "A video of a job, with its settings in the file's comment. The id is the key to it. variant "
    "is video, thumbnail (its middle frame, WebP) or spritesheet (some frames, JPEG).",
    group="Jobs",
    query=("variant",),
    answer="*/*",
    errors=(404, 416, 422),
    open=True,
)
async def video(request: Request) -> Response:
    """Sends a video. Its address is enough, as video elements send no key."""
    job, number, found = _result(request, "video")
    return await in_thread(send_video, request, found, f"diffusax-{job.seeds[number]}")


def send_video(request: Request, video: Video, name: str) -> Response:
    """Answers with a video, or with the variant of it that a request asks for.

    name: of the file, without its ending.
    """
    match request.query_params.get("variant", "video"):
        case "video":
            suffix = SUFFIXES[video.file.media_type]
            return send_file(request, video.file.data, video.file.media_type, name + suffix)
        case "thumbnail":
            return send_file(request, encode(video.poster, "webp"), "image/webp", f"{name}.webp")
        case "spritesheet":
            sheet = encode(video.spritesheet(), "jpeg")
            return send_file(request, sheet, "image/jpeg", f"{name}.jpg")
        case other:
            raise Refused(
                f"variant must be one of video, thumbnail, spritesheet (got {other[:40]!r})",
                param="variant",
            )


def _result(request: Request, kind: str) -> tuple[Job, int, Any]:
    """Returns the job that a path names, which image or video of it, and this itself.

    Raises:
        NotFound: there is no such one, or not yet.
    """
    job = service_of(request).engine.job(request.path_params["id"])
    named = request.path_params["number"].partition(".")[0]
    number = int(named) if named.isascii() and named.isdigit() and len(named) < 6 else -1
    own = job.is_of_videos == (kind == "video")
    found = job.images[number] if own and 0 <= number < len(job.images) else None
    if found is None:
        raise NotFound(f"the job has no {kind} {named[:20]!r}, or not yet; look at its {kind}s")
    return job, number, found


@operation(
    "POST",
    "/png-info",
    "The settings that an image's file holds, whichever program wrote them.",
    group="Jobs",
    body=PngInfoFields,
    form=PngInfoFields,
    files=("image",),
    answer=PngInfoAnswer,
    errors=(413, 422),
)
async def png_info(request: Request) -> Response:
    """Reads the settings of an image."""
    settings = service_of(request).settings
    if content_type(request) == "multipart/form-data":
        _, files = await read_form(request, settings.most_body)
        sent: str | bytes = files.get("image", [b""])[0]
    else:
        sent = read_fields(PngInfoFields, await read_json(request)).image
    return Json(await in_thread(settings_in_file, sent, settings.most_pixels))


def settings_in_file(sent: str | bytes, most_pixels: int) -> dict[str, Any]:
    """Returns the settings in an image or a video, which is sent as a file or in base64."""
    data = decode_base64(sent, "image") if isinstance(sent, str) else sent
    if text := text_of(data):
        return vars(read_text(text))
    return vars(read_image(open_with_texts(data, "image", most_pixels)))


OPERATIONS = (submit, list_jobs, show, cancel, events, image, video, png_info)
