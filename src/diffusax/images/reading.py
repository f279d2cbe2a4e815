"""Reads image files: upright, in 8 bits and in sRGB."""

import contextlib
import functools
import io
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

PROFILES = "DIFFUSAX_COLOR_PROFILES"
"""The variable that, set to "ignore", leaves the numbers of images with an ICC profile alone."""

_ORIENTATION = 0x0112
"""EXIF's tag of how a camera was held."""
_TURNED = range(5, 9)
"""Its values where height and width are exchanged."""
_TIFF_SIDES = 0x0100, 0x0101
"""TIFF's tags of width and height as they are stored."""
_TURNING_TEXTS = (b"Raw profile type exif\0", b"XML:com.adobe.xmp\0")
"""The beginnings of a PNG's texts that may say how a camera was held."""
_NO_CACHE = 0x0040
"""Little CMS' flag without which a transform must stay in one thread."""


def load_image(value: Any) -> Image.Image:
    """Loads an image from a path, a file's bytes or a PIL image of any mode, as upright RGB.

    The orientation that a camera noted in EXIF is applied, as diffusers' `load_image` does;
    transparent parts become white; 16-bit greys keep their shades. Colours of an ICC profile become
    those of sRGB, see `in_srgb`, which diffusers leaves out.

    Raises:
        ValueError: there is no such file, or no image in it; names the file and the reason.
    """
    image = in_srgb(open_upright(value))
    try:
        if image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            white.alpha_composite(image.convert("RGBA"))
            image = white
        return image.convert("RGB")
    except ValueError as error:
        raise ValueError(f"cannot read {_called(value)}: {error}") from None


def open_upright(value: Any) -> Image.Image:
    """Opens an image like `load_image`, but keeps its own mode and colours.

    16 bits become 8 bits, in mode L.

    Raises:
        ValueError: there is no such file, or no image in it; names the file and the reason.
    """
    with _named(value):
        if isinstance(value, Image.Image):
            return _eight_bits(ImageOps.exif_transpose(value))
        with Image.open(_source(value)) as image:
            return _eight_bits(ImageOps.exif_transpose(image))


def upright_size(value: Any) -> tuple[int, int]:
    """Reads the height and width of an image like `open_upright`, from its header alone.

    Raises:
        ValueError: there is no such file, or no image in it; names the file and the reason.
    """
    with _named(value), Image.open(_source(value)) as image:
        width, height = image.size
        if image.format == "TIFF":
            # Some versions of Pillow turn a TIFF's size before it is read, and others do not.
            width, height = (image.tag_v2[tag] for tag in _TIFF_SIDES)  # type: ignore[attr-defined]
        turned = _exif(image).get(_ORIENTATION, 1) in _TURNED
        return (width, height) if turned else (height, width)


def in_srgb(image: Image.Image) -> Image.Image:
    """Converts an image with an ICC profile to sRGB, as browsers show it; keeps its transparency.

    Images without a profile, with one of sRGB, or with one of another number of channels keep their
    numbers; so do all images where the variable DIFFUSAX_COLOR_PROFILES is "ignore".

    Returns:
        An image without a profile: RGB or RGBA where it was converted.
    """
    profile = image.info.get("icc_profile")
    if not profile or os.environ.get(PROFILES, "").lower() == "ignore":
        return image
    alpha = image.convert("RGBA").getchannel("A") if image.has_transparency_data else None
    opaque = image.getchannel("L") if image.mode == "LA" else image
    opaque = opaque.convert("RGB") if opaque.mode in ("P", "PA", "RGBA", "RGBX") else opaque
    transform = _transform(profile, opaque.mode)
    result = image.copy() if transform is None else transform.apply(opaque)
    if transform is not None and alpha is not None:
        result.putalpha(alpha)
    result.info.pop("icc_profile", None)
    return result


@functools.lru_cache(16)
def _transform(profile: bytes, mode: str) -> Any:
    """Returns what converts images of a mode from a profile to sRGB; None where nothing does."""
    from PIL import ImageCms

    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" in ImageCms.getProfileDescription(source).lower():
            return None
        target = ImageCms.createProfile("sRGB")
        intent = ImageCms.Intent.RELATIVE_COLORIMETRIC
        flags = _NO_CACHE | ImageCms.Flags.BLACKPOINTCOMPENSATION
        return ImageCms.buildTransform(source, target, mode, "RGB", intent, flags)
    # A profile that is broken, or made for another number of channels, says nothing.
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None


def _exif(image: Image.Image) -> Image.Exif:
    """Returns an image's EXIF data; decodes a PNG only if some come after its pixels."""
    if image.format != "PNG" or "exif" in image.info or _ends_with_exif(image.fp):  # type: ignore[attr-defined]
        return image.getexif()
    return Image.Image.getexif(image)


def _ends_with_exif(file: Any) -> bool:
    """Returns whether EXIF data, or texts that may hold them, come after a PNG's pixels."""
    before, found, pixels = file.tell(), False, False
    file.seek(8)
    while not found and len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        kind, end = head[4:], file.tell() + int.from_bytes(head[:4], "big") + 4
        pixels = pixels or kind == b"IDAT"
        texts = pixels and kind in (b"tEXt", b"zTXt", b"iTXt")
        found = (pixels and kind == b"eXIf") or (texts and file.read(22).startswith(_TURNING_TEXTS))
        file.seek(end)
    file.seek(before)
    return found


def _source(value: Any) -> Any:
    """Returns what Pillow opens. Raises ValueError or OSError, before reading, for other values."""
    if isinstance(value, bytes):
        return io.BytesIO(value)
    if not isinstance(value, str | Path):
        raise ValueError(f"it must be a path or a PIL image (got {type(value).__name__})")
    if str(value).startswith(("http://", "https://")):
        raise ValueError("it is an address; download the image first")
    if not stat.S_ISREG(Path(value).stat().st_mode):
        raise ValueError("it is not a regular file")
    return value


@contextlib.contextmanager
def _named(value: Any) -> Iterator[None]:
    """Turns what goes wrong with an image into a ValueError with its name."""
    try:
        yield
    except Image.UnidentifiedImageError:
        reason = "it is not an image that Pillow knows"
    # For a broken file Pillow's readers raise errors of nearly every class.
    except Exception as error:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
    else:
        return
    raise ValueError(f"cannot read {_called(value)}: {reason}")


def _called(value: Any) -> str:
    """Returns the name of an image for a message, with control characters escaped."""
    name = value if isinstance(value, str | Path) else getattr(value, "filename", "")
    return f"the image {str(name)!r}" if name else "the image"


def _eight_bits(image: Image.Image) -> Image.Image:
    """Converts an image to 8 bits; Pillow would clip 16-bit greys at 255 and fractions at 1."""
    if not image.mode.startswith("I") and image.mode != "F":
        return image
    values = np.asarray(image).astype(np.float64)
    if image.mode == "F" and values.max() <= 1:
        values = values * 255
    # Mode I is also what Pillow makes of 8 bits.
    elif image.mode != "F" and (image.mode != "I" or values.max() > 255):
        values = values / 257
    return Image.fromarray(values.round().clip(0, 255).astype(np.uint8))
