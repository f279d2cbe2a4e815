"""How image files are read: one rule for headers and pixels, and colours as browsers show them."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps, features

from diffusax.images.reading import in_srgb, load_image, open_upright, upright_size


def rows(height=20, width=40):
    """Another colour in each corner, so that turned and mirrored images differ."""
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR)


def exif_of(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def saved(form, orientation):
    file = io.BytesIO()
    rows().save(file, form, exif=exif_of(orientation))
    return file.getvalue()


def chunk(kind, data):
    whole = struct.pack(">I", len(data)) + kind + data
    return whole + struct.pack(">I", zlib.crc32(kind + data))


def png_with(kind, orientation, *, late):
    """A PNG that tells its orientation in a chunk before its pixels, or after them."""
    file = io.BytesIO()
    rows().save(file, "PNG")
    data = file.getvalue()
    exif = exif_of(orientation).tobytes()
    raw = f"\nexif\n{len(exif):8}\n{exif.hex()}\n".encode()
    text = f'<rdf tiff:Orientation="{orientation}"/>'.encode()
    chunks = {
        "exif": (b"eXIf", exif.removeprefix(b"Exif\0\0")),
        "profile": (b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(raw)),
        "xmp": (b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0" + text),
    }
    at = data.index(b"IEND" if late else b"IDAT") - 4
    return data[:at] + chunk(*chunks[kind]) + data[at:]


FORMS = ["TIFF", "JPEG", "WEBP", "PNG", "MPO", *(["AVIF"] if features.check("avif") else [])]


@pytest.mark.parametrize("form", FORMS)
def test_headers_and_pixels_agree_how_a_camera_was_held(form):
    for orientation in range(1, 9):
        data = saved(form, orientation)
        assert upright_size(data) == open_upright(data).size[::-1]
        assert upright_size(data) == ((40, 20) if orientation > 4 else (20, 40))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("kind", ["exif", "profile", "xmp"])
def test_every_place_of_a_png_that_tells_the_orientation_is_read(kind, late):
    for orientation in (1, 3, 6):
        data = png_with(kind, orientation, late=late)
        with Image.open(io.BytesIO(data)) as image:
            expected = ImageOps.exif_transpose(image)
        assert upright_size(data) == expected.size[::-1]
        assert upright_size(data) == ((40, 20) if orientation == 6 else (20, 40))


def test_the_size_of_a_png_is_read_without_its_pixels():
    data = bytearray(png_with("exif", 6, late=False))
    data[data.index(b"IDAT") + 6] ^= 255
    assert upright_size(bytes(data)) == (40, 20)


def profile(space, **tags):
    """An ICC profile of matrix and curves."""

    def numbers(values):
        return b"XYZ " + bytes(4) + b"".join(struct.pack(">i", round(v * 65536)) for v in values)

    def curve(gamma):
        return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))

    name = tags.pop("name", "wide").encode() + b"\0"
    parts = {
        b"desc": b"desc" + bytes(4) + struct.pack(">I", len(name)) + name + bytes(78),
        b"cprt": b"text" + bytes(4) + b"none\0",
        b"wtpt": numbers((0.9642, 1, 0.8249)),
    }
    for tag, value in tags.items():
        parts[tag.encode()] = curve(value) if isinstance(value, float) else numbers(value)
    at, table, data = 132 + 12 * len(parts), struct.pack(">I", len(parts)), b""
    for tag, part in parts.items():
        part += bytes(-len(part) % 4)
        table += tag + struct.pack(">II", at + len(data), len(part))
        data += part
    head = struct.pack(">I4sI4s4s4s", at + len(data), bytes(4), 0x02400000, b"mntr", space, b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">iii", 63190, 65536, 54061) + bytes(48)
    return head + table + data


ADOBE = {
    "rXYZ": (0.60974, 0.31111, 0.01947),
    "gXYZ": (0.20528, 0.62567, 0.06087),
    "bXYZ": (0.14919, 0.06322, 0.74457),
    **dict.fromkeys(("rTRC", "gTRC", "bTRC"), 563 / 256),
}
SRGB = np.array(
    [[0.43607, 0.38515, 0.14307], [0.22249, 0.71687, 0.06061], [0.01392, 0.09708, 0.71410]]
)


def as_srgb(colours):
    """Adobe RGB (1998) in the numbers of sRGB (IEC 61966-2-1), both adapted to D50."""
    wide = np.array([ADOBE[name] for name in ("rXYZ", "gXYZ", "bXYZ")]).T
    linear = (np.asarray(colours) / 255) ** (563 / 256) @ wide.T @ np.linalg.inv(SRGB).T
    linear = linear.clip(0, 1)
    curved = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return 255 * curved


def coloured(mode="RGB"):
    pixels = np.random.default_rng(1).integers(20, 230, (6, 5, 3), dtype=np.uint8)
    pixels[0, 0] = 60, 200, 60
    image = Image.fromarray(pixels)
    if mode == "RGBA":
        image.putalpha(Image.fromarray(np.arange(30, dtype=np.uint8).reshape(6, 5) * 8))
    return image.quantize() if mode == "P" else image.convert(mode)


@pytest.mark.parametrize("form", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_colours_of_a_profile_become_srgbs(form):
    file = io.BytesIO()
    options = {"lossless": True} if form == "WEBP" else {}
    coloured().save(file, form, icc_profile=profile(b"RGB ", **ADOBE), **options)
    with Image.open(io.BytesIO(file.getvalue())) as image:
        expected = as_srgb(image.convert("RGB"))
    found = load_image(file.getvalue())
    assert np.abs(np.asarray(found) - expected).max() <= 1.5
    if form == "PNG":
        assert found.getpixel((0, 0)) == (0, 201, 37)
    # What is read is not converted once more.
    np.testing.assert_array_equal(load_image(found), found)


@pytest.mark.parametrize("mode", ["RGBA", "P"])
def test_transparency_and_palettes_are_converted_too(mode):
    image = coloured(mode)
    image.info["icc_profile"] = profile(b"RGB ", **ADOBE)
    found = in_srgb(image)
    assert np.abs(np.asarray(found.convert("RGB")) - as_srgb(image.convert("RGB"))).max() <= 1.5
    if mode == "RGBA":
        np.testing.assert_array_equal(found.getchannel("A"), image.getchannel("A"))


@pytest.mark.parametrize("mode", ["L", "LA"])
def test_greys_of_another_curve(mode):
    image = Image.new(mode, (2, 2), 55 if mode == "L" else (55, 255))
    image.info["icc_profile"] = profile(b"GRAY", kTRC=1.0)
    assert load_image(image).getpixel((0, 0)) == (128, 128, 128)


@pytest.mark.parametrize(
    "given",
    [
        profile(b"RGB ", **{**ADOBE, "name": "sRGB IEC61966-2.1"}),
        profile(b"GRAY", kTRC=1.0),
        b"broken",
        profile(b"RGB ", **ADOBE)[:200],
    ],
)
def test_profiles_of_srgb_and_those_that_do_not_fit_change_nothing(given):
    for mode in ("RGB", "RGBA", "P", "CMYK"):
        image = coloured(mode)
        expected = load_image(image)
        image.info["icc_profile"] = given
        np.testing.assert_array_equal(load_image(image), expected)


def test_profiles_can_be_ignored_as_diffusers_does(monkeypatch):
    image = coloured()
    image.info["icc_profile"] = profile(b"RGB ", **ADOBE)
    assert (np.asarray(load_image(image)) != np.asarray(image)).any()
    monkeypatch.setenv("DIFFUSAX_COLOR_PROFILES", "ignore")
    np.testing.assert_array_equal(load_image(image), image)
