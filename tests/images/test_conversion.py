"""Picture inputs, against the image processor of PyTorch diffusers."""

import io
import os
import re
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.utils import load_image as diffusers_load_image
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageDraw
from support.effort import examples

from diffusax.images.conversion import nearest, png_parameters, to_control, to_pil, to_pixels
from diffusax.images.masks import apply_overlay, blur, get_crop_region, to_mask
from diffusax.images.reading import load_image

SIZES = [(None, None), (32, 48), (24, None), (64, 16)]
THEIRS = VaeImageProcessor(vae_scale_factor=8)
THEIR_MASKS = VaeImageProcessor(
    vae_scale_factor=8, do_normalize=False, do_binarize=True, do_convert_grayscale=True
)
THEIR_CONTROLS = VaeImageProcessor(vae_scale_factor=8, do_convert_rgb=True, do_normalize=False)


def picture(width=53, height=37, mode="RGB", seed=0):
    """Shapes and noise, so that filters, offsets and mirrored axes show."""
    random = np.random.default_rng(seed)
    noise = random.integers(0, 256, (height, width, 4), dtype=np.uint8)
    image = Image.fromarray(noise, "RGBA")
    ImageDraw.Draw(image).ellipse((3, 5, 3 + width // 2, 5 + height // 2), fill=(250, 20, 90, 255))
    return image.convert(mode)


def mask(width=53, height=37, mode="L"):
    image = Image.new("L", (width, height))
    draw = ImageDraw.Draw(image)
    draw.ellipse((width // 4, height // 3, width // 2, height - 5), fill=255)
    draw.line((0, 9, width // 3, 12), fill=130, width=3)
    return image.convert(mode)


def theirs(processor, *args, **kwargs):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return processor.preprocess(*args, **kwargs).permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize("mode", ["default", "fill", "crop"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("own", [(53, 37), (37, 53), (48, 32), (200, 16)])
def test_pil_images_equal_diffusers(own, size, mode):
    image = picture(*own)
    expected = theirs(THEIRS, image, *size, resize_mode=mode)
    result = to_pixels(image, *size, resize_mode=mode)
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, expected)


def test_lists_take_the_first_pictures_size():
    images = [picture(40, 33), picture(70, 20, seed=1)]
    np.testing.assert_array_equal(to_pixels(images), theirs(THEIRS, images))
    assert to_pixels(images).shape == (2, 32, 40, 3)


@pytest.mark.parametrize("mode", ["default", "fill", "crop"])
def test_parts_equal_diffusers(mode):
    options = {"resize_mode": mode, "crops_coords": (-4, 3, 31, 60)}
    expected = theirs(THEIRS, picture(), 32, 32, **options)
    np.testing.assert_array_equal(to_pixels(picture(), 32, 32, **options), expected)
    expected = theirs(THEIR_MASKS, mask(), 32, 32, **options)
    np.testing.assert_array_equal(to_mask(mask(), 32, 32, **options), expected)


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_arrays_and_tensors_equal_diffusers(size, signed):
    array = np.random.default_rng(1).random((2, 37, 53, 3), np.float32) * (1 + signed) - signed
    tensor = torch.from_numpy(array).permute(0, 3, 1, 2)
    expected = theirs(THEIRS, array, *size)
    np.testing.assert_array_equal(theirs(THEIRS, tensor, *size), expected)
    for value in (array, list(array), [array[:1], array[1:]], tensor, list(tensor), [tensor]):
        np.testing.assert_array_equal(to_pixels(value, *size), expected)
    np.testing.assert_array_equal(to_pixels(array[0], *size), theirs(THEIRS, array[0], *size))
    np.testing.assert_array_equal(to_pixels(tensor[0], *size), theirs(THEIRS, array[0], *size))
    halves = to_pixels(tensor.bfloat16(), *size)
    np.testing.assert_array_equal(halves, theirs(THEIRS, tensor.bfloat16().float(), *size))


@given(st.integers(1, 300), st.integers(1, 300))
@settings(max_examples=examples(50, 200), deadline=None)
def test_nearest_pixels_are_pytorchs(size, new):
    array = np.arange(size, dtype=np.float32)
    expected = torch.nn.functional.interpolate(torch.from_numpy(array)[None, None, None], (1, new))
    np.testing.assert_array_equal(
        nearest(array[None, None, :, None], 1, new)[0, 0, :, 0], expected[0, 0, 0].numpy()
    )


def test_other_forms_of_the_same_array():
    array = np.array(picture(48, 32))
    expected = to_pixels(picture(48, 32))
    np.testing.assert_array_equal(to_pixels(array), expected)
    np.testing.assert_array_equal(to_pixels(torch.from_numpy(array).permute(2, 0, 1)), expected)
    grey = np.asarray(picture(48, 32, "L"))
    expected = to_pixels(picture(48, 32, "L"))
    np.testing.assert_array_equal(to_pixels(grey), expected)
    np.testing.assert_array_equal(to_pixels(grey[..., None]), expected)


def test_latents_stay_as_they_are():
    latents = torch.rand((2, 4, 5, 7)) + 9
    assert torch.equal(THEIRS.preprocess(latents), latents)
    for value in (latents, latents.numpy(), list(latents)):
        np.testing.assert_array_equal(to_pixels(value, 8, 8), latents.permute(0, 2, 3, 1))


@pytest.mark.parametrize("shape", [(16, 5, 7), (16, 5, 16), (16, 16, 16)])
def test_latents_have_as_many_channels_as_the_autoencoder_says(shape):
    latents = np.random.default_rng(0).normal(size=(2, *shape)).astype(np.float32)
    with pytest.raises(ValueError, match="must be an array h w 3"):
        to_pixels(latents)
    # Channels come first wherever both axes could be theirs: so calls give latents.
    for value in (latents, torch.tensor(latents), jnp.asarray(latents)):
        read = to_pixels(value, latent_channels=16)
        np.testing.assert_array_equal(read, latents.transpose(0, 2, 3, 1))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["1", "L", "RGB"])
def test_masks_equal_diffusers(mode, size):
    for resize_mode in ("default", "fill", "crop"):
        value = mask(mode=mode)
        result = to_mask(value, *size, resize_mode=resize_mode)
        expected = theirs(THEIR_MASKS, value, *size, resize_mode=resize_mode)
        np.testing.assert_array_equal(result, expected)
        assert set(np.unique(result)) == {0, 1}


@pytest.mark.parametrize("size", SIZES)
def test_mask_arrays_equal_diffusers(size):
    array = np.random.default_rng(2).random((2, 37, 53), np.float32)
    array[0, 0, 0] = 0.5
    tensor = torch.from_numpy(array)
    both = theirs(THEIR_MASKS, tensor, *size)
    for value in (array, array[..., None], tensor, tensor[:, None], list(array)):
        np.testing.assert_array_equal(to_mask(value, *size), both)
    one = theirs(THEIR_MASKS, array[0][..., None], *size)
    for value in (array[0], array[0][..., None], tensor[0], tensor[:1]):
        np.testing.assert_array_equal(to_mask(value, *size), one)
    binary = array >= 0.5
    for value in (binary, binary.astype(int), binary.astype(np.uint8) * 255, tensor >= 0.5):
        np.testing.assert_array_equal(to_mask(value, *size), both)
    np.testing.assert_array_equal(to_mask(binary.astype(np.uint8), *size), both)


def test_coloured_mask_arrays_are_as_light_as_their_grey():
    colours = np.array([[200, 0, 0], [0, 200, 0], [0, 230, 120], [255, 90, 0]], np.uint8)
    array = np.repeat(colours[:, None], 8, axis=1).repeat(8, axis=0)[None]
    expected = to_mask(Image.fromarray(array[0]), 32, 8)
    np.testing.assert_array_equal(to_mask(array, 32, 8), expected)
    assert set(np.unique(expected)) == {0, 1}


@pytest.mark.parametrize("size", SIZES)
def test_controls_equal_diffusers(size):
    for mode in ("RGB", "L", "1"):
        value = picture(mode=mode)
        expected = theirs(THEIR_CONTROLS, value.convert("RGB"), *size)
        np.testing.assert_array_equal(to_control(value, *size), expected)
    array = np.random.default_rng(3).random((1, 37, 53, 3), np.float32)
    np.testing.assert_array_equal(to_control(array, *size), theirs(THEIR_CONTROLS, array, *size))


@given(st.data(), st.integers(8, 90), st.integers(8, 90), st.integers(0, 40))
@settings(max_examples=examples(40, 150), deadline=None)
def test_crop_regions_equal_diffusers(data, width, height, pad):
    x, y = data.draw(st.integers(0, width - 1)), data.draw(st.integers(0, height - 1))
    w, h = data.draw(st.integers(1, width)), data.draw(st.integers(1, height))
    image = Image.new("L", (width, height))
    ImageDraw.Draw(image).rectangle((x, y, x + w, y + h), fill=1)
    size = data.draw(st.sampled_from([(64, 64), (96, 32), (40, 88)]))
    expected = VaeImageProcessor.get_crop_region(image, *size, pad=pad)
    assert get_crop_region(image, *size, pad) == expected


def test_a_black_mask_has_no_crop_region():
    with pytest.raises(ValueError, match="not black"):
        get_crop_region(Image.new("L", (8, 8)), 8, 8)


@pytest.mark.parametrize("factor", [0, 4, 33])
def test_blurred_masks_equal_diffusers(factor):
    for mode in ("L", "RGB"):
        expected = VaeImageProcessor.blur(mask(mode=mode), factor)
        np.testing.assert_array_equal(blur(mask(mode=mode), factor), expected)


@pytest.mark.parametrize("box", [None, (6, 2, 45, 30)])
def test_overlays_equal_diffusers(box):
    rim, drawn = blur(mask(), 3), picture(*((53, 37) if box is None else (64, 48)), seed=5)
    expected = THEIRS.apply_overlay(rim, picture(), drawn, box)
    np.testing.assert_array_equal(apply_overlay(rim, picture(), drawn, box), expected)


def test_overlays_of_other_sizes_are_refused():
    with pytest.raises(ValueError, match=r"image's size \(53, 37\)"):
        apply_overlay(mask(9, 9), picture(), picture())
    with pytest.raises(ValueError, match=r"generated image must be of the size \(53, 37\)"):
        apply_overlay(mask(), picture(), picture(9, 9))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_cameras_orientation_is_applied(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture().save(tmp_path / "a.png", exif=exif)
    expected = np.asarray(diffusers_load_image(str(tmp_path / "a.png")))
    values = (
        (tmp_path / "a.png").read_bytes(),
        str(tmp_path / "a.png"),
        Image.open(tmp_path / "a.png"),
    )
    for value in (tmp_path / "a.png", *values):
        np.testing.assert_array_equal(load_image(value), expected)
    assert expected.shape == ((53, 37, 3) if orientation > 4 else (37, 53, 3))
    np.testing.assert_array_equal(
        to_pixels(tmp_path / "a.png"), theirs(THEIRS, Image.fromarray(expected))
    )


@pytest.mark.parametrize("mode", ["RGBA", "LA", "PA", "P", "RGBa"])
def test_transparent_parts_become_white(tmp_path, mode):
    image = Image.new("LA" if mode == "LA" else "RGBA", (8, 8), 0)
    image.paste((200, 255) if mode == "LA" else (200, 200, 200, 255), (0, 0, 4, 8))
    image = image.quantize() if mode == "P" else image if mode == "LA" else image.convert(mode)
    result = np.asarray(load_image(image))
    np.testing.assert_array_equal(result[:, :4], 200)
    np.testing.assert_array_equal(result[:, 4:], 255)
    if mode in ("RGBA", "LA", "P"):
        image.save(tmp_path / "a.png")
        np.testing.assert_array_equal(load_image(tmp_path / "a.png"), result)


def test_a_transparent_colour_becomes_white(tmp_path):
    image = Image.new("RGB", (8, 8), (1, 2, 3))
    image.paste((9, 9, 9), (0, 0, 4, 8))
    image.save(tmp_path / "a.png", transparency=(1, 2, 3))
    np.testing.assert_array_equal(np.asarray(load_image(tmp_path / "a.png"))[0, ::7, 0], (9, 255))


@pytest.mark.parametrize("suffix", ["png", "tif", "pgm"])
def test_greys_of_16_bits_keep_their_shades(tmp_path, suffix):
    greys = np.arange(256, dtype=np.uint16).reshape(16, 16)
    Image.fromarray(greys * 257).save(tmp_path / f"a.{suffix}")
    for value in (tmp_path / f"a.{suffix}", Image.fromarray((greys * 257).astype(np.int32))):
        np.testing.assert_array_equal(np.asarray(load_image(value))[..., 1], greys)
    np.testing.assert_array_equal(
        to_mask(tmp_path / f"a.{suffix}")[0, ..., 0], (greys >= 128).astype(np.float32)
    )


def test_other_modes_of_greys():
    greys = np.arange(256, dtype=np.uint8).reshape(16, 16)
    image = Image.fromarray(greys)
    fractions = Image.fromarray(greys.astype(np.float32) / 255)
    for value in (image, image.convert("I"), image.convert("F"), fractions, image.convert("P")):
        np.testing.assert_array_equal(np.asarray(load_image(value))[..., 2], greys)
    bits = np.asarray(load_image(Image.fromarray(greys > 99)))
    np.testing.assert_array_equal(bits[..., 0], (greys > 99) * np.uint8(255))


def png(*args):
    file = io.BytesIO()
    picture(*args).save(file, "png")
    return file.getvalue()


def test_files_that_are_no_pictures_are_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "cut.png").write_bytes(png()[:900])
    (tmp_path / "empty.png").write_bytes(b"")
    (tmp_path / "flipped.png").write_bytes(png()[:60] + b"\x77" + png()[61:])
    (tmp_path / "large.png").write_bytes(png(500, 400))
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 90_000)
    reasons = {
        "nothing.png": "No such file",
        "text.png": "not an image",
        "cut.png": "",
        "empty.png": "not an image",
        "flipped.png": "",
        "large.png": "exceeds limit",
        "pipe": "not a regular file",
        "": "not a regular file",
    }
    for name, reason in reasons.items():
        for path in (tmp_path / name, str(tmp_path / name)):
            for read in (load_image, to_mask):
                with pytest.raises(ValueError, match=re.escape(repr(str(path)))) as error:
                    read(path)
                assert reason in str(error.value)
                assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "value", ["/dev/zero", "https://a.b/c.png", "a\0b", "\x1b[31m.png", b"hello"]
)
def test_what_is_no_file_is_never_read(value):
    with pytest.raises(ValueError, match="cannot read the image") as error:
        load_image(value)
    assert "\x1b" not in str(error.value)


def test_a_broken_pil_image_names_its_file(tmp_path):
    (tmp_path / "cut.png").write_bytes(png()[:900])
    with pytest.raises(ValueError, match=r"cut\.png"):
        to_pixels(Image.open(tmp_path / "cut.png"))


def test_long_thin_pictures_are_cut_without_making_them_large():
    for strip, size in ((picture(3, 3000), (64, 24)), (picture(3000, 3), (24, 64))):
        expected = theirs(THEIRS, strip, *size, resize_mode="crop")
        found = to_pixels(strip, *size, resize_mode="crop")
        # They differ a little at the rim, where the filter sees nothing of what is cut off.
        assert np.corrcoef(found.ravel(), expected.ravel())[0, 1] > 0.999
    strip = picture(1, 60_000)
    # In diffusers nothing is left of it.
    assert to_pixels(strip, 64, 64, resize_mode="fill").shape == (1, 64, 64, 3)


def test_sizes_that_cannot_be():
    long = Image.new("RGB", (1, 60_000))
    assert to_pixels(long, 16, 16).shape == (1, 16, 16, 3)
    with pytest.raises(ValueError, match=r"between 8 and 16384 \(got 60000 and 1\)"):
        to_pixels(long)
    for value in (picture(7, 40), np.zeros((7, 40, 3))):
        with pytest.raises(ValueError, match="height and width must be between 8"):
            to_pixels(value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "got NoneType"),
        (3, "got int"),
        ([], "empty list"),
        ([[picture()]], "got list"),
        ([picture(), np.zeros((8, 8, 3))], "not of both"),
        ([np.zeros((8, 8, 3)), np.zeros((8, 16, 3))], "of one size"),
        (np.zeros((8, 8, 5)), r"shape \(8, 8, 5\)"),
        (np.zeros(8), r"shape \(8,\)"),
        (np.zeros((8, 8, 3)) * np.nan, "finite"),
        (np.zeros((0, 8, 3)), "finite"),
        (np.zeros((8, 8, 3), int), "got int64"),
        (np.zeros((8, 8, 3), object), "got object"),
        (np.full((8, 8, 3), 255.0), r"values up to 255"),
    ],
)
def test_what_is_no_picture_is_refused(value, message):
    with pytest.raises(ValueError, match=message):
        to_pixels(value)


def test_arrays_are_neither_cropped_nor_filled():
    for options in ({"resize_mode": "fill"}, {"crops_coords": (0, 0, 8, 8)}):
        for read in (to_pixels, to_mask):
            with pytest.raises(ValueError, match="to be cropped or filled"):
                read(np.zeros((8, 8, 3), np.float32), **options)
    with pytest.raises(ValueError, match="resize_mode must be"):
        to_pixels(picture(), resize_mode="stretch")


def test_pixels_come_out_as_they_went_in():
    pixels = np.asarray(picture(48, 32)).astype(np.float32) / 255
    np.testing.assert_array_equal(to_pil(pixels[None])[0], picture(48, 32))
    expected = VaeImageProcessor.numpy_to_pil(pixels * 0.777)
    np.testing.assert_array_equal(to_pil(pixels[None] * 0.777)[0], expected[0])


def test_settings_are_read_back(tmp_path):
    picture().save(tmp_path / "a.png", pnginfo=png_parameters("a cat\nSteps: 3"))
    assert Image.open(tmp_path / "a.png").text["parameters"] == "a cat\nSteps: 3"
