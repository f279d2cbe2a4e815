import numpy as np
import pytest
from diffusers.utils import make_image_grid as their_grid
from PIL import Image

from diffusax import make_image_grid
from diffusax.images.sheets import captioned, contact_sheet, labelled_grid


def pictures(count, size=(60, 40)):
    return [Image.new("RGB", size, (10 * i, 0, 0)) for i in range(count)]


def dark(sheet):
    """Where the ink is."""
    return np.asarray(sheet).min(-1) < 128


@pytest.mark.parametrize("resize", [None, 24])
def test_grids_are_those_of_diffusers(resize):
    images = [*pictures(5), Image.new("RGB", (20, 30), "white")]
    ours, theirs = (make(images, 2, 3, resize) for make in (make_image_grid, their_grid))
    np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def test_grids_have_as_many_pictures_as_places():
    with pytest.raises(ValueError, match=r"rows=2 times cols=2 must be .*\(got 3\)"):
        make_image_grid(pictures(3), rows=2, cols=2)


def test_contact_sheets_are_as_square_as_can_be():
    assert contact_sheet(pictures(5)).size == (188, 84)
    assert contact_sheet(pictures(5), columns=5, gap=0).size == (300, 40)


def test_labels_stand_beside_rows_and_above_columns():
    images = pictures(8)
    plain = np.asarray(contact_sheet(images, columns=4))
    rows = [images[:4], images[4:]]
    sheet = np.asarray(labelled_grid(rows, ["guidance 3", "9"], ["1.0", "1.5", "2", "3"]))
    top, left = sheet.shape[0] - 84, sheet.shape[1] - 252
    assert min(top, left) > 8
    np.testing.assert_array_equal(sheet[top:, left:], plain)
    beside = dark(sheet[top:, :left]).any(1).nonzero()[0]
    assert (beside < 40).any()
    assert (beside >= 44).any()
    above = dark(sheet[:top, left:]).any(0).nonzero()[0]
    assert {int(column) // 64 for column in above} == {0, 1, 2, 3}
    assert (sheet[:top, :left] == 255).all()
    np.testing.assert_array_equal(np.asarray(labelled_grid(rows)), plain)


def test_long_labels_stay_above_their_columns():
    label = "image guidance 1.25 of something"
    images = [Image.new("RGB", (64, 64), "white")] * 3
    ink = dark(labelled_grid([images], (), [label] * 3)).any(0)
    assert not ink[64:68].any()
    assert not ink[132:136].any()
    assert ink[:64].any()


def test_labels_and_rows_are_counted():
    with pytest.raises(ValueError, match=r"row_labels must be 1 texts or none \(got 2\)"):
        labelled_grid([pictures(2)], ["a", "b"])
    with pytest.raises(ValueError, match=r"rows of one length.*\[2, 1\]"):
        labelled_grid([pictures(2), pictures(1)])


def test_captions_stand_beneath_their_pictures():
    images = [Image.new("RGB", size, "white") for size in ((120, 90), (128, 128))]
    cells = captioned(images, ["a red apple", "a green pear on a table in the sun, much light"])
    assert {cell.size for cell in cells} == {(128, cells[0].height)}
    heights = [np.flatnonzero(dark(cell).any(1)) for cell in cells]
    assert min(rows.min() for rows in heights) >= 128
    # The second goes on in another line.
    assert heights[1].max() > heights[0].max() + 8


@pytest.mark.parametrize("caption", ["", "word " * 400, "w" * 100_000, "猫\n\t\x00 ü"])
def test_any_text_is_a_caption(caption):
    (cell,) = captioned([Image.new("RGB", (64, 64), "white")], [caption])
    assert cell.width == 64
    assert 64 < cell.height < 160
    assert dark(cell).any() == bool(caption)


def test_every_picture_has_a_caption():
    assert captioned([], []) == []
    with pytest.raises(ValueError, match="captions must be 2, one per image"):
        captioned(pictures(2), ["a"])
