"""The web application, and how uvicorn runs it: with bounds, until SIGTERM or Ctrl-C."""

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from diffusax.runtime.signals import StopRequest, receiving
from diffusax.serving.catalogue.catalogue import Catalogue
from diffusax.serving.engine.engine import Engine
from diffusax.serving.requests.errors import NotFound, Refused
from diffusax.serving.web import capabilities, hub, jobs, monitoring, openai, videos, writing
from diffusax.serving.web.a1111 import actions, generation, krita, lists
from diffusax.serving.web.a1111.state import A1111
from diffusax.serving.web.monitoring import LOG, ROUTE
from diffusax.serving.web.openapi import Operation, document_operations
from diffusax.serving.web.page import page_operations
from diffusax.serving.web.proxies import Proxies
from diffusax.serving.web.replies import error_reply
from diffusax.serving.web.security import Guard, WebSettings
from diffusax.serving.web.service import Service

try:
    import resource
except ImportError:  # Windows has no such limits.
    resource = None  # type: ignore[assignment]

_MODULES: tuple[Any, ...] = (
    jobs,
    openai,
    videos,
    generation,
    lists,
    actions,
    krita,
    hub,
    capabilities,
    writing,
    monitoring,
)
_LINGER = 2.0
"""The seconds for clients to fetch images that were finished while the server drained."""


def create_app(
    engine: Engine, catalogue: Catalogue, settings: WebSettings | None = None
) -> Starlette:
    """Makes the application: the APIs, jobs, metrics, documentation and the page.

    Arguments:
        engine: runs the jobs.
        catalogue: the models, which is the engine's.
        settings: who may use the server, and its limits.

    Returns:
        An ASGI application. Its `state.service` has `opened`, to set once requests may come, and
        `draining`, to set when no more may.
    """
    settings = settings or WebSettings()
    service = Service(engine, catalogue, settings)
    operations = [one for module in _MODULES for one in module.OPERATIONS]
    shown = [*operations, *document_operations(operations), *page_operations()]
    app = Starlette(
        routes=_routes(shown),
        middleware=[Middleware(Guard, settings=settings, operations=shown)],
        exception_handlers={HTTPException: _http_error},
    )
    app.router.redirect_slashes = False
    app.state.service, app.state.a1111 = service, A1111()
    app.state.metrics = monitoring.Metrics(engine)
    return app


def _routes(operations: Sequence[Operation]) -> list[Route]:
    """Returns a route for each path, which knows all methods there."""
    by_path: dict[str, dict[str, Operation]] = {}
    for one in operations:
        by_path.setdefault(one.path, {})[one.method] = one
    return [_route(path, methods) for path, methods in by_path.items()]


def _route(path: str, methods: dict[str, Operation]) -> Route:
    async def endpoint(request: Request) -> Response:
        request.scope[ROUTE] = path
        method = "GET" if request.method == "HEAD" else request.method
        try:
            with request.app.state.service.pixels.request():
                return await methods[method].endpoint(request)
        except Refused as error:
            return error_reply(request.url.path, error)

    return Route(path, endpoint, methods=list(methods))


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers where no route fits."""
    assert isinstance(error, HTTPException)
    path, shown = request.url.path, f"{request.method} {request.url.path[:100]}"
    if error.status_code == 404:
        found: Refused = NotFound(f"there is no {shown!r} here; /docs lists what there is")
    else:
        text = f"{shown!r} is not possible ({error.detail}); /docs lists what is"
        found = Refused(text, status=error.status_code, code="not_allowed")
    return error_reply(path, found, dict(error.headers or {}))


def listen(host: str, port: int) -> socket.socket:
    """Opens a socket that listens; port 0 takes a free one.

    Raises:
        OSError: the address is another program's, or not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(256)
    except OSError as error:
        found.close()
        raise OSError(
            f"cannot listen at {host} port {port} ({error.strerror or error}); "
            "choose others with --host and --port"
        ) from None
    found.setblocking(False)
    return found


