"""Runs the application with uvicorn, and stops it on SIGTERM and Ctrl-C."""

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Generator
from typing import Any

import uvicorn
from starlette.applications import Starlette

from diffusax.runtime.signals import STOP_SIGNALS
from diffusax.serving.engine import Engine
from diffusax.serving.web.log import LOG

_LINGER = 5.0
"""The most seconds for clients to fetch images that were finished while the server drained."""
_CONNECTIONS = 1000


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

    At the first signal new drawings are answered with 503, the others are finished, and the server
    ends once their images have been fetched, or after some seconds. A second signal ends it at
    once.
    """

    def __init__(self, app: Starlette, engine: Engine, drain_timeout: float):
        """Makes the server. drain_timeout: the most seconds to wait for what has begun."""
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                limit_concurrency=_CONNECTIONS,
                timeout_keep_alive=30,
                timeout_graceful_shutdown=5,
            )
        )
        self._engine, self._service = engine, app.state.service
        self._timeout = drain_timeout

    def handle_exit(self, sig: int, frame: Any) -> None:
        """Starts to drain at the first signal, and ends at the second."""
        if not self._service.draining:
            self._service.draining = True
            LOG.info("draining", extra={"fields": {"signal": signal.Signals(sig).name}})
            threading.Thread(target=self._drain, name="diffusax-drain", daemon=True).start()
            return
        LOG.info("stopping", extra={"fields": {"signal": signal.Signals(sig).name}})
        self.should_exit = self.force_exit = True

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Handles the signals that ask to stop, in the main thread; raises none of them again."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _drain(self) -> None:
        live = any(not job.is_over for job in self._engine.jobs())
        self._engine.drain(self._timeout)
        until = time.monotonic() + _LINGER
        while live and time.monotonic() < until and self._service.unfetched():
            time.sleep(0.1)
        self.should_exit = True
