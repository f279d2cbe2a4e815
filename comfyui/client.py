"""HTTP to a `diffusax serve`, with the standard library alone: ComfyUI's Python lacks diffusax."""

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import quote, urlsplit

SECONDS = 60.0
"""How long an answer, or the next line of events, may take; the server sends one every 15."""
_MOST_BYTES = 2**16


class ServerError(ValueError):
    """Why the server did not do what was asked: its own sentence, where it has said one."""

    def __init__(self, message: str, status: int = 0, retry_after: float = 1.0):
        """Makes an error. status: HTTP's, 0 where nothing answered. retry_after: in seconds."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class Server:
    """A server's address and key, and what can be asked of it."""

    def __init__(self, url: str = "", api_key: str = ""):
        """Remembers where the server is; asks it nothing.

        Args:
            url: the address, such as "http://127.0.0.1:7860"; that of the environment for none.
            api_key: the key; for none, and only at the environment's address, the environment's.

        Raises:
            ServerError: the address is not of HTTP.
        """
        own = default_url()
        self.url = (url.strip() or own).rstrip("/")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ServerError(f"url must be an address such as http://127.0.0.1:7860 (got {url})")
        # A workflow of a stranger may name any address, which must not be told the key.
        if not api_key and self.url == own:
            api_key = os.environ.get("DIFFUSAX_API_KEY", "")
        self.api_key = api_key
        # A redirection would carry the key to another server.
        self._opener = urllib.request.build_opener(_NoRedirection)

    def capabilities(self, seconds: float = SECONDS) -> dict[str, Any]:
        """Returns what the server offers: models, samplers, LoRAs, ControlNets, limits."""
        return self._json("GET", "/capabilities", seconds=seconds)

    def submit(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Submits a job and returns what the server says of it."""
        return self._json("POST", "/jobs", json.dumps(fields).encode())

    def job(self, id: str) -> dict[str, Any]:
        """Returns what the server says of a job."""
        return self._json("GET", f"/jobs/{quote(id)}")

    def cancel(self, id: str) -> None:
        """Cancels a job, unless it has ended."""
        self._fetch("DELETE", f"/jobs/{quote(id)}")

    def image(self, id: str, index: int) -> bytes:
        """Returns an image of a job that is done: a PNG file with its settings."""
        return self._fetch("GET", f"/jobs/{quote(id)}/images/{index}")

    def events(self, id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yields the names and the data of a job's events until it has ended."""
        name = ""
        with self._open("GET", f"/jobs/{quote(id)}/events") as answer:
            for line in answer:
                field, _, text = line.decode().rstrip("\r\n").partition(": ")
                if field == "event":
                    name = text
                elif field == "data":
                    yield name, json.loads(text)

    def _json(self, method: str, path: str, data: Any = None, **options: Any) -> dict[str, Any]:
        body = self._fetch(method, path, data, **options)
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ServerError(f"{self.url}{path} did not answer with JSON; is it `diffusax serve`?")
        return found

    def _fetch(self, method: str, path: str, data: Any = None, **options: Any) -> bytes:
        with self._open(method, path, data, **options) as answer:
            body: bytes = answer.read()
            return body

    def _open(
        self, method: str, path: str, data: bytes | None = None, seconds: float = SECONDS
    ) -> Any:
        """Returns an answer to read.

        Raises:
            ServerError: the server refuses, or there is none.
        """
        headers = {"User-Agent": "diffusax-nodes"}
        if data is not None:
            headers["Content-Type"] = "application/json"
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            return self._opener.open(request, timeout=seconds)
        except urllib.error.HTTPError as error:
            raise _refusal(self.url, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ServerError(
                f"{self.url} does not answer ({reason}); does `diffusax serve` run there?"
            ) from None


def default_url() -> str:
    """Returns the address in the environment's DIFFUSAX_SERVER, else that of this machine."""
    return os.environ.get("DIFFUSAX_SERVER", "").strip().rstrip("/") or "http://127.0.0.1:7860"


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows no redirection: the answer becomes an error."""


def _refusal(url: str, error: urllib.error.HTTPError) -> ServerError:
    with error:
        body = error.read(_MOST_BYTES)
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{url} answers {error.code} {error.reason}; is it `diffusax serve`?"
    after = error.headers.get("Retry-After", "")
    return ServerError(message, error.code, float(after) if after.isdecimal() else 1.0)
