"""What the endpoints share: the engine, the settings, and the way from a request to images."""

import asyncio
import contextlib
import dataclasses
import threading
import weakref
from collections.abc import AsyncGenerator, Iterable, MutableMapping, Sequence
from typing import Any

from PIL import Image
from starlette.requests import Request

from diffusax.images.clips import Clip, is_still
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.catalogue.entries import ModelEntry
from diffusax.serving.engine.engine import Engine
from diffusax.serving.engine.jobs import Job
from diffusax.serving.engine.upscaling import Upscalers
from diffusax.serving.requests.errors import Closing, NotFound, Refused
from diffusax.serving.requests.generation import (
    INPAINT,
    TEXT,
    TEXT_VIDEO,
    VIDEO_TASKS,
    Control,
    Generation,
)
from diffusax.serving.web.bodies import (
    PixelBudget,
    decode_base64,
    image_from_base64,
    image_from_bytes,
    video_from_bytes,
)
from diffusax.serving.web.fields import GenerationFields
from diffusax.serving.web.monitoring import LOG, log_job
from diffusax.serving.web.security import WebSettings, check_most, client_name

_USUAL_FRAMES = 121
"""The most frames that are read of a video where a request does not say how many."""


@dataclasses.dataclass(eq=False)
class Service:
    """The engine behind the endpoints, with what the endpoints have to remember."""

    engine: Engine
    catalogue: Catalogue
    settings: WebSettings
    opened: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set once the first model is loaded."""
    failure: str = ""
    """Why the first model could not be loaded."""
    draining: bool = False
    pixels: PixelBudget = dataclasses.field(init=False)
    """The pixels of the images of all requests."""
    upscalers: Upscalers = dataclasses.field(init=False)
    """What makes images larger."""
    remixes: MutableMapping[Job, str] = dataclasses.field(default_factory=weakref.WeakKeyDictionary)
    """The ids of the jobs that others were made like, by these."""

    def __post_init__(self) -> None:
        each, every = self.settings.most_request_pixels, self.settings.most_waiting_pixels
        self.pixels = PixelBudget(each, every)
        self.upscalers = Upscalers(lambda: self.catalogue.upscalers, self.settings.most_pixels)
        keys = self.settings.priorities
        self._priorities = {client_name(key): priority for key, priority in keys.items()}

    def open(self, sizes: Sequence[tuple[int, int]] = ()) -> None:
        """Loads the default model, and compiles for images of these heights and widths."""
        try:
            entry = self.catalogue.entry()
            first = self.catalogue.check(_plain_request(entry, entry.height, entry.width))
            pipe, _ = self.catalogue.acquire(first)
            self.catalogue.release(pipe)
            if sizes:
                self.engine.warm([_plain_request(entry, *size) for size in sizes])
            self.opened.set()
        except Exception as error:
            LOG.exception("the model could not be loaded")
            self.failure = f"the model could not be loaded ({error}); start with another --model"

    def check(self, generation: Generation) -> Generation:
        """Checks what is asked for, also against the settings, and fills in the model's defaults.

        Raises:
            Refused: it is not possible, or asks for more than the settings allow.
        """
        # Before the catalogue reads it, and again with the defaults filled in.
        self._check_bounds(generation)
        filled = self.catalogue.check(generation)
        self._check_bounds(filled)
        return filled

    def check_size(self, width: int, height: int) -> None:
        """Refuses a size in pixels that is too large, before an image is resized to it."""
        most = self.settings.most_image_pixels
        if width * height > most:
            raise Refused(
                f"width times height must be at most {most} pixels (got {width}x{height}); make "
                "the image smaller",
                param="width",
                code="limit_exceeded",
            )

    def submit(
        self,
        generations: Iterable[Generation],
        client: str,
        deadline: float | None = None,
        *,
        videos: bool = False,
    ) -> list[Job]:
        """Submits jobs together: all of them, or none. May block for a moment.

        Args:
            generations: what to generate, one job each.
            client: who asks for them, see `client_of`.
            deadline: the seconds within which they must be done.
            videos: whether the client can do with videos.

        Raises:
            Refused: one is not possible, the client has too many jobs, or the queue is full.
        """
        try:
            if self.draining:
                raise Closing("the server is stopping; ask another one, or this one later")
            found = [self.check(generation) for generation in generations]
            count = sum([generation.num_images for generation in found])
            check_most("num_images", count, self.settings.most_images, "images")
            if not videos:
                _check_images(found)
        except Refused:
            self.engine.metrics.count_job("refused")
            raise
        jobs: list[Job] = []
        given: Any = {"client": client, "priority": self._priorities.get(client, 0)}
        try:
            for generation in found:
                jobs.append(
                    self.engine.submit(generation, deadline=deadline, checked=True, **given)
                )
        except BaseException:
            for job in jobs:
                job.cancel()
            raise
        for job in jobs:
            log_job(job, self.settings.log_prompts)
        return jobs

    def job(self, request: Request) -> Job:
        """Returns the job that a request's path names, if it is the client's.

        Raises:
            NotFound: there is none, or it belongs to another key.
        """
        job = self.engine.job(request.path_params["id"])
        if self.settings.keys and job.client != client_of(request):
            raise NotFound(f"there is no job {job.id!r}; results are kept for a while only")
        return job

    def jobs_of(self, request: Request) -> list[Job]:
        """Returns the jobs of a request's key; without keys, all."""
        return self.engine.jobs(client_of(request) if self.settings.keys else None)

    def _check_bounds(self, generation: Generation) -> None:
        settings = self.settings
        steps, most_prompt = generation.num_inference_steps, settings.most_prompt
        check_most("num_inference_steps", steps, settings.most_steps, "steps")
        check_most("num_images", generation.num_images, settings.most_images, "images")
        check_most("controls", len(generation.controls), settings.most_controls, "ControlNets")
        for name in ("prompt", "negative_prompt"):
            check_most(name, len(getattr(generation, name)), most_prompt, "characters")
        moves = self.catalogue.entry(generation.model).fps is not None
        own = (1, 1) if generation.image is None or moves else generation.image.size
        width, height = generation.width or own[0], generation.height or own[1]
        self.check_size(width, height)
        frames, most = generation.num_frames or 1, settings.most_video_pixels
        check_most("num_frames", generation.num_frames, settings.most_frames, "frames")
        if moves and width * height * frames > most:
            raise Refused(
                f"width times height times num_frames must be at most {most} (got {width}x{height} "
                f"and {frames}); make the video smaller or shorter",
                param="num_frames",
                code="limit_exceeded",
            )


