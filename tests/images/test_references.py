"""Images to look at, against diffusers' processor for FLUX.2."""

import numpy as np
import pytest
from diffusers.pipelines.flux2.image_processor import Flux2ImageProcessor
from support.pairs import picture

from diffusax.images.references import (
    as_images,
    reference_image,
    reference_images,
    reference_size,
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
