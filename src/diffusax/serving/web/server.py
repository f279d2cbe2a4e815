"""Runs the application with uvicorn, and stops it on SIGTERM and Ctrl-C."""

import contextlib
import socket
import threading
import time
from collections.abc import Generator

import uvicorn
from starlette.applications import Starlette

from diffusax.runtime.signals import StopRequest, receiving
from diffusax.serving.engine.engine import Engine
from diffusax.serving.web.connections import connection_class, most_connections
from diffusax.serving.web.log import LOG

_LINGER = 2.0
"""The seconds for clients to fetch images that were finished while the server drained."""


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
