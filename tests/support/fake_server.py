"""A server that speaks the page's part of the HTTP contract, at a pace that tests choose."""

import asyncio
import base64
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from PIL import Image, ImageDraw
from PIL.PngImagePlugin import PngInfo
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

import diffusax
from diffusax.images.clips import encode_video
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.jobs import settings_in_file

PAGE = Path(diffusax.__file__).parent / "serving/page"
CSP = "default-src 'self'; img-src 'self' data: blob:; media-src 'self' blob:"
SAMPLERS = ["ddim", "dpm++2m", "dpm++2m_karras", "euler", "euler_a", "heun"]
TITLES = {"dpm++2m_karras": "DPM++ 2M Karras", "dpm++2m": "DPM++ 2M", "euler_a": "Euler a"}
TITLES |= {"euler": "Euler", "heun": "Heun", "ddim": "DDIM"}
TASKS = ["text-to-image", "image-to-image", "inpainting"]


def model(name: str, **changed: Any) -> dict[str, Any]:
    """Returns what /capabilities says of a model."""
    return {
        "name": name,
        "title": name,
        "family": "stable-diffusion",
        "kind": "text-to-image",
        "tasks": TASKS,
        "width": 64,
        "height": 64,
        "multiple": 8,
        "pixels": [1025, 16383],
        "steps": 8,
        "guidance_scale": 2.0,
        "image_guidance_scale": None,
        "sampler": "euler_a",
        "samplers": SAMPLERS,
        "images": 1,
        "strength": True,
        "num_frames": None,
        "frames_multiple": None,
        "fps": None,
        "last_image": False,
        "needs_last_image": False,
        "mask_video": False,
        "guidance_scale_2": False,
        "path": name,
        "loaded": True,
    } | changed


