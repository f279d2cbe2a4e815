"""Texts in images' files: PNG, EXIF, XMP, comments and pixels."""

import gzip
import io
import json

import numpy as np
import pytest
from PIL import Image, features
from PIL.PngImagePlugin import PngInfo

from diffusax.infotext.files import decode_comment, open_image, texts_of
from diffusax.infotext.others import webui_text

TEXT = "りんご, (red:1.2)\nNegative prompt: 悪い\nSteps: 20, Sampler: Euler a, Seed: 5, Size: 64x48"
KINDS = ["JPEG", "WEBP", "PNG", *(["AVIF"] if features.check("avif") else [])]
COMMENTS = {
    "utf-16, as piexif writes it": b"UNICODE\0" + TEXT.encode("utf-16-be"),
    "utf-16, the other way round": b"UNICODE\0" + TEXT.encode("utf-16-le"),
    "utf-16 with a byte order mark": b"UNICODE\0" + TEXT.encode("utf-16"),
    "utf-8 under the name of utf-16": b"UNICODE\0" + TEXT.encode() + b"\0",
    "utf-8 under the name of ascii": b"ASCII\0\0\0" + TEXT.encode(),
    "utf-8 without a name": TEXT.encode(),
    "utf-16 without a name": TEXT.encode("utf-16-le"),
    "an empty name": b"\0" * 8 + TEXT.encode(),
}


def opened(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return open_image(file.getvalue())


def plain():
    return Image.new("RGB", (64, 48))


@pytest.mark.parametrize("kind", KINDS)
def test_comments_of_exif_are_read_in_every_encoding(kind):
    for name, comment in COMMENTS.items():
        exif = Image.Exif()
        exif[0x8769] = {0x9286: comment}
        image = opened(plain(), kind, exif=exif)
        assert texts_of(image)["UserComment"] == TEXT, name
        assert webui_text(texts_of(image), image.size) == TEXT, name


def test_short_comments_without_latin_letters_are_read():
    for text in ("りんご", "a", "füchse", "красное яблоко", "青りんご、赤"):
        for data in (text.encode("utf-16-be"), text.encode("utf-16-le"), text.encode()):
            little = data == text.encode("utf-16-le")
            assert decode_comment(b"UNICODE\0" + data, little=little) == text
    assert decode_comment("Äpfel".encode("latin-1")) == "Äpfel"
    assert decode_comment(b"JIS\0\0\0\0\0" + "りんご".encode("iso2022_jp")) == "りんご"
    assert decode_comment(b"") == decode_comment(b"ASCII\0\0\0\0\0") == ""


@pytest.mark.parametrize("kind", ["JPEG", "GIF"])
def test_comments_of_files_are_read(kind):
    image = opened(plain(), kind, comment=TEXT.encode())
    assert webui_text(texts_of(image), image.size) == TEXT


def test_a_tiff_s_description_is_read():
    text = "an apple\nSteps: 20, Seed: 5, Size: 64x48"
    image = opened(plain(), "TIFF", tiffinfo={0x010E: text})
    assert webui_text(texts_of(image), image.size) == text


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("channels", ["alpha", "rgb"])
def test_texts_hidden_in_pixels_are_read(packed, channels):
    data = gzip.compress(TEXT.encode()) if packed else TEXT.encode()
    mark = b"stealth_png" if channels == "alpha" else b"stealth_rgb"
    whole = mark + (b"comp" if packed else b"info") + (len(data) * 8).to_bytes(4, "big") + data
    bits = np.unpackbits(np.frombuffer(whole, np.uint8))
    count = 1 if channels == "alpha" else 3
    pixels = np.full(64 * 48 * count, 254, np.uint8)
    pixels[: len(bits)] |= bits
    pixels = pixels.reshape(64, 48, count).transpose(1, 0, 2)
    if channels == "alpha":
        pixels = np.concatenate([np.zeros((48, 64, 3), np.uint8), pixels], -1)
    image = opened(Image.fromarray(np.ascontiguousarray(pixels)), "PNG")
    assert texts_of(image) == {"parameters": TEXT}


def test_all_texts_are_plain_ones_whatever_the_file_holds():
    info = PngInfo()
    info.add_itxt("parameters", TEXT, "ja", "設定")
    info.add_text("Title", "Äpfel", zip=True)
    exif = Image.Exif()
    exif[0x010F], exif[0x829A], exif[0x8769] = "Camera", 0.1, {0x9286: b"", 0x927C: b"\xff\x00"}
    image = opened(
        plain(), "PNG", pnginfo=info, exif=exif, dpi=(72.5, 72.5), icc_profile=b"\xff\xfe\0"
    )
    found = texts_of(image)
    assert {type(x) for pair in found.items() for x in pair} == {str}
    assert found["parameters"] == TEXT
    assert found["Title"] == "Äpfel"
    json.dumps(found).encode()


def test_broken_exif_is_no_error():
    for broken in (b"Exif\0\0MM\0*", b"Exif\0\0II*\0\xff\xff\xff\xff", b"nonsense", b"Exif\0\0"):
        image = opened(plain(), "WEBP", exif=broken)
        assert webui_text(texts_of(image), image.size) == ""


def test_what_is_behind_the_pixels_of_a_png_is_read():
    info = PngInfo()
    info.add(b"iTXt", b"parameters\0\0\0\0\0" + TEXT.encode(), after_idat=True)
    assert texts_of(opened(plain(), "PNG", pnginfo=info)) == {"parameters": TEXT}
