"""Rows to batches."""

import json
import logging
import os
import resource
import time
import warnings

import numpy as np
import pytest
from pictures import picture, png
from PIL import Image
from toy_run import Rows

from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.training.data import (
    Batches,
    caption_ids,
    choose_caption,
    prepare_image,
    read_picture,
)


def prepare(row, rng):
    return {"x": row["x"], "noise": rng.standard_normal(2)}


class Numbered(Rows):
    """Rows that hold their own index; some of them broken."""

    def __init__(self, rows: int, broken: tuple[int, ...] = ()):
        super().__init__(rows)
        self.broken = broken

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("cannot be read")
        return {"x": np.int64(index)}


def batches(source, n=4, **options) -> Batches:
    return Batches(source, prepare, batch_size=n, **{"seed": 0, **options})


def take(iterator, count: int) -> np.ndarray:
    return np.stack([next(iterator)["x"] for _ in range(count)])


def test_every_epoch_has_each_row_once_in_an_order_of_its_own():
    epochs = take(batches(Numbered(20)), 10).reshape(2, 20)
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(20))
    assert list(epochs[0]) != list(epochs[1])
    assert list(epochs[0]) != list(range(20))


def test_the_seed_decides_the_order_and_the_random_numbers():
    first, same, other = (batches(Numbered(20), seed=seed) for seed in (1, 1, 2))
    a, b, c = (next(x) for x in (first, same, other))
    np.testing.assert_array_equal(a["noise"], b["noise"])
    np.testing.assert_array_equal(a["x"], b["x"])
    assert not np.array_equal(a["x"], c["x"])


@pytest.mark.parametrize("workers", [0, 2])
def test_continues_from_a_saved_position(workers):
    run = batches(Numbered(40), workers=workers)
    take(run, 7)
    state = json.loads(json.dumps(run.get_state()))
    expected = [next(run) for _ in range(8)]
    again = batches(Numbered(40), workers=workers)
    again.set_state(state)
    for batch in expected:
        for key, value in next(again).items():
            np.testing.assert_array_equal(value, batch[key])
    assert again.tally.seen == run.tally.seen


def test_processes_share_the_rows_of_an_epoch():
    parts = [batches(Numbered(24), process_index=i, process_count=2) for i in range(2)]
    rows = [set(take(part, 3).ravel()) for part in parts]
    assert rows[0] | rows[1] == set(range(24))
    assert not rows[0] & rows[1]
    with pytest.raises(ValueError, match="not enough for 3 processes"):
        batches(Numbered(2), process_count=3)


def test_broken_rows_are_skipped_counted_and_named(caplog):
    run = batches(Numbered(400, broken=(3, 77)), n=20)
    with caplog.at_level(logging.WARNING):
        rows = take(run, 40)
    assert not {3, 77} & set(rows.ravel())
    assert run.tally.broken == 4
    assert sum("row 77: cannot be read" in message for message in caplog.messages) == 1


def test_more_than_one_broken_row_in_a_hundred_stops_the_run():
    run = batches(Numbered(400, broken=(1, 2, 3, 4, 5)), n=20)
    with pytest.raises(
        ValueError, match=r"more than 1%; the last is row \d: OSError|cannot be read"
    ):
        take(run, 40)


def test_a_row_that_cannot_be_prepared_is_broken_too():
    def fussy(row, rng):
        if row["x"] == 5:
            raise KeyError("text")
        return prepare(row, rng)

    run = Batches(Numbered(200), fussy, batch_size=10, seed=0)
    assert 5 not in take(run, 20)
    assert run.tally.broken == 1


@pytest.mark.parametrize("size", [(40, 32), (31, 77), (16, 16), (8, 12)])
def test_pictures_are_resized_and_cropped_in_the_middle(size):
    image = picture(0, size)
    rng = np.random.default_rng(0)
    options = {"resolution": 16, "center_crop": True, "random_flip": False}
    result = prepare_image(image, rng, **options)
    scale = 16 / min(size)
    whole = image.resize(
        (max(16, round(size[0] * scale)), max(16, round(size[1] * scale))),
        Image.Resampling.LANCZOS,
    )
    left, top = round((whole.width - 16) / 2), round((whole.height - 16) / 2)
    np.testing.assert_array_equal(result, np.asarray(whole)[top : top + 16, left : left + 16])


def test_crops_and_mirroring_are_drawn():
    image = picture(0, (48, 16))
    options = {"resolution": 16, "center_crop": False, "random_flip": True}
    rng = np.random.default_rng(0)
    results = [prepare_image(image, rng, **options) for _ in range(60)]
    pixels = np.asarray(image)
    windows = {pixels[:, i : i + 16].tobytes(): False for i in range(33)}
    windows |= {pixels[:, i : i + 16][:, ::-1].tobytes(): True for i in range(33)}
    mirrored = [windows[r.tobytes()] for r in results]
    assert 15 < sum(mirrored) < 45
    assert len({r.tobytes() for r in results}) > 20


def test_images_in_any_mode_become_rgb_and_upright(tmp_path):
    image = picture(0)
    exif = Image.Exif()
    exif[0x0112] = 6
    image.convert("L").save(tmp_path / "gray.png", exif=exif)
    loaded = read_picture({"bytes": None, "path": str(tmp_path / "gray.png")})
    assert loaded.mode == "RGB"
    assert loaded.size == (32, 40)
    assert read_picture(png(image)).tobytes() == image.tobytes()
    with pytest.raises(ValueError, match="no image bytes, but int"):
        read_picture(3)


def test_deep_and_transparent_pictures_look_as_they_should():
    deep = Image.fromarray(np.full((4, 4), 0x8080, np.uint16))
    np.testing.assert_array_equal(np.asarray(read_picture(png(deep))), 0x80)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    np.testing.assert_array_equal(np.asarray(read_picture(png(clear))), 255)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (2, 100)])
@pytest.mark.parametrize("center_crop", [True, False])
def test_long_and_narrow_pictures_are_cut_before_they_grow(size, center_crop):
    image = Image.new("L", size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = prepare_image(
        image,
        np.random.default_rng(0),
        resolution=64,
        center_crop=center_crop,
        random_flip=False,
    )
    assert result.shape == (64, 64)
    # Kilobytes; whole, the picture would have 245 million pixels.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


@pytest.mark.parametrize("special", ["/dev/zero", "fifo", ""])
def test_paths_that_are_no_files_are_not_read(special, tmp_path):
    if special == "fifo":
        special = str(tmp_path / "fifo")
        os.mkfifo(special)
    with pytest.raises(ValueError, match="is not a regular file"):
        read_picture({"bytes": None, "path": special})


def test_captions_without_end_are_cut_off(checkpoint):
    tokenizer = CLIPTokenizer.from_folder(checkpoint / "tokenizer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = time.perf_counter()
        ids = caption_ids(tokenizer, "a dog " * 2_000_000)
        assert time.perf_counter() - start < 5
    np.testing.assert_array_equal(ids, caption_ids(tokenizer, "a dog " * 200))
    assert ids[-1] == tokenizer.eos_token_id
    np.testing.assert_array_equal(caption_ids(tokenizer, "a\n dog"), tokenizer("a\n dog")[0])
    assert caption_ids(tokenizer, "half a pair: \ud83d").shape == ids.shape


def test_one_of_several_captions_is_drawn():
    rng = np.random.default_rng(0)
    assert {choose_caption(["a", "b"], rng) for _ in range(20)} == {"a", "b"}
    assert choose_caption("c", rng) == "c"
    with pytest.raises(ValueError, match="NoneType"):
        choose_caption(None, rng)
