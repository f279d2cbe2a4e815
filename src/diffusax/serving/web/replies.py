"""Answers: JSON, images, events, and errors in the form that each API's clients read."""

import base64
import io
import logging
import math
import re
from collections.abc import AsyncIterator, Mapping
from numbers import Real
from typing import Any

import msgspec
from PIL import Image
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diffusax.images.conversion import png_parameters
from diffusax.serving.requests.errors import Refused

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
_TYPES |= {429: "rate_limit_error"}
_DEEPEST = 64
_RANGE = re.compile(r"bytes=(\d{0,15})-(\d{0,15})")
_log = logging.getLogger(__name__)
_LONGEST_COMMENT = 65_000
"""The most bytes of a comment in EXIF."""
_AGAIN = {429: 1.0, 503: 10.0}
"""The seconds after which to ask again, where the error does not tell."""
_WEBUI_NAMES = {
    "num_inference_steps": "steps",
    "guidance_scale": "cfg_scale",
    "image_guidance_scale": "image_cfg_scale",
    "strength": "denoising_strength",
    "num_images": "batch_size",
    "sampler": "sampler_name",
    "mask_image": "mask",
    "padding_mask_crop": "inpaint_full_res_padding",
    "clip_skip": "CLIP_stop_at_last_layers",
    "model": "sd_model_checkpoint",
    "adapters": "prompt",
    "controls": "alwayson_scripts",
}
"""A1111's fields by those of `Generation`."""
_ANYWHERE = re.compile(rf"\b({'|'.join(name for name in _WEBUI_NAMES if '_' in name)})\b")
_AT_THE_BEGINNING = re.compile(rf"({'|'.join(_WEBUI_NAMES)})(?= (?:must|names|has|needs|leaves)\b)")


class Json(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encodes the content."""
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """Encodes anything as JSON: values without JSON become text, broken letters question marks.

    A strange value from a file or a library ends no request; it is logged.
    """
    try:
        return msgspec.json.encode(content, enc_hook=_plain)
    except Exception:
        _log.exception("a reply held what has no JSON")
    try:
        return msgspec.json.encode(_cleaned(content, 0))
    except Exception:
        _log.exception("a reply could not be encoded")
        return b'{"error":{"message":"the answer could not be written as JSON; the log says why"}}'


def _plain(value: Any) -> Any:
    """Returns what a value without JSON stands for: a number, a list, or its text."""
    if isinstance(value, str):
        # A subclass, such as Pillow's texts.
        return str.__str__(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    return float(value) if isinstance(value, Real) else str(value)


def _cleaned(value: Any, depth: int) -> Any:
    """Returns a value of dicts, lists, texts and numbers alone."""
    if depth > _DEEPEST:
        return str(type(value).__name__)
    if isinstance(value, Mapping):
        return {_text(key): _cleaned(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_cleaned(item, depth + 1) for item in value]
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return int(value)
    found = _plain(value)
    return _text(found) if isinstance(found, str) else _cleaned(found, depth + 1)


def _text(value: Any) -> str:
    return str(value).encode(errors="replace").decode()


def error_body(path: str, error: Refused) -> dict[str, Any]:
    """Returns the content of an error: A1111's form under /sdapi, and OpenAI's elsewhere."""
    message = str(error)
    if path.startswith(("/sdapi/", "/controlnet/")):
        message = in_webui_words(message)
        return {"error": type(error).__name__, "detail": message, "body": "", "errors": message}
    kind = _TYPES.get(error.status)
    kind = kind or ("invalid_request_error" if error.status < 500 else "server_error")
    return {
        "error": {"message": message, "type": kind, "param": error.param, "code": error.code},
    }


def in_webui_words(sentence: str) -> str:
    """Returns an error's sentence with the names of the fields that A1111's clients send.

    Fields whose names are words of the language are renamed where a sentence begins with them.
    """
    if first := _AT_THE_BEGINNING.match(sentence):
        sentence = _WEBUI_NAMES[first[1]] + sentence[first.end() :]
    return _ANYWHERE.sub(lambda name: _WEBUI_NAMES[name[1]], sentence)


def error_reply(path: str, error: Refused, headers: dict[str, str] | None = None) -> Json:
    """Returns the answer that tells a client of an error."""
    headers = dict(headers or {})
    seconds = error.retry_after or _AGAIN.get(error.status)
    if seconds is not None:
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    return Json(error_body(path, error), status_code=error.status, headers=headers)


KEEP_ALIVE = b": still there\n\n"
"""A comment, which tells proxies and clients that the connection lives."""


def sse(event: str, data: Any) -> bytes:
    """Encodes one event, whose data become JSON."""
    return b"event: %s\ndata: %s\n\n" % (event.encode(), encode_json(data))


def stream(events: AsyncIterator[bytes]) -> StreamingResponse:
    """Answers with events as they come; proxies are asked not to hold them back."""
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


def encode(
    image: Image.Image, kind: str = "png", text: str = "", quality: int | None = None
) -> bytes:
    """Encodes an image as "png", "jpeg" or "webp".

    Arguments:
        image: the image.
        kind: the format.
        text: the settings, which a PNG holds as `parameters` and the others in EXIF's UserComment,
            as A1111 writes them.
        quality: from 0 to 100, for JPEG and WebP.
    """
    file = io.BytesIO()
    if kind == "png":
        options: dict[str, Any] = {"pnginfo": png_parameters(text)} if text else {}
    else:
        image, options = image.convert("RGB"), {"quality": 90 if quality is None else quality}
        comment = b"UNICODE\0" + text.encode("utf-16-be")
        # A JPEG's EXIF has a bound.
        if text and len(comment) < _LONGEST_COMMENT:
            exif = Image.Exif()
            exif[0x8769] = {0x9286: comment}
            options["exif"] = exif
    image.save(file, kind.upper(), **options)
    return file.getvalue()


def send_file(request: Request, data: bytes, kind: str, name: str) -> Response:
    """Answers with the bytes of a file that browsers show, or with the part that they ask for.

    Without parts Safari plays no video. Of several parts in one request, all of the file is sent.

    Arguments:
        request: the request, whose Range is read.
        data: the whole file.
        kind: its media type.
        name: how a browser calls it that saves it.

    Raises:
        Refused: the file has no such part.
    """
    headers = {"Content-Disposition": f'inline; filename="{name}"', "Accept-Ranges": "bytes"}
    asked = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if asked is None or not any(asked.groups()):
        return Response(data, media_type=kind, headers=headers)
    first, last = (int(part) if part else None for part in asked.groups())
    if first is None:
        first, last = max(len(data) - (last or 0), 0), None
    end = len(data) if last is None else min(last + 1, len(data))
    if first >= end:
        text = f"Range must be inside the file of {len(data)} bytes (got {asked[0]!r})"
        raise Refused(text, status=416, code="range")
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(data)}"
    return Response(data[first:end], status_code=206, media_type=kind, headers=headers)


def in_base64(data: bytes) -> str:
    """Returns bytes as base64 text."""
    return base64.b64encode(data).decode()


def data_uri(data: bytes, kind: str) -> str:
    """Returns an image's bytes as a data URI."""
    return f"data:image/{kind};base64,{in_base64(data)}"
