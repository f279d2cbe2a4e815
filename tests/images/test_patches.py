"""Patches for Qwen's vision networks against transformers' processor for Pillow, live."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from support.effort import first
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)

from diffusax.images.patches import Qwen2VLImageProcessor


def picture(width, height, mode="RGB"):
    channels = {"RGB": (3,), "RGBA": (4,), "L": ()}[mode]
    values = np.random.default_rng(width).integers(0, 256, (height, width, *channels), np.uint8)
    return Image.fromarray(values, mode)


IMAGES = [picture(50, 70), picture(231, 40), picture(33, 33, "RGBA"), picture(40, 30, "L")]


@pytest.mark.parametrize(
    "options",
    first(
        [
            # As in Qwen3-VL's preprocessor_config.json, but smaller.
            {
                "patch_size": 16,
                "size": {"shortest_edge": 64 * 64, "longest_edge": 96 * 96},
                "image_mean": [0.5, 0.5, 0.5],
                "image_std": [0.5, 0.5, 0.5],
            },
            {"patch_size": 4, "merge_size": 3, "temporal_patch_size": 3, "min_pixels": 20 * 20},
            {"patch_size": 4, "max_pixels": 30 * 30, "min_pixels": 64, "resample": 2},
            {"patch_size": 4, "do_normalize": False, "rescale_factor": 0.5},
            {"patch_size": 4, "do_rescale": False},
            {},
        ],
        3,
    ),
)
def test_patches_are_exactly_those_of_transformers(tmp_path, options):
    theirs = Qwen2VLImageProcessorPil(**options)
    theirs.save_pretrained(tmp_path)
    ours = Qwen2VLImageProcessor.from_folder(tmp_path)
    expected = theirs(IMAGES, return_tensors="pt")
    actual = ours(IMAGES, return_tensors="pt")
    assert torch.equal(actual.image_grid_thw, expected["image_grid_thw"])
    assert actual.pixel_values.dtype == expected["pixel_values"].dtype
    assert torch.equal(actual.pixel_values, expected["pixel_values"])
    ours.save_pretrained(tmp_path / "again")
    again = Qwen2VLImageProcessorPil.from_pretrained(tmp_path / "again")
    np.testing.assert_array_equal(
        again(IMAGES[1], return_tensors="np")["pixel_values"], ours(IMAGES[1]).pixel_values
    )
    assert Qwen2VLImageProcessor.from_folder(tmp_path / "again") == ours


def test_without_resizing_an_image_stays_as_large_as_it_is():
    ours = Qwen2VLImageProcessor(do_resize=False, patch_size=5)
    theirs = Qwen2VLImageProcessorPil(do_resize=False, patch_size=5)
    actual, expected = ours(picture(50, 70)), theirs(picture(50, 70), return_tensors="np")
    np.testing.assert_array_equal(actual.pixel_values, expected["pixel_values"])
    np.testing.assert_array_equal(actual.image_grid_thw, [[1, 14, 10]])


def test_sizes_are_those_of_transformers():
    rng = np.random.default_rng(0)
    for size, merge, least, most in [
        (16, 2, 65536, 16777216),
        (14, 2, 3136, 1003520),
        (4, 3, 1, 400),
    ]:
        options = {"shortest_edge": least, "longest_edge": most}
        ours = Qwen2VLImageProcessor.from_dict(
            {"patch_size": size, "merge_size": merge, "size": options}
        )
        for height, width in rng.integers(1, 3000, (300, 2)):
            if max(height, width) <= 200 * min(height, width):
                expected = smart_resize(height, width, size * merge, least, most)
                assert ours.resized(int(height), int(width)) == expected


def test_the_file_of_the_hub_is_read(tmp_path):
    # As in Qwen/Qwen3-VL-4B-Instruct.
    data = {
        "size": {"longest_edge": 16777216, "shortest_edge": 65536},
        **{"patch_size": 16, "temporal_patch_size": 2, "merge_size": 2},
        **{"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]},
        **{"processor_class": "Qwen3VLProcessor"},
        **{"image_processor_type": "Qwen2VLImageProcessorFast"},
    }
    ours = Qwen2VLImageProcessor.from_dict(data)
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": data}))
    assert Qwen2VLImageProcessor.from_folder(tmp_path) == ours
    assert (ours.patch_size, ours.size.longest_edge, ours.do_resize) == (16, 16777216, True)
    patches = ours(picture(300, 200))
    assert patches.pixel_values.shape == (14 * 20, 3 * 2 * 16 * 16)
    np.testing.assert_array_equal(patches.image_grid_thw, [[1, 14, 20]])


def test_the_file_of_the_hub_of_qwen_2_5_is_read():
    # As in Qwen/Qwen2.5-VL-7B-Instruct.
    data = {
        **{"min_pixels": 3136, "max_pixels": 12845056},
        **{"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2},
        **{"image_mean": [0.48145466, 0.4578275, 0.40821073]},
        **{"image_std": [0.26862954, 0.26130258, 0.27577711]},
        **{"processor_class": "Qwen2_5_VLProcessor"},
        **{"image_processor_type": "Qwen2VLImageProcessor"},
    }
    ours = Qwen2VLImageProcessor.from_dict(data)
    theirs = Qwen2VLImageProcessorPil(**data)
    images = [picture(301, 199), picture(27, 90)]
    actual, expected = ours(images), theirs(images=images, return_tensors="np")
    np.testing.assert_array_equal(actual.image_grid_thw, expected["image_grid_thw"])
    np.testing.assert_array_equal(actual.pixel_values, expected["pixel_values"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"patch_size": 0}, "patch_size"),
        ({"size": {"shortest_edge": 100, "longest_edge": 50}}, "a shortest_edge up to the longest"),
        ({"size": 4}, "size"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
    ],
)
def test_an_option_that_is_not_valid_is_an_error(change, message):
    with pytest.raises(ValueError, match=rf"preprocessor_config.json: .*{message}"):
        Qwen2VLImageProcessor.from_dict(change)


def test_what_is_no_image_and_what_is_missing_are_errors(tmp_path):
    ours = Qwen2VLImageProcessor()
    with pytest.raises(ValueError, match=r"at most 200 times as long as wide \(got 402x2\)"):
        ours(picture(402, 2))
    with pytest.raises(ValueError, match=r"no_such\.png"):
        ours("no_such.png")
    with pytest.raises(ValueError, match=r"preprocessor_config.json is missing"):
        Qwen2VLImageProcessor.from_folder(tmp_path)
