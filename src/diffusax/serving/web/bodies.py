"""Reads what requests bring, JSON, forms and images, and bounds it."""

import asyncio
import base64
import binascii
import contextlib
import contextvars
import io
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
from PIL import Image, ImageOps
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message, Receive

from diffusax.images.clips import Clip, opened
from diffusax.images.reading import load_image
from diffusax.infotext.files import open_image
from diffusax.serving.requests.errors import Busy, Refused

_MOST_FIELDS, _MOST_FILES = 100, 20
_DEEPEST = 32
_SLOWEST = 2**14
"""The bytes a second that a body must bring on average, so that none trickles in for ever."""
_LONG = 2**16
"""JSON of more bytes is read in a thread, as other requests would wait for it."""
FORMATS = ("PNG", "JPEG", "WEBP")
_VIDEO_AREA = 1280 * 720
"""The pixels of a frame beyond which a video is read in a smaller size."""


def bounded_receive(receive: Receive, most: int, timeout: float) -> Receive:
    """Wraps a connection's `receive` to refuse a body that is too long or too slow."""
    taken, whole, begun = 0, False, time.monotonic()

    async def bounded() -> Message:
        nonlocal taken, whole
        if whole:
            # What comes now says that the client has gone, and may take long.
            return await receive()
        left = begun + timeout + taken / _SLOWEST - time.monotonic()
        try:
            message = await asyncio.wait_for(receive(), max(0.0, min(timeout, left)))
        except TimeoutError:
            text = f"the body did not come within {timeout:g} seconds; send it without breaks"
            raise Refused(text, status=408, code="timeout") from None
        taken += len(message.get("body", b""))
        whole = message["type"] != "http.request" or not message.get("more_body", False)
        if taken > most:
            raise too_long(most)
        return message

    return bounded


def too_long(most: int) -> Exception:
    """Makes the error of a body with more than so many bytes."""
    text = f"the body must have at most {most} bytes; send fewer or smaller images"
    return Refused(text, status=413, code="body_too_large")


def content_type(request: Request) -> str:
    """Returns the media type of a request's body, without its parameters."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


async def read_bytes(request: Request) -> bytes:
    """Reads a whole body."""
    try:
        return await request.body()
    except ClientDisconnect:
        raise Refused("the client has gone", status=499, code="client_gone") from None


async def read_json(request: Request) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        Refused: the content type is another, which pages of other sites could send; or the body is
            no JSON object.
    """
    body = await read_bytes(request)
    kind = content_type(request)
    if kind != "application/json":
        raise Refused(
            f"Content-Type must be application/json here (got {kind or 'none'!r})",
            status=415,
            code="unsupported_media_type",
        )
    if len(body) > _LONG:
        return await run_in_threadpool(_object, body)
    return _object(body)


def _object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object that a body is."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        reason = str(error).removeprefix("JSON is malformed: ")
        raise Refused(
            f"the body must be JSON ({reason})", status=400, code="invalid_json"
        ) from None
    if not isinstance(value, dict):
        raise Refused(
            f"the body must be a JSON object (got {type(value).__name__})",
            status=400,
            code="invalid_json",
        )
    check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuses values that are nested deeply, which would exhaust the stack of what reads them."""
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    raise Refused(
        f"the body must be nested at most {_DEEPEST} levels deep", status=400, code="invalid_json"
    )


async def read_form(request: Request, most: int) -> tuple[dict[str, str], dict[str, list[bytes]]]:
    """Reads a multipart form: returns its fields, and the contents of its files by field.

    Raises:
        Refused: it is none, a field occurs twice, or there are too many.
    """
    try:
        form = await request.form(
            max_files=_MOST_FILES, max_fields=_MOST_FIELDS, max_part_size=most
        )
    except Refused:
        raise
    except (MultiPartException, HTTPException, UnicodeDecodeError, KeyError, ValueError) as error:
        reason = getattr(error, "detail", None) or getattr(error, "message", None) or str(error)
        text = f"the body must be multipart/form-data ({reason})"
        raise Refused(text, status=400, code="invalid_form") from None
    except ClientDisconnect:
        raise Refused("the client has gone", status=499, code="client_gone") from None
    fields: dict[str, str] = {}
    files: dict[str, list[bytes]] = {}
    try:
        for name, value in form.multi_items():
            if not isinstance(value, str):
                files.setdefault(name, []).append(await value.read())
            elif name in fields:
                raise Refused(f"{name} must be given once in a form", param=name)
            else:
                fields[name] = value
    finally:
        await form.close()
    return fields, files


_REQUEST: contextvars.ContextVar["_Request | None"] = contextvars.ContextVar(
    "request", default=None
)


class PixelBudget:
    """Counts the pixels of the images of all requests that are being answered."""

    def __init__(self, most_each: int, most_all: int):
        """Starts with none.

        Args:
            most_each: the most pixels of the images of one request.
            most_all: the most pixels of those of all requests at once.
        """
        self.most_each, self.most_all = most_each, most_all
        self.taken = 0
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Counts what is decoded inside the context and in its threads, until it ends."""
        request = _Request(self)
        token = _REQUEST.set(request)
        try:
            yield
        finally:
            _REQUEST.reset(token)
            with self._lock:
                self.taken -= request.taken

    def take(self, request: "_Request", pixels: int, param: str) -> None:
        """Counts the pixels of an image; see `take_pixels`."""
        with self._lock:
            own, every = request.taken + pixels, self.taken + pixels
            if own > self.most_each:
                raise Refused(
                    f"the images of a request must have at most {self.most_each} pixels together "
                    f"({param} makes them {own}); send fewer or smaller ones",
                    param=param,
                    status=413,
                    code="picture_too_large",
                )
            if every > self.most_all:
                raise Busy(
                    f"the images of all requests under way have {self.taken} pixels, and with "
                    f"{param} more than {self.most_all}; ask again later, or send smaller ones",
                    param=param,
                    retry_after=2.0,
                )
            request.taken, self.taken = own, every


