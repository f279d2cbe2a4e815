"""Answers in JSON, and errors in the form that each API's clients read."""

import math
from typing import Any

import msgspec
from starlette.responses import Response

from diffusax.serving.errors import Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"}
_AGAIN = {429: 1.0, 503: 10.0}
"""The seconds after which to ask again, where the error does not tell."""


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes the content."""
        return msgspec.json.encode(content)


def error_body(path: str, error: Refused) -> dict[str, Any]:
    """Returns the content of an error: A1111's form under /sdapi, and OpenAI's elsewhere."""
    message = str(error)
    if path.startswith(("/sdapi/", "/controlnet/")):
        return {"error": type(error).__name__, "detail": message, "body": "", "errors": message}
    kind = _TYPES.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return {
        "error": {"message": message, "type": kind, "param": error.param, "code": error.code},
    }


def error_reply(path: str, error: Refused, headers: dict[str, str] | None = None) -> Json:
    """Returns the answer that tells a client of an error."""
    headers = dict(headers or {})
    seconds = error.retry_after or _AGAIN.get(error.status)
    if seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    return Json(error_body(path, error), status_code=error.status, headers=headers)
