"""Finds the texts in an image's file: of PNGs, EXIF, XMP and comments, and in pixels."""

import contextlib
import html
import io
import json
import re
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from PIL import Image, features

_FORMATS = ("PNG", "JPEG", "WEBP", "AVIF", "TIFF", "GIF")
_LONGEST = 16 * 2**20
"""The most bytes of a text that is unpacked or decoded."""
_EXIF_IFD, _USER_COMMENT = 0x8769, 0x9286
_TEXTS = {
    **{0x010E: "Description", 0x010F: "Make", 0x0110: "Model", 0x0131: "Software"},
    **{0x927C: "fooocus_scheme", 0x9C9C: "XPComment", 0x02BC: "xmp"},
}
"""Tags of EXIF whose texts are found, by the names that they get."""
_XMP_COMMENT = re.compile(
    r"<exif:UserComment>(?:\s*<rdf:Alt>\s*<rdf:li[^>]{0,200}>)?([^<]*)<|exif:UserComment=\"([^\"]*)\""
)
_ALPHA = {b"stealth_pnginfo": False, b"stealth_pngcomp": True}
_RGB = {b"stealth_rgbinfo": False, b"stealth_rgbcomp": True}
"""What hidden texts begin with, in which channels, and whether they are packed."""


def open_image(data: bytes) -> Image.Image:
    """Opens an image of any format that holds texts, without decoding its pixels.

    Raises:
        OSError: the bytes are none, or Pillow lacks the format.
    """
    formats = [f for f in _FORMATS if f != "AVIF" or _has_avif()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return Image.open(io.BytesIO(data), formats=formats)


def _has_avif() -> bool:
    try:
        return bool(features.check("avif"))
    except ValueError:
        return False


def texts_of(image: Image.Image) -> dict[str, str]:
    """Returns the texts in an image's file by name, all of them Python's own str.

    Those of a PNG have their own names; `UserComment`, `Comment`, `Description`, `xmp` and others
    come from EXIF, XMP and comments, and `parameters` also from pixels. Texts that cannot be read
    are left out.

    image: as it was opened from its file, or a copy with its `info`.
    """
    found: dict[str, str] = {}
    with warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        # Some programs write texts behind the pixels, which this decodes.
        found |= {str(name): str(text) for name, text in getattr(image, "text", {}).items()}
    info = {name: value for name, value in image.info.items() if isinstance(name, str)}
    for name, value in info.items():
        if isinstance(value, str):
            found.setdefault(name, str(value))
    comment = info.get("comment")
    if isinstance(comment, bytes):
        found["comment"] = decode_comment(comment)
    for name, text in _exif_texts(image):
        if text:
            found.setdefault(name, text)
    xmp = found.pop("XML:com.adobe.xmp", None) or info.get("xmp") or found.get("xmp")
    if isinstance(xmp, bytes):
        xmp = xmp[:_LONGEST].decode("utf-8", "replace")
    if xmp and (comment := _XMP_COMMENT.search(xmp)):
        found.setdefault("UserComment", html.unescape(comment[1] or comment[2] or "").strip())
    found.pop("xmp", None)
    if not set(found) & {"parameters", "UserComment", "prompt", "Comment", "Dream", "sd-metadata"}:
        found |= _hidden(image)
    return found


def _exif_texts(image: Image.Image) -> Iterator[tuple[str, str]]:
    """Yields the texts of EXIF. Broken EXIF raises errors of nearly every class in Pillow."""
    try:
        exif = image.getexif()
        inner = exif.get_ifd(_EXIF_IFD)
    except Exception:
        return
    little = str(getattr(exif, "endian", "<")) == "<"
    for tags in (inner, exif):
        for tag in (_USER_COMMENT, *_TEXTS):
            with contextlib.suppress(Exception):
                value = tags.get(tag)
                if tag == _USER_COMMENT:
                    yield "UserComment", decode_comment(_bytes(value), little=little)
                elif tag == 0x9C9C:
                    yield "XPComment", _bytes(value).decode("utf-16-le").strip("\0 ")
                elif isinstance(value, str | bytes):
                    text = decode_comment(_bytes(value))
                    # ComfyUI writes its graphs into tags of cameras, behind their names.
                    graph = re.match(r"(prompt|workflow):(?=\{)", text, re.IGNORECASE)
                    yield (graph[1].lower(), text[graph.end() :]) if graph else (_TEXTS[tag], text)


def _bytes(value: Any) -> bytes:
    if value is None:
        return b""
    # Pillow reads text as Latin-1, whatever it is.
    return value.encode("latin-1") if isinstance(value, str) else bytes(value)


def decode_comment(data: bytes, *, little: bool = False) -> str:
    """Returns the text of a comment of EXIF, whose first eight bytes may name its encoding.

    Programs write UTF-16 of both byte orders under `UNICODE`, and UTF-8 under any name or none: the
    bytes decide, and the order of the file only where they do not.
    """
    data = data[:_LONGEST]
    code, rest = data[:8], data[8:]
    if code == b"JIS\0\0\0\0\0":
        return rest.decode("iso2022_jp", "replace").strip("\0 ")
    if code in (b"UNICODE\0", b"ASCII\0\0\0", b"\0" * 8):
        data = rest
    elif data.startswith((b"UNICODE", b"ASCII")):
        # The code without its filling.
        data = data.removeprefix(b"UNICODE").removeprefix(b"ASCII").lstrip(b"\0")
    wide = code.startswith(b"UNICODE")
    return _decoded(data, wide=wide, little=little).strip("\0\ufeff ")


def _decoded(data: bytes, *, wide: bool, little: bool) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        return data.decode("utf-16", "replace")
    narrow = data.rstrip(b"\0")
    if b"\0" not in narrow:
        # What is valid UTF-8 without a zero byte hardly ever is UTF-16.
        with contextlib.suppress(UnicodeDecodeError):
            return narrow.decode("utf-8")
    if wide or b"\0" in narrow:
        even = data[: len(data) // 2 * 2]
        orders = ("utf-16-le", "utf-16-be") if little else ("utf-16-be", "utf-16-le")
        return max((even.decode(order, "replace") for order in orders), key=_likely)
    return data.decode("latin-1")


def _likely(text: str) -> float:
    """Returns how much of a text is what people write: ASCII most, then what can be shown."""
    ascii_ = sum(c.isascii() and (c.isprintable() or c in "\r\n\t") for c in text)
    shown = sum(c.isprintable() and c != "\ufffd" for c in text)
    return (2 * ascii_ + shown) / max(3 * len(text), 1)


def _hidden(image: Image.Image) -> dict[str, str]:
    """Returns the texts in the pixels' lowest bits, column by column, as NovelAI hides them."""
    if image.mode not in ("RGBA", "RGB"):
        return {}
    try:
        pixels = np.asarray(image)
    except Exception:
        return {}
    found = None
    if image.mode == "RGBA":
        found = _unpacked(pixels[..., 3:], _ALPHA)
    found = found or _unpacked(pixels[..., :3], _RGB)
    if not found:
        return {}
    with contextlib.suppress(ValueError, RecursionError):
        named = json.loads(found)
        if isinstance(named, dict) and "Comment" in named:
            texts = {n: v if isinstance(v, str) else json.dumps(v) for n, v in named.items()}
            return {str(name): text for name, text in texts.items()}
    return {"parameters": found}


def _unpacked(pixels: np.ndarray, marks: dict[bytes, bool]) -> str | None:
    """Returns the text that begins with one of the marks. pixels: h w c."""

    def read(begin: int, count: int) -> bytes:
        """Reads bytes, of the columns alone that hold them."""
        first, last = begin * 8, (begin + count) * 8
        column = pixels.shape[0] * pixels.shape[2]
        part = pixels[:, first // column : -(-last // column)]
        bits = part.transpose(1, 0, 2).ravel() & 1
        skipped = first // column * column
        return np.packbits(bits[first - skipped : last - skipped]).tobytes()

    mark = read(0, 15)
    if mark not in marks:
        return None
    length = int.from_bytes(read(15, 4), "big") // 8
    if not 0 < length <= pixels.size // 8:
        return None
    data = read(19, length)
    try:
        if marks[mark]:
            data = zlib.decompressobj(wbits=31).decompress(data, _LONGEST)
        return data.decode("utf-8")
    except (zlib.error, UnicodeDecodeError):
        return None
