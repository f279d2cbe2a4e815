"""The settings of the HTTP server."""

import base64
import binascii
import dataclasses
import hashlib
import hmac
from collections.abc import Mapping, Sequence

from diffusax.serving.requests.errors import Refused


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
    """The most images of one request."""
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