class FakeServer:
    """Draws jobs, two at once, a step every `pace` seconds; nothing moves while `pace` is None.
    The first of several pictures is there after half of the steps.

    While `compiling` is set, jobs wait for programs.

    `asked` lists the bodies of POST /jobs. `full` is how many of the next are refused with 429,
    `wrong` the sentence with which the next job fails, `unfit` that with which the next one is
    refused, `key` the API key that is asked for. `styles` lie on it, and `upscales` says whether it
    makes images larger.
    """

    def __init__(self, pace: float | None = 0.01):
        self.pace = pace
        self.jobs: dict[str, dict[str, Any]] = {}
        self.asked: list[dict[str, Any]] = []
        self.requests: list[str] = []
        self.full = 0
        self.most_body = 2**26
        self.compiling = False
        self.wrong: str | None = None
        self.unfit: str | None = None
        self.key: str | None = None
        self.upscales = False
        self.styles: list[dict[str, str]] = []
        self.port = 0
        self._count = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        """Listens, on the same port as before if it did."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        config = uvicorn.Config(
            self.app(), log_level="critical", timeout_graceful_shutdown=0, lifespan="off"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, kwargs={"sockets": [listener]}, daemon=True
        )
        self._thread.start()
        while not self._server.started:
            time.sleep(0.005)

    def stop(self) -> None:
        """Ends at once, with whatever is open."""
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def app(self) -> Starlette:
        routes = [
            Route("/", lambda _: FileResponse(PAGE / "index.html")),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/capabilities", self.capabilities),
            Route("/jobs", self.submit, methods=["POST"]),
            Route("/jobs", self.list),
            Route("/jobs/{id}", self.get),
            Route("/jobs/{id}", self.cancel, methods=["DELETE"]),
            Route("/jobs/{id}/events", self.events),
            Route("/jobs/{id}/images/{index:int}", self.image),
            Route("/jobs/{id}/videos/{index:int}", self.video),
            Route("/png-info", self.png_info, methods=["POST"]),
            Route("/tokens", self.tokens, methods=["POST"]),
            Route("/loras/{name}/preview", self.lora_preview),
            Route("/sdapi/v1/prompt-styles", lambda _: self._reply(self.styles)),
            Route("/sdapi/v1/upscalers", self.upscalers),
            Route("/sdapi/v1/extra-single-image", self.upscale, methods=["POST"]),
            Mount("/page", StaticFiles(directory=PAGE)),
        ]
        return Starlette(routes=routes, middleware=[Middleware(_Policy)])

    async def capabilities(self, request: Request) -> Response:
        edit = model("emoji-edit", kind="edit", tasks=["edit"], image_guidance_scale=1.5, steps=6)
        several = model(
            "several", title="Looks at several", tasks=TASKS[:2], images=3, strength=False
        )
        plain = model("sd", title="SD 1.5", width=512, height=512)
        moving = {"num_frames": 9, "frames_multiple": 4, "fps": 8, "strength": False}
        moving |= {"width": 96, "height": 64, "multiple": 16, "steps": 4, "pixels": None}
        started = ["text-to-video", "video-to-video"]
        videos = [
            model("wan", kind="text-to-video", tasks=["text-to-video"], **moving),
            model("wan-i2v", kind="image-to-video", tasks=["image-to-video"], **moving),
            model("wan-ends", kind="image-to-video", tasks=["image-to-video"], **moving)
            | {"last_image": True, "needs_last_image": True},
            model("wan-v2v", kind="text-to-video", tasks=started, **moving)
            | {"strength": True, "guidance_scale_2": True},
            model("vace", kind="text-to-video", tasks=[*started, "image-to-video"], **moving)
            | {"images": 4, "mask_video": True},
        ]
        models = [model("emoji"), edit, plain, several, *videos]
        named = lambda name, **more: [{"name": name, "title": name.title(), **more}]  # noqa: E731
        return self._reply(
            {
                "version": "0",
                "models": models,
                "samplers": SAMPLERS,
                "sampler_titles": TITLES,
                "upscales": self.upscales,
                "loras": named("pixel", preview=True) + named("sketch"),
                "embeddings": named("sunny"),
                "controlnets": named("edges") + named("depth"),
                "limits": {
                    "steps": 60,
                    "images": 8,
                    "prompt": 2000,
                    "pixels": 4194304,
                    "frames": 33,
                    "body": self.most_body,
                },
                "api_key_needed": self.key is not None,
            }
        )

    async def submit(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if self.full:
            self.full -= 1
            return _error(429, "the queue is full; try again in 1 second", retry=1)
        if self.unfit:
            message, self.unfit = self.unfit, None
            return _error(422, message)
        body = await request.json()
        self.asked.append(body)
        self._count += 1
        job = _job(f"job{self._count}", body)
        self.jobs[job["id"]] = job
        asyncio.get_running_loop().create_task(self._draw(job))
        return self._reply(_seen(job) | {"settings": job["settings"]}, 202)

    async def _draw(self, job: dict[str, Any]) -> None:
        while self.pace is None or self.compiling or self._running() >= 2:
            await asyncio.sleep(0.01)
            if job["state"] not in ("queued", "compiling"):
                return
            job["state"] = "compiling" if self.compiling else "queued"
        job |= {"state": "running", "started": time.time()}
        if self.wrong:
            job |= {"state": "failed", "error": {"message": self.wrong, "param": None}}
            self.wrong = None
            return
        while job["steps_done"] < job["steps"]:
            await asyncio.sleep(self.pace or 0.01)
            if job["state"] != "running":
                return
            if self.pace is not None:
                job["steps_done"] += 1
                job["progress"] = job["steps_done"] / job["steps"]
                job["eta"] = (job["steps"] - job["steps_done"]) * self.pace
            if len(job["seeds"]) > 1 and job["steps_done"] > job["steps"] / 2:
                job["pictures"][0] = job["pictures"][0] or _png(job, job["seeds"][0])
        job["pictures"] = [_png(job, seed) for seed in job["seeds"]]
        job |= {"state": "done", "ended": time.time(), "progress": 1.0, "eta": 0}

    def _running(self) -> int:
        return sum(job["state"] == "running" for job in self.jobs.values())

    async def list(self, request: Request) -> Response:
        return self._refused(request) or self._reply({"jobs": [*map(_seen, self.jobs.values())]})

    async def get(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        if refused := self._refused(request) or (None if job else _error(404, "no such job")):
            return refused
        return self._reply(_seen(job) | {"settings": job["settings"]})

    async def cancel(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        if job is None:
            return _error(404, "no such job")
        if job["state"] in ("queued", "running"):
            job["state"] = "cancelled"
        return self._reply(_seen(job))

    async def image(self, request: Request) -> Response:
        self.requests.append(request.url.path)
        job = self.jobs.get(request.path_params["id"])
        if refused := self._refused(request) or (None if job else _error(404, "no such job")):
            return refused
        return Response(job["pictures"][request.path_params["index"]], media_type="image/png")

    async def video(self, request: Request) -> Response:
        self.requests.append(str(request.url.path))
        job = self.jobs[request.path_params["id"]]
        if request.query_params.get("variant") == "thumbnail":
            return Response(_png(job, job["seeds"][0]), media_type="image/png")
        frames = [_frame(job, at) for at in range(job["settings"]["num_frames"])]
        file = encode_video(frames, job["settings"]["fps"], _text(job, job["seeds"][0]))
        return Response(file.data, media_type=file.media_type)

    async def events(self, request: Request) -> Response:
        job = self.jobs.get(request.path_params["id"])
        if refused := self._refused(request) or (None if job else _error(404, "no such job")):
            return refused
        return StreamingResponse(_events(job), media_type="text/event-stream")

    async def png_info(self, request: Request) -> Response:
        self.requests.append("/png-info")
        async with request.form() as form:
            data = await form["image"].read()
        try:
            found = settings_in_file(data, 2**24)
        except Refused as error:
            return _error(422, str(error))
        return self._reply(found)

    async def tokens(self, request: Request) -> Response:
        body = await request.json()
        count = len(body["prompt"].split())
        return self._reply({"tokens": count, "most": 75 * (1 + count // 76), "window": 75})

    async def lora_preview(self, request: Request) -> Response:
        self.requests.append(request.url.path)
        buffer = io.BytesIO()
        Image.new("RGB", (8, 8), "purple").save(buffer, "PNG")
        return Response(buffer.getvalue(), media_type="image/png")

    async def upscalers(self, request: Request) -> Response:
        return self._reply([{"name": name} for name in ("None", "Lanczos", "Nearest", "sharp")])

    async def upscale(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        if self.wrong:
            message, self.wrong = self.wrong, None
            return JSONResponse({"error": "Refused", "detail": message}, 422)
        data = base64.b64decode(body["image"].split(",")[1])
        image = Image.open(io.BytesIO(data))
        times = body["upscaling_resize"]
        buffer = io.BytesIO()
        image.resize((image.width * times, image.height * times)).save(buffer, "PNG")
        return self._reply({"image": base64.b64encode(buffer.getvalue()).decode(), "html_info": ""})

    def _refused(self, request: Request) -> Response | None:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return _error(401, "an API key is needed; send it as a Bearer token")
        return None

    def _reply(self, value: Any, status: int = 200) -> Response:
        return JSONResponse(value, status)


class _Policy:
    """Sends the policy under which the page has to work."""

    def __init__(self, app: Any):
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["Content-Security-Policy"] = CSP
            await send(message)

        await self.app(scope, receive, sending)


@contextlib.contextmanager
def serving(**options: Any) -> Iterator[FakeServer]:
    """Runs a fake server for a block."""
    server = FakeServer(**options)
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _error(status: int, message: str, retry: int | None = None) -> Response:
    headers = {"Retry-After": str(retry)} if retry else None
    error = {"message": message, "type": "error", "param": None, "code": "refused"}
    return JSONResponse({"error": error}, status, headers)


def _job(name: str, body: dict[str, Any]) -> dict[str, Any]:
    pictures = {"image", "more_images", "mask_image", "controls", "last_image", "mask_video"}
    settings = {field: body[field] for field in body.keys() - pictures - {"video"}}
    if "video" in body:
        settings = {"num_frames": 5, "fps": 10} | settings
    seeds = [body["seed"] + at for at in range(body["num_images"])]
    return {
        "id": name,
        "state": "queued",
        "position": 0,
        "progress": 0.0,
        "steps_done": 0,
        "steps": body["num_inference_steps"],
        "eta": None,
        "seeds": seeds,
        "created": time.time(),
        "started": None,
        "ended": None,
        "error": None,
        "pictures": [None] * len(seeds),
        "settings": settings,
    }


def _seen(job: dict[str, Any]) -> dict[str, Any]:
    seen = {field: job[field] for field in job if field not in ("pictures", "settings")}
    urls = [f"/jobs/{job['id']}/images/{at}" for at in range(len(job["pictures"]))]
    there = [url if one else None for url, one in zip(urls, job["pictures"], strict=True)]
    if job["settings"].get("num_frames") is None:
        return seen | {"images": there, "videos": []}
    return seen | {"images": [], "videos": there}


async def _events(job: dict[str, Any]) -> AsyncIterator[str]:
    steps = -1
    kind = "state"
    while True:
        if kind != "state" or steps < 0:
            yield f"event: {kind}\ndata: {json.dumps(_seen(job))}\n\n"
        if job["state"] in ("done", "failed", "cancelled"):
            yield f"event: end\ndata: {json.dumps(_seen(job))}\n\n"
            return
        if job["steps_done"] > steps:
            steps = job["steps_done"]
            preview = base64.b64encode(_png(job, job["seeds"][0], 16)).decode()
            told = _seen(job) | {"preview": f"data:image/png;base64,{preview}", "index": 0}
            if job["settings"].get("num_frames"):
                told["frames"] = [_uri(_frame(job, at)) for at in (0, 4, 8)]
            yield f"event: preview\ndata: {json.dumps(told)}\n\n"
        kind = "progress"
        await asyncio.sleep(0.02)


def _png(job: dict[str, Any], seed: int, side: int | None = None) -> bytes:
    """Draws a disc whose colours follow from the seed, with the settings as A1111 writes them."""
    settings = job["settings"]
    width, height = (side, side) if side else (settings["width"], settings["height"])
    hue = f"hsl({seed * 47 % 360}, 70%, 55%)"
    image = Image.new("RGB", (width, height), f"hsl({seed * 47 % 360 + 180}, 35%, 88%)")
    ImageDraw.Draw(image).ellipse((width / 5, height / 5, width * 0.8, height * 0.8), hue)
    info = PngInfo()
    info.add_text("parameters", _text(job, seed))
    buffer = io.BytesIO()
    image.save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def _text(job: dict[str, Any], seed: int) -> str:
    settings = job["settings"]
    text = f"{settings['prompt']}\nSteps: {job['steps']}, Sampler: Euler a, Seed: {seed}"
    frames, fps = settings.get("num_frames"), settings.get("fps")
    return f"{text}, Frames: {frames}, FPS: {fps}" if frames else text


def _frame(job: dict[str, Any], at: int) -> Image.Image:
    """Draws a bar that goes from left to right."""
    width, height = job["settings"]["width"], job["settings"]["height"]
    image = Image.new("RGB", (width, height), "navy")
    ImageDraw.Draw(image).rectangle((at * width // 12, 0, (at + 3) * width // 12, height), "gold")
    return image


def _uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