def address_of(listener: socket.socket) -> str:
    """Returns the address that a browser opens."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Serves until it is asked to stop, then finishes what has begun.

    At the first signal new jobs are answered with 503, the others are finished, and the server
    ends a little later, so that clients can fetch their images. A second signal ends it at once.
    """

    def __init__(self, app: Starlette, engine: Engine, drain_timeout: float):
        """Makes the server. drain_timeout: the most seconds to wait for what has begun."""
        settings = app.state.service.settings
        super().__init__(
            uvicorn.Config(
                app,
                http=connection_class(
                    head_timeout=settings.head_timeout,
                    most=most_connections(settings.most_connections),
                    proxies=Proxies(settings.proxies),
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=5,
            )
        )
        self._engine, self._service = engine, app.state.service
        self._timeout = drain_timeout
        self._stop = StopRequest("finishing what has begun")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Takes the signals that ask to stop, inside the context."""
        with receiving(self._stop):
            yield

    async def on_tick(self, counter: int) -> bool:
        """Starts to drain once a signal has come; returns whether the server ends."""
        if self._stop.number is not None and not self._service.draining:
            self._service.draining = True
            threading.Thread(target=self._drain, name="diffusax-drain", daemon=True).start()
        return await super().on_tick(counter)

    def _drain(self) -> None:
        live = any(not job.is_over for job in self._engine.jobs())
        LOG.info("draining")
        self._engine.drain(self._timeout)
        time.sleep(_LINGER if live else 0)
        self.should_exit = True


class Connection(H11Protocol):
    """A connection that is closed when the head of a request does not come in time.

    Where there are too many connections, in all or from one address, those that ask for nothing are
    closed, the oldest first. If all of them ask for something, the new one is answered with 503.
    """

    head_timeout = 15.0
    """The seconds in which the request line and the headers must come."""
    most = 1000
    """The most connections at once, see `most_connections`."""
    proxies = Proxies(())
    """Whose connections are many clients', and have all places."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins to wait for the first request."""
        super().connection_made(transport)
        self.begun = self.loop.time()
        self._head_timer: asyncio.TimerHandle | None = None
        self._wait_for_head()
        others = [other for other in self.connections if isinstance(other, Connection)]
        same = [other for other in others if other.address == self.address]
        # Half of the places are left to other addresses.
        most = self.most if self.proxies.trusts(self.address) else self.most // 2
        if not (_make_room(same, most) and _make_room(others, self.most)):
            LOG.warning("a connection is refused: all %d are busy", len(others))
            self.app = _refuse

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops waiting."""
        self._stop_waiting()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Handles what has come, and waits for the rest of a head that is not whole."""
        super().handle_events()
        if self.conn.their_state is h11.IDLE and self.conn.trailing_data[0]:
            self._wait_for_head()
        elif self.conn.their_state is not h11.IDLE:
            self._stop_waiting()

    @property
    def address(self) -> str:
        """The client's address, without the port."""
        return self.client[0] if self.client else ""

    @property
    def asks_nothing(self) -> bool:
        """Whether no request waits for its answer."""
        return self.cycle is None or self.cycle.response_complete

    def shed(self) -> None:
        """Closes the connection, and leaves its place to others at once."""
        self._stop_waiting()
        self.connections.discard(self)  # type: ignore[arg-type]
        self.transport.abort()

    def _wait_for_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.head_timeout, self.shed)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


def connection_class(
    *, head_timeout: float, most: int, proxies: Proxies | None = None
) -> type[Connection]:
    """Returns the class of connections with these bounds."""
    bounds: dict[str, Any] = {"head_timeout": head_timeout, "most": most}
    bounds["proxies"] = proxies or Proxies(())
    return type("Connection", (Connection,), bounds)


def most_connections(most: int) -> int:
    """Returns the most connections, which the process's limit of open files may lower."""
    if resource is None:
        return most
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(8, min(most, soft // 2))


def _make_room(connections: Iterable[Any], most: int) -> bool:
    """Closes idle connections beyond a number, the oldest first; returns whether that sufficed."""
    found = list(connections)
    excess = len(found) - most
    if excess <= 0:
        return True
    # The newest is the one that room is made for.
    idle = sorted((one for one in found if one.asks_nothing), key=lambda one: one.begun)[:-1]
    for one in idle[:excess]:
        one.shed()
    return len(idle) >= excess


async def _refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers that there are too many connections."""
    error = Refused(
        "the server has too many connections; ask again later",
        status=503,
        code="busy",
        retry_after=10.0,
    )
    await error_reply(scope["path"], error, {"Connection": "close"})(scope, receive, send)
