"""A server that runs in this process, and requests to it."""

import contextlib
import dataclasses
import functools
import http.client
import io
import json
import threading
from typing import Any
from urllib.parse import urlsplit

from PIL import Image, ImageDraw

from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine, EngineSettings
from diffusax.serving.web.replies import data_uri, encode
from diffusax.serving.web.security import WebSettings
from diffusax.serving.web.server import Server, address_of, create_app, listen


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a server answers."""

    status: int
    headers: dict[str, str]
    body: bytes

    @functools.cached_property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def image(self) -> Image.Image:
        return Image.open(io.BytesIO(self.body))


@dataclasses.dataclass(frozen=True)
class Running:
    """A server that listens."""

    url: str
    engine: Engine
    service: Any

    def ask(self, method: str, path: str, value: Any = None, *, body: Any = None, **headers: str):
        """Asks for a path; `value` is sent as JSON. Underscores in headers stand for hyphens."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        sent = {name.replace("_", "-"): text for name, text in headers.items()}
        if value is not None:
            body = json.dumps(value).encode()
            sent.setdefault("Content-Type", "application/json")
        with contextlib.closing(connection):
            connection.request(method, path, body, sent)
            answer = connection.getresponse()
            return Answer(
                answer.status, {k.lower(): v for k, v in answer.getheaders()}, answer.read()
            )

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, **headers)

    def post(self, path: str, value: Any = None, **headers: str) -> Answer:
        return self.ask("POST", path, value, **headers)

    def finish(self, id: str) -> Any:
        """Waits for a job, and returns what the server says of it."""
        self.engine.job(id).wait(60)
        return self.get(f"/jobs/{id}").json

    def events(self, path: str, count: int | None = None):
        """Yields the events of a stream with their data, at most `count`; then leaves."""
        connection = http.client.HTTPConnection(urlsplit(self.url).netloc, timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", path)
            answer, name = connection.getresponse(), ""
            assert answer.headers["Content-Type"].startswith("text/event-stream")
            for line in answer:
                text = line.decode().strip()
                if text.startswith("event: "):
                    name = text.removeprefix("event: ")
                elif text.startswith("data: "):
                    yield name, json.loads(text.removeprefix("data: "))
                    count = None if count is None else count - 1
                    if count == 0:
                        return


@contextlib.contextmanager
def running(
    model: str | None = "emoji",
    models: Any = None,
    *,
    bounds: EngineSettings | None = None,
    **settings: Any,
):
    """Starts a server on a free port, and stops it in the end."""
    catalogue = Catalogue(model, models)
    with Engine(catalogue, bounds or EngineSettings(lanes=4, smallest=4)) as engine:
        app = create_app(engine, catalogue, WebSettings(**settings))
        server = Server(app, engine, 10.0)
        listener = listen("127.0.0.1", 0)
        url = address_of(listener)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        app.state.service.opened.set()
        try:
            yield Running(url, engine, app.state.service)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def picture(width: int = 64, height: int = 64, colour: str = "orange") -> Image.Image:
    """A disc on white."""
    image = Image.new("RGB", (width, height), "white")
    ImageDraw.Draw(image).ellipse(
        (width // 4, height // 4, 3 * width // 4, 3 * height // 4), colour
    )
    return image


def mask(width: int = 64, height: int = 64) -> Image.Image:
    """White in the left half."""
    image = Image.new("L", (width, height))
    ImageDraw.Draw(image).rectangle((0, 0, width // 2, height), 255)
    return image


def sent(image: Image.Image) -> str:
    """A picture as JSON carries it."""
    return data_uri(encode(image), "png")
