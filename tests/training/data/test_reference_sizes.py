"""Sizes of images to look at: those of pipelines, of a fixed few, and rows in buckets of them."""

import logging

import numpy as np
import pytest
from diffusers.training_utils import generate_aspect_ratio_buckets
from PIL import Image, ImageOps
from support.data_sets import picture, png, write_parquet

from diffusax.images.references import KONTEXT_SIZES, whole_reference
from diffusax.pipelines.families.flux import FLUX
from diffusax.pipelines.families.flux2 import FLUX2_KLEIN
from diffusax.pipelines.families.flux3 import FLUX3_KLEIN
from diffusax.pipelines.families.qwen_image_edit import QWEN_IMAGE_EDIT_PLUS
from diffusax.training.data.opening import open_images
from diffusax.training.data.options import EditDataConfig
from diffusax.training.data.references import OwnSizes, fit

COLUMNS = ("input_image", "edit_prompt", "edited_image")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path_factory.mktemp("cache")))


def test_kontext_s_sizes_are_the_ladder_of_its_script():
    (sizes,) = OwnSizes(FLUX.edits, 512, 16, 99).rungs()
    assert {*sizes} == {*generate_aspect_ratio_buckets(512, 16, list(KONTEXT_SIZES))}
    (large,) = OwnSizes(FLUX.edits, 1024, 16, 99).rungs()
    assert {*large} == {*generate_aspect_ratio_buckets(1024, 16, list(KONTEXT_SIZES))}


def test_small_images_stay_small_only_where_pipelines_leave_them_so():
    images = np.array([[[1500, 1500]], [[520, 520]], [[100, 100]], [[0, 0]], [[-1, -1]]])
    klein = OwnSizes(FLUX2_KLEIN.edits, 1024, 16, 99).shapes(images)
    assert klein == [((1024, 1024),), ((512, 512),), ((256, 256),), (), None]
    qwen = OwnSizes(QWEN_IMAGE_EDIT_PLUS.edits, 1024, 32, 99).shapes(images)
    assert qwen == [((1024, 1024),)] * 3 + [(), None]


def test_rare_shapes_become_the_nearest_of_the_frequent_ones(caplog):
    caplog.set_level(logging.INFO, "diffusax.training")
    square, wide, high = (512, 512), (400, 640), (640, 400)
    rows = [[square]] * 5 + [[wide]] * 4 + [[(416, 640)], [high], [square, wide]]
    images = np.array([[*row, *[(0, 0)] * (2 - len(row))] for row in rows])
    own = OwnSizes(QWEN_IMAGE_EDIT_PLUS.edits, 512, 32, 3)
    found = own.shapes(images)
    assert len({*found}) == 3
    assert found[9] == found[5]
    assert found[5][0][1] > found[5][0][0]
    # Half of the way in logarithms; the square is nearer than the wide one.
    assert found[10] == found[0] == ((512, 512),)
    assert len(found[11]) == 2
    assert "3 of 5 shapes are used, and 2 rows of rarer ones have the nearest" in caplog.text


def test_an_only_image_of_flux3_is_kept_whole_and_mirrored_as_in_pipelines():
    image = picture(3, (90, 64))
    assert FLUX3_KLEIN.edits.mirrored(1)
    assert not FLUX3_KLEIN.edits.mirrored(2)
    expected = (whole_reference(image, 16)[0] + 1) * 127.5
    np.testing.assert_allclose(fit(image, (64, 96), mirrored=True), expected, atol=0.01)
    cut = fit(image, (64, 64), mirrored=False)
    np.testing.assert_array_equal(cut, np.asarray(ImageOps.fit(image, (64, 64), Image.LANCZOS)))


def test_rows_are_in_buckets_of_their_sizes_and_those_of_their_images(tmp_path, caplog):
    caplog.set_level(logging.INFO, "diffusax.training")

    def cell(seed, *size):
        return {"bytes": png(picture(seed, size)), "path": None}

    rows = [
        {"input_image": [cell(1, 64, 64)], "edit_prompt": "a", "edited_image": cell(2, 64, 64)},
        {"input_image": [cell(3, 96, 40)], "edit_prompt": "b", "edited_image": cell(4, 64, 64)},
        {"input_image": [], "edit_prompt": "c", "edited_image": cell(5, 64, 64)},
        {
            "input_image": [cell(6, 64, 64), cell(7, 40, 96)],
            "edit_prompt": "d",
            "edited_image": cell(8, 96, 64),
        },
    ]
    path = str(write_parquet(tmp_path, rows))
    options = {"reference_size": "own", "reference_resolution": 64, "references_optional": True}
    config = EditDataConfig(path, buckets=("64x64", "96x64"), **options)
    side = {"image_column": COLUMNS[2], "side": 64, "factor": 16, "references": 3}
    for _ in range(2):
        source = open_images(config, COLUMNS, **side, policy=FLUX2_KLEIN.edits)
        names = [source.buckets.name(i) for i in source.buckets.of_row]
        assert names == ["64x64+64x64", "64x64+96x32", "64x64+0", "96x64+64x64+32x96"]
        assert source.buckets.largest_row() == 3
        assert "64x64+0 1" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reference_size": "own", "streaming": True}, "own cannot be with data.streaming"),
        ({"reference_size": "own", "own_part": True}, "own cannot be with data.own_part"),
        ({"reference_resolution": 512}, "reference_resolution=512 does nothing without data.ref"),
        ({"reference_shapes": 2}, "reference_shapes=2 does nothing without data.reference_size"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        EditDataConfig("owner/name", **options)