class _Request:
    """The pixels of one request."""

    def __init__(self, budget: PixelBudget):
        self.budget, self.taken = budget, 0


def take_pixels(pixels: int, param: str) -> None:
    """Counts an image that is about to be decoded; outside a request nothing is counted.

    Args:
        pixels: its width times its height.
        param: the name of the argument, for errors.

    Raises:
        Refused: the images of the request have too many pixels together.
        Busy: those of all requests have.
    """
    request = _REQUEST.get()
    if request is not None:
        request.budget.take(request, pixels, param)


def image_from_base64(value: Any, param: str, most_pixels: int) -> Image.Image:
    """Decodes an image from base64 or a data URI; see `image_from_bytes`."""
    return image_from_bytes(decode_base64(value, param), param, most_pixels)


def decode_base64(value: Any, param: str) -> bytes:
    """Decodes base64, or a data URI of it.

    Raises:
        Refused: the value is neither; an address is refused, too, as the server fetches nothing.
    """
    if not isinstance(value, str):
        raise Refused(
            f"{param} must be an image file in base64 (got {type(value).__name__})", param=param
        )
    if value.startswith(("http://", "https://", "file:")):
        raise Refused(
            f"{param} must be an image file in base64, not an address; send its bytes", param=param
        )
    if value.startswith("data:"):
        head, _, value = value.partition(",")
        if not head.endswith(";base64"):
            raise Refused(
                f"{param} must be a data URI with base64 (got {head[:40]!r})", param=param
            )
    try:
        return base64.b64decode("".join(value.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"{param} must be an image file in base64 ({error})", param=param) from None


def image_from_bytes(data: bytes, param: str, most_pixels: int) -> Image.Image:
    """Opens an image upright and in its own mode, once its header is checked.

    Arguments:
        data: the bytes of a PNG, JPEG or WebP file.
        param: the name of the argument, for errors.
        most_pixels: the most pixels; an image with more is refused before it is decoded.

    Raises:
        Refused: the bytes are no such image, or it has too many pixels.
    """
    unknown = f"the bytes are none of {', '.join(FORMATS)}"
    with _reading(param, most_pixels, unknown), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            _check_pixels(image, param, most_pixels)
            upright = ImageOps.exif_transpose(image)
            upright.load()
            return upright


def video_from_bytes(
    data: bytes, param: str, *, most_pixels: int, most_frames: int, together: int
) -> Clip:
    """Reads the first frames of a video, each once its pixels are counted.

    Large frames become smaller, so that all of them have not too many pixels.

    Arguments:
        data: the bytes of a video's file, or of an animated image's.
        param: the name of the argument, for errors.
        most_pixels: the most pixels of a frame; a video with more is refused.
        most_frames: the frames that are read.
        together: the most pixels of all of them.

    Raises:
        Refused: the bytes are no video, or it has too many pixels.
    """
    frames: list[Image.Image] = []
    try:
        area = min(together // most_frames, _VIDEO_AREA)
        with opened(data, most_frames, area) as reader:
            width, height = reader.size
            if width * height > most_pixels:
                raise _too_large(param, most_pixels, f"frames of {width}x{height}")
            rate = reader.fps()
            for frame in reader.frames:
                take_pixels(frame.width * frame.height, param)
                frames.append(frame)
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise _too_large(param, most_pixels, "many times as many") from None
    except Exception as error:
        # For a broken file Pillow's readers raise errors of nearly every class.
        reason = str(error) or type(error).__name__
        raise Refused(f"{param} must be a video's file ({reason})", param=param) from None
    if not frames:
        raise Refused(f"{param} must be a video's file (it has no frame)", param=param)
    return Clip(tuple(frames), rate)


def open_with_texts(data: bytes, param: str, most_pixels: int) -> Image.Image:
    """Opens an image for the texts in its file, some of which need its pixels.

    Raises:
        Refused: the bytes are no image, or it has too many pixels.
    """
    with _reading(param, most_pixels, "the bytes are no image of a known format"):
        image = open_image(data)
        _check_pixels(image, param, most_pixels)
        return image


@contextlib.contextmanager
def _reading(param: str, most_pixels: int, unknown: str) -> Iterator[None]:
    """Turns the errors of Pillow's readers into Refused. unknown: the reason for other formats."""
    try:
        yield
        return
    except Refused:
        raise
    except Image.DecompressionBombError:
        raise _too_large(param, most_pixels, "many times as many") from None
    except Image.UnidentifiedImageError:
        reason = unknown
    except Exception as error:
        # For a broken file Pillow's readers raise errors of nearly every class.
        reason = str(error) or type(error).__name__
    raise Refused(f"{param} must be an image file ({reason})", param=param) from None


def _check_pixels(image: Image.Image, param: str, most_pixels: int) -> None:
    if image.width * image.height > most_pixels:
        raise _too_large(param, most_pixels, f"{image.width}x{image.height}")
    take_pixels(image.width * image.height, param)


def as_rgb(image: Image.Image, param: str) -> Image.Image:
    """Returns an image as every way in reads it, see `load_image`.

    Raises:
        Refused: it has a mode that is no image's.
    """
    try:
        return load_image(image)
    except ValueError as error:
        raise Refused(str(error), param=param) from None


def _too_large(param: str, most: int, got: str) -> Refused:
    return Refused(
        f"{param} must have at most {most} pixels (got {got}); make it smaller",
        param=param,
        status=413,
        code="picture_too_large",
    )
