"""Who may use the server and for how much, and what guards all endpoints."""

import base64
import binascii
import dataclasses
import hashlib
import hmac
import ipaddress
import re
import socket
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.bodies import bounded_receive, too_long
from diffusax.serving.web.monitoring import LOG, log_request
from diffusax.serving.web.openapi import Operation
from diffusax.serving.web.proxies import Proxies
from diffusax.serving.web.replies import error_reply

HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data: blob:; "
    "media-src 'self' blob:; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
}
"""What every answer says to browsers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WebSettings:
    """Who may use the server, and how much a request may ask for.

    Sizes are in bytes, times in seconds.
    """

    keys: tuple[str, ...] = ()
    """The API keys; without any, everybody who reaches the address may use the server."""
    priorities: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The priorities of keys, higher ones first; the others have 0."""
    hosts: tuple[str, ...] = ()
    """Names under which browsers may reach the server without a key, beside IP addresses,
    localhost and the machine's own name; "*" stands for all."""
    origins: tuple[str, ...] = ()
    """Origins of other sites whose pages may use the server, such as https://example.org."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies that tell a request's client, scheme and host."""
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Further names of models for clients of OpenAI's API."""
    most_body: int = 64 * 2**20
    """The most bytes of a request's body."""
    most_pixels: int = 4096 * 4096
    """The most pixels of an image that is sent."""
    most_request_pixels: int = 3 * 4096 * 4096
    """The most pixels of all images of one request together."""
    most_waiting_pixels: int = 8 * 4096 * 4096
    """The most pixels of the images of all requests that are being answered."""
    most_image_pixels: int = 2048 * 2048
    """The most pixels of an image that is generated."""
    most_images: int = 16
    """The most images, or videos, of one request."""
    most_frames: int = 161
    """The most frames of a video, generated or sent."""
    most_video_pixels: int = 128 * 2**20
    """The most pixels of all frames of a video that is generated."""
    most_steps: int = 200
    """The most steps of a sampler."""
    most_prompt: int = 10_000
    """The most characters of a prompt or a negative prompt."""
    most_controls: int = 4
    """The most ControlNets of one request."""
    body_timeout: float = 60.0
    """The longest wait for the next bytes of a body."""
    head_timeout: float = 15.0
    """The longest wait for the whole head of a request: its first line and its headers."""
    most_connections: int = 1000
    """The most connections at once; half of them for one address. The most files that the process
    may open bound them, too."""
    log_prompts: bool = False
    """Whether the log names prompts."""


def check_most(name: str, value: int | None, most: int, unit: str) -> None:
    """Refuses a request that asks for too much.

    Arguments:
        name: the name of the argument.
        value: its value, or how many there are; None passes.
        most: the largest possible value.
        unit: what is counted.

    Raises:
        Refused: the value is larger.
    """
    if (value or 0) > most:
        text = f"{name} must be at most {most} {unit} (got {value}); ask for fewer"
        raise Refused(text, param=name, code="limit_exceeded")


def key_of(authorization: str, keys: Sequence[str]) -> str | None:
    """Returns the key that an Authorization header has, or None where it has none of them.

    With Basic, the password is the key, or "user:password" is. Every key is compared in constant
    time, so that the time tells nothing.
    """
    kind, _, value = authorization.partition(" ")
    value = value.strip()
    candidates: list[str] = []
    if kind.lower() == "bearer":
        candidates = [value]
    elif kind.lower() == "basic":
        try:
            pair = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, ValueError):
            return None
        candidates = [pair, pair.partition(":")[2]]
    found = None
    for key in keys:
        for candidate in candidates:
            if hmac.compare_digest(key.encode(), candidate.encode()):
                found = key
    return found


def client_name(key: str) -> str:
    """Returns a name for a key that does not reveal it."""
    return "key-" + hashlib.sha256(b"diffusax " + key.encode()).hexdigest()[:12]


