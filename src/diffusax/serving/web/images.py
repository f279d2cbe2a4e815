"""Images in requests and answers: base64, data URIs and files."""

import base64
import binascii
import contextlib
import io
import warnings
from collections.abc import Iterator
from typing import Any

from PIL import Image, ImageOps

from diffusax.images.conversion import png_parameters
from diffusax.images.reading import load_image
from diffusax.infotext.files import open_image
from diffusax.serving.requests.errors import Refused
from diffusax.serving.web.bodies import take_pixels

_LONGEST_COMMENT = 65_000
"""The most bytes of a comment in EXIF."""
FORMATS = ("PNG", "JPEG", "WEBP")


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


def in_base64(data: bytes) -> str:
    """Returns bytes as base64 text."""
    return base64.b64encode(data).decode()


def data_uri(data: bytes, kind: str) -> str:
    """Returns an image's bytes as a data URI."""
    return f"data:image/{kind};base64,{in_base64(data)}"