def _plain_request(entry: ModelEntry, height: int, width: int) -> Generation:
    """Returns a request that a model can meet: with a plain image where it needs one."""
    size: dict[str, Any] = {"height": height, "width": width}
    if entry.kind in (TEXT, TEXT_VIDEO):
        return Generation(**size)
    mask = Image.new("L", (width, height), 255) if entry.kind == INPAINT else None
    image = Image.new("RGB", (width, height))
    last = image if entry.last_image else None
    return Generation(image=image, mask_image=mask, last_image=last, **size)


def _check_images(generations: Iterable[Generation]) -> None:
    """Raises Refused where videos are asked for through an API of images."""
    for one in generations:
        if one.task in VIDEO_TASKS:
            raise Refused(
                f"model {one.model!r} generates videos, which /v1/videos and /jobs are for; name a "
                "model that generates images",
                param="model",
            )


def service_of(request: Request) -> Service:
    """Returns the service that the request came to."""
    return request.app.state.service


def client_of(request: Request) -> str:
    """Returns the name of a request's key, or its address where the server has no keys."""
    return request.scope["diffusax.client"]


def to_generation(fields: GenerationFields, settings: WebSettings) -> Generation:
    """Makes a `Generation` from a request's fields; decodes its images, which takes a while."""
    # Before they are decoded, as small files may be large images.
    check_most("controls", len(fields.controls), settings.most_controls, "ControlNets")
    most_pixels = settings.most_pixels
    values = {one.name: getattr(fields, one.name) for one in dataclasses.fields(GenerationFields)}
    for name in ("image", "mask_image", "last_image"):
        if values[name] is not None:
            values[name] = image_from_base64(values[name], name, most_pixels)
    values["more_images"] = tuple(
        image_from_base64(sent, f"more_images[{i}]", most_pixels)
        for i, sent in enumerate(fields.more_images)
    )
    values |= _videos(fields, settings)
    values["controls"] = tuple(
        Control(
            **{
                **vars(control),
                "image": image_from_base64(control.image, f"controls[{i}].image", most_pixels),
            }
        )
        for i, control in enumerate(fields.controls)
    )
    return Generation(**values)


