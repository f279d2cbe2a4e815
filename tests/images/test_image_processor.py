import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from diffusax.images.image_processor import CLIPImageProcessor


def picture(width, height, mode="RGB"):
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    values = np.random.default_rng(width).integers(0, 256, (height, width, *channels), np.uint8)
    return Image.fromarray(values, mode)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": {"shortest_edge": 31}, "crop_size": {"height": 31, "width": 31}},
        # More than there is, evenly and by an odd number of pixels.
        {"size": {"shortest_edge": 20}, "crop_size": {"height": 30, "width": 25}},
        {"size": {"height": 17, "width": 40}, "do_center_crop": False, "resample": 2},
        {"do_resize": False, "image_mean": [0.5, 0.1, 0.2], "image_std": [0.4, 0.5, 0.6]},
        {"do_normalize": False, "rescale_factor": 0.5},
        {"do_rescale": False},
    ],
)
@pytest.mark.parametrize(
    "image", [picture(50, 70), picture(231, 40), picture(33, 33, "RGBA"), picture(40, 30, "L")]
)
def test_pixels_are_those_of_transformers(tmp_path, options, image):
    theirs = CLIPImageProcessorPil(**options)
    theirs.save_pretrained(tmp_path)
    ours = CLIPImageProcessor.from_folder(tmp_path, 64)
    expected = theirs(image, return_tensors="np")["pixel_values"][0].transpose(1, 2, 0)
    shaped = theirs(image, return_tensors="pt"), ours(image, return_tensors="pt")
    assert type(shaped[1].pixel_values) is type(shaped[0].pixel_values)
    assert shaped[1].pixel_values.shape == shaped[0].pixel_values.shape
    actual = ours.pixels(image)
    np.testing.assert_array_equal(ours([image]).pixel_values[0], actual.transpose(2, 0, 1))
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


def test_files_of_old_and_new_transformers_are_read(tmp_path):
    old = {"crop_size": 30, "size": 30, "feature_extractor_type": "CLIPFeatureExtractor"}
    expected = CLIPImageProcessor.from_dict(old)
    assert expected.pixels(picture(50, 70)).shape == (30, 30, 3)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": old}))
    assert CLIPImageProcessor.from_folder(tmp_path, 64) == expected
    (tmp_path / "processor_config.json").unlink()
    assert CLIPImageProcessor.from_folder(tmp_path, 30) == expected


def test_pixels_can_be_those_of_the_official_metrics():
    processor = CLIPImageProcessor.from_dict({"size": 8, "crop_size": 8})
    plain = CLIPImageProcessor.from_dict({"size": 8, "crop_size": 8, "do_normalize": False})
    image = picture(9, 12)
    mean, std = processor.image_mean, processor.image_std
    expected = (2 * plain.pixels(image) - 1 - mean) / std
    actual = processor.with_pixels_from_minus_one().pixels(image)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": "large"}, "size"),
        ({"size": {"height": 3}}, "size must have a shortest_edge, or a height and a width"),
        ({"crop_size": {"shortest_edge": 3}}, "crop_size must have a height and a width"),
        ({"image_std": [0, 1, 1]}, "image_std"),
        ({"resample": 9}, "resample"),
    ],
)
def test_an_option_that_cannot_be_is_an_error(options, message):
    with pytest.raises(ValueError, match=f"^x.json: .*{message}"):
        CLIPImageProcessor.from_dict(options, source="x.json")