class Guard:
    """Checks a request before its endpoint sees it, and logs and counts the answer.

    A page of another site cannot use the server from its visitors' browsers: requests with another
    site's Origin are refused, and so are those for another Host (DNS rebinding) where no key
    protects the server. What needs a key is refused without one.
    """

    def __init__(self, app: ASGIApp, *, settings: WebSettings, operations: Collection[Operation]):
        """Guards an application. operations: of these, the open ones need no key."""
        self._app, self._settings = app, settings
        opened = [operation.path for operation in operations if operation.open]
        self._open = [re.compile(_pattern(path)) for path in opened]
        names = ("localhost", socket.gethostname(), *settings.hosts)
        self._hosts = {name.lower() for name in names}
        self._proxies = Proxies(settings.proxies)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request, or lets the application do so."""
        if scope["type"] != "http":
            # There are no WebSockets; what is left is the application's start and end.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        begun, status = time.monotonic(), 0
        sent, scope = scope, self._proxies.seen(scope)
        headers, path = Headers(scope=scope), scope["path"]
        bounds = self._settings.most_body, self._settings.body_timeout

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                found = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    found.setdefault(name, value)
                found.setdefault("Cache-Control", "no-store")
                if "content-length" in headers and "transfer-encoding" in headers:
                    # Where two servers disagree about a body's end, what follows it is not trusted.
                    found["Connection"] = "close"
                self._allow_origin(headers, found)
            await send(message)

        try:
            # The name that the proxy was asked by, and the one that it asks by itself.
            self._check_host(headers)
            self._check_host(Headers(scope=sent))
            self._check_origin(headers)
            if scope["method"] == "OPTIONS" and self._foreign(headers):
                await self._preflight(answer)
                return
            scope["diffusax.client"] = self._client(scope, headers)
            self._check_length(headers)
            await self._app(scope, bounded_receive(receive, *bounds), answer)
        except Refused as error:
            if status == 0:
                await error_reply(path, error, _extra(path, error))(scope, receive, answer)
        except Exception:
            LOG.exception("an endpoint failed")
            if status == 0:
                failed = Refused("the server failed; its log says why", status=500, code="failed")
                await error_reply(path, failed)(scope, receive, answer)
            else:
                raise
        finally:
            log_request(scope, status, begun)
            if status:
                scope["app"].state.metrics.count_request(scope, status)

    def _check_host(self, headers: Headers) -> None:
        name = _host_name(headers.get("host", ""))
        known = _is_address(name) or name in self._hosts or "*" in self._hosts
        if not known and not self._settings.keys:
            raise Refused(
                f"Host must be an IP address, localhost or a name that was given to --host-name "
                f"(got {name[:100]!r}); start the server with it, or with API keys",
                status=421,
                code="unknown_host",
            )

    def _foreign(self, headers: Headers) -> str:
        """Returns the other site's origin that a request comes from, or "" for none."""
        origin = headers.get("origin")
        if origin is None:
            # Old browsers send no Origin with some requests, and new ones this for all.
            site = headers.get("sec-fetch-site", "none")
            navigation = headers.get("sec-fetch-mode") in ("navigate", "no-cors")
            return "" if site in ("none", "same-origin") or navigation else "null"
        own = _place(f"{origin.partition(':')[0]}://{headers.get('host', '')}")
        return "" if _place(origin) == own else origin

    def _check_origin(self, headers: Headers) -> None:
        foreign = self._foreign(headers)
        if foreign and foreign not in self._settings.origins:
            raise Refused(
                f"Origin must be the server's own (got {foreign[:100]!r}); start the server with "
                "--allow-origin to let that site's pages use it",
                status=403,
                code="foreign_origin",
            )

    def _check_length(self, headers: Headers) -> None:
        length = headers.get("content-length", "")
        if length.isdigit() and int(length) > self._settings.most_body:
            raise too_long(self._settings.most_body)

    def _client(self, scope: Scope, headers: Headers) -> str:
        """Returns the name of the client: of its key, or its address where there are no keys."""
        keys = self._settings.keys
        if not keys:
            return (scope.get("client") or ("",))[0]
        key = key_of(headers.get("authorization", ""), keys)
        if key is not None:
            return client_name(key)
        if any(path.fullmatch(scope["path"]) for path in self._open):
            return ""
        raise Refused(
            "an API key must be sent, as Authorization: Bearer KEY, or as the password of Basic",
            status=401,
            code="invalid_api_key",
        )

    def _allow_origin(self, headers: Headers, found: MutableHeaders) -> None:
        origin = headers.get("origin")
        if origin in self._settings.origins:
            found["Access-Control-Allow-Origin"] = origin
            found["Access-Control-Expose-Headers"] = "Content-Range, Location, Retry-After"
            found["Cross-Origin-Resource-Policy"] = "cross-origin"
            found.append("Vary", "Origin")

    async def _preflight(self, send: Send) -> None:
        """Answers a browser that asks whether another site's page may ask something."""
        found: Any = [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", b"Authorization, Content-Type, Range"),
            (b"access-control-max-age", b"600"),
        ]
        await send({"type": "http.response.start", "status": 204, "headers": found})
        await send({"type": "http.response.body", "body": b""})


def _extra(path: str, error: Refused) -> dict[str, str]:
    """Returns the headers of an error."""
    if error.status == 401:
        # For Basic, a browser would ask for the key itself, before the page does.
        basic = path.startswith(("/sdapi/", "/controlnet/"))
        return {"WWW-Authenticate": f'{"Basic" if basic else "Bearer"} realm="diffusax"'}
    # After these the rest of the body is not read.
    return {"Connection": "close"} if error.status in (408, 413) else {}


def _pattern(path: str) -> str:
    """Returns the pattern of the paths that a route's path stands for."""
    return re.sub(r"{\w+}", "[^/]+", re.sub(r"{\w+:path}", ".+", path))


def _place(origin: str) -> tuple[str, int | None]:
    """Returns the host and the port of an origin; the scheme gives the port where there is none."""
    try:
        parts = urlsplit(origin)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
        return (parts.hostname or "").lower(), port
    except ValueError:
        return "", None


def _host_name(host: str) -> str:
    try:
        return (urlsplit(f"//{host}").hostname or "").lower()
    except ValueError:
        return ""


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.partition("%")[0])
    except ValueError:
        return False
    return True