def _videos(fields: GenerationFields, settings: WebSettings) -> dict[str, Any]:
    """Returns the videos among a request's fields, of which a mask may be one image."""
    sent = {
        name: decode_base64(value, name)
        for name in ("video", "mask_video")
        if (value := getattr(fields, name)) is not None
    }
    return {
        name: image_from_bytes(data, name, settings.most_pixels)
        if name == "mask_video" and is_still(data)
        else read_video(data, name, settings, fields.num_frames, among=len(sent))
        for name, data in sent.items()
    }


def read_video(
    data: bytes, param: str, settings: WebSettings, count: int | None, *, among: int = 1
) -> Clip:
    """Reads a video that a request brings, which takes a while.

    Args:
        data: the file's bytes.
        param: the name of the argument, for errors.
        settings: the limits.
        count: the frames that the request asks for; None for those that it leaves open.
        among: how many the request brings.

    Raises:
        Refused: it is none, or asks for too much.
    """
    check_most("num_frames", count, settings.most_frames, "frames")
    most = min(count or _USUAL_FRAMES, settings.most_frames)
    # Beside them there may be an image.
    together = int(0.9 * settings.most_request_pixels / among)
    limits = {"most_pixels": settings.most_pixels, "most_frames": most, "together": together}
    return video_from_bytes(data, param, **limits)


async def ended(request: Request, jobs: Iterable[Job]) -> None:
    """Waits until jobs have ended; cancels them if the client goes away before.

    Raises:
        Refused: the client has gone.
    """
    jobs = list(jobs)
    gone = asyncio.ensure_future(_gone(request))
    waiting = asyncio.gather(*map(_ended, jobs))
    try:
        await asyncio.wait((gone, waiting), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            raise Refused("the client has gone", status=499, code="client_gone")
    finally:
        for job in jobs:
            if not job.is_over:
                job.cancel()
        for task in (gone, waiting):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


def images_of(job: Job) -> list[Any]:
    """Returns all images, or videos, of a job that has ended.

    Raises:
        Refused: it failed or was cancelled.
    """
    if job.error is not None:
        raise job.error
    if job.state != "done":
        raise Refused("the job was cancelled; ask for it again", status=409, code="cancelled")
    return [image for image in job.images if image is not None]


async def events_of(job: Job, *, previews: bool = False) -> AsyncGenerator[Any, None]:
    """Yields a job's events as they come, up to its end; a slow reader misses older progress."""
    loop = asyncio.get_running_loop()
    waiting: dict[Any, Any] = {}
    came = asyncio.Event()

    def put(event: Any) -> None:
        # Of one kind and image only the latest waits, in the order in which they came.
        key = event.kind, event.index
        waiting.pop(key, None)
        waiting[key] = event
        came.set()

    def listen(event: Any) -> None:
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(put, event)

    stop = job.listen(listen, previews=previews)
    try:
        while True:
            try:
                await asyncio.wait_for(came.wait(), 15.0)
            except TimeoutError:
                yield None
                continue
            came.clear()
            events = list(waiting.values())
            waiting.clear()
            for event in events:
                yield event
                if event.kind == "end":
                    return
    finally:
        stop()


async def _ended(job: Job) -> None:
    """Waits until a job has ended; its steps do not wake the event loop."""
    loop, end = asyncio.get_running_loop(), asyncio.Event()

    def listen(event: Any) -> None:
        if event.kind == "end":
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(end.set)

    stop = job.listen(listen)
    try:
        await end.wait()
    finally:
        stop()


async def _gone(request: Request) -> None:
    """Waits until the client goes away; its body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
