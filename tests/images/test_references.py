"""Images to look at, against diffusers' processors for FLUX.2 and FLUX.3."""

import numpy as np
import pytest
from diffusers.modular_pipelines.flux3.image_processor import Flux3ImageProcessor
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from PIL import Image
from support.pairs import picture

from diffusax.images.references import (
    as_images,
    canvas_of,
    cropped_references,
    reference_image,
    reference_images,
    reference_size,
    region_of,
    whole_reference,
)


def upstream(image, multiple):
    """As Flux2KleinPipeline's call prepares an image, 1 h w c."""
    processor = Flux2ImageProcessor(vae_scale_factor=multiple)
    processor.check_image_input(image)
    width, height = image.size
    if width * height > 1024 * 1024:
        image = processor._resize_to_target_area(image, 1024 * 1024)
        width, height = image.size
    width, height = (side // multiple * multiple for side in (width, height))
    found = processor.preprocess(image, height=height, width=width, resize_mode="crop")
    return found.permute(0, 2, 3, 1).numpy()


@pytest.mark.parametrize(
    "size", [(64, 64), (90, 75), (1100, 1000), pytest.param((500, 3900), marks=pytest.mark.slow)]
)
def test_large_ones_are_made_smaller_and_borders_cut_off(size):
    image = picture(1, *size)
    expected = upstream(image, 16)
    actual = reference_image(image, 16)
    np.testing.assert_array_equal(actual, expected)
    assert reference_size(image, 16) == expected.shape[1:3]


def test_several_have_the_size_of_the_first():
    images = [picture(1, 90, 75), picture(2, 60, 200), picture(3, 120, 40)]
    processor = Flux2ImageProcessor(vae_scale_factor=4)
    expected = processor.preprocess(images, height=72, width=88, resize_mode="crop")
    actual = reference_images(images, 4)
    np.testing.assert_array_equal(actual, expected.permute(0, 2, 3, 1).numpy())


def test_a_file_is_an_image(tmp_path):
    picture(1, 80, 70).save(tmp_path / "a.png")
    expected = reference_image(picture(1, 80, 70), 4)
    np.testing.assert_array_equal(reference_image(tmp_path / "a.png", 4), expected)
    assert as_images(tmp_path / "a.png") == [tmp_path / "a.png"]


@pytest.mark.parametrize(
    "size",
    [
        *((64, 64), (67, 91), (128, 250), (15, 40), (5, 300)),
        pytest.param((2100, 2050), marks=pytest.mark.slow),
    ],
)
def test_an_only_one_is_kept_whole(size):
    image, processor = picture(1, *size), Flux3ImageProcessor()
    expected, more = processor.preprocess(image, resize_mode="fill")
    actual = whole_reference(image, 16)
    np.testing.assert_array_equal(actual, expected.permute(0, 2, 3, 1).numpy())
    assert region_of(*canvas_of(*size, 16)) == more["reference_crop"]


@pytest.mark.parametrize(
    "size", [(2048, 2048), (2049, 2048), (9000, 100), (60, 5000), (4095, 1023), (2300, 1820)]
)
def test_the_size_that_an_only_one_is_filled_up_to(size):
    processor, resized = Flux3ImageProcessor(), []

    def resize(image, height, width):
        resized.append((width, height))
        return Image.new("L", (width, height))

    processor.resize = resize
    found = processor._resize_if_canvas_exceeds_area(Image.new("L", size))
    height, width = processor._get_canvas_height_width(found.height, found.width)
    assert canvas_of(*size, 16) == (found.size, (width, height))
    assert bool(resized) == (found.size != size)


@pytest.mark.parametrize(
    "size", [(64, 64), (90, 75), (17, 300), pytest.param((1100, 1000), marks=pytest.mark.slow)]
)
def test_the_borders_of_several_are_cut_off(size):
    image, processor = picture(1, *size), Flux3ImageProcessor()
    expected, more = processor.preprocess(image, resize_mode="crop")
    _, actual = cropped_references([picture(2), image], 16)
    np.testing.assert_array_equal(actual, expected.permute(0, 2, 3, 1).numpy())
    assert more["reference_crop"] is None
