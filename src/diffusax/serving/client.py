"""A client of a server's jobs, for which the standard library is enough."""

import base64
import io
import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, urlsplit

from diffusax._version import __version__

SECONDS = 60.0
"""How long an answer may take."""
_ATTEMPTS = 30
"""How often a request is repeated while the server is busy or starting."""
_LONGEST = 30.0
"""The most seconds between two of these attempts."""
ENDED = ("done", "failed", "cancelled")


class Client:
    """Submits requests to a server, `diffusax serve`, and fetches their images and videos."""

    def __init__(self, url: str, api_key: str | None = None):
        """Remembers where the server is; asks it nothing.

        Args:
            url: the server's address, such as "http://127.0.0.1:8000".
            api_key: the key of a server that asks for one.

        Raises:
            ValueError: the address is not of HTTP.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ValueError(f"server must be an address such as http://127.0.0.1:8000 (got {url})")
        self.url = url.rstrip("/")
        self._headers = {"User-Agent": f"diffusax/{__version__}"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        # A redirection would carry the key to another server.
        self._opener = urllib.request.build_opener(_NoRedirection)

    def capabilities(self) -> dict[str, Any]:
        """Returns what the server offers: models, samplers, LoRAs, limits."""
        return self._json("GET", "/capabilities")

    def submit(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Submits a request and returns its job; waits while the server's queue is full.

        fields: those of `diffusax.serving.Generation` that are given; PIL images as they are, and
            a video as the bytes of its file.
        """
        data = json.dumps(_encoded(dict(fields))).encode()
        for attempt in range(_ATTEMPTS):
            try:
                return self._json("POST", "/jobs", data)
            except Refusal as error:
                if error.status not in (429, 503) or attempt == _ATTEMPTS - 1:
                    raise
                time.sleep(min(max(error.retry_after, 0.1), _LONGEST))
        raise AssertionError

    def job(self, id: str) -> dict[str, Any]:
        """Returns how far a job is."""
        return self._json("GET", f"/jobs/{quote(id)}")

    def image(self, id: str, index: int) -> bytes:
        """Returns an image of a job that is done, a PNG file with its settings."""
        return self._fetch("GET", f"/jobs/{quote(id)}/images/{index}")

    def video(self, id: str, index: int) -> bytes:
        """Returns a video of a job that is done, a file with its settings."""
        return self._fetch("GET", f"/jobs/{quote(id)}/videos/{index}")

    def cancel(self, id: str) -> None:
        """Cancels a job."""
        self._fetch("DELETE", f"/jobs/{quote(id)}")

    def _json(self, method: str, path: str, data: bytes | None = None) -> dict[str, Any]:
        body = self._fetch(method, path, data)
        try:
            found = json.loads(body)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ValueError(f"{self.url}{path} did not answer with JSON; is it `diffusax serve`?")
        return found

    def _fetch(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Returns the body of an answer.

        Raises:
            Refusal: the server refuses.
            ValueError: there is no such server.
        """
        headers = self._headers | ({"Content-Type": "application/json"} if data else {})
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with self._opener.open(request, timeout=SECONDS) as answer:
                body: bytes = answer.read()
                return body
        except urllib.error.HTTPError as error:
            raise _refusal(self.url, error) from None
        except OSError as error:
            reason = getattr(error, "reason", error)
            raise ValueError(
                f"{self.url} does not answer ({reason}); does `diffusax serve` run there?"
            ) from None


class Refusal(ValueError):
    """The server's own sentence about a request that it refused."""

    def __init__(self, message: str, status: int, retry_after: float):
        """Makes an error. status: HTTP's. retry_after: the seconds until another attempt."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Follows no redirection: the answer becomes an error."""


def _refusal(url: str, error: urllib.error.HTTPError) -> Refusal:
    with error:
        body = error.read(2**16)
    try:
        message = str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        message = f"{url} answers {error.code} {error.reason}; is it `diffusax serve`?"
    after = error.headers.get("Retry-After", "")
    return Refusal(message, error.code, float(after) if after.isdecimal() else 1.0)


def _encoded(value: Any) -> Any:
    """Replaces PIL images by data URIs, and the bytes of files by base64."""
    if isinstance(value, dict):
        return {name: _encoded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_encoded(one) for one in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if not hasattr(value, "save"):
        return value
    file = io.BytesIO()
    value.save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
