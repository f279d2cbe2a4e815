"""Rows to examples: pictures cut, captions tokenized, edits chosen."""

import os
import resource
import time
import warnings

import numpy as np
import pytest
from PIL import Image
from support.data_sets import picture, png

from diffusax.pipelines.families.clip import tokenize_caption
from diffusax.text.tokenizer import CLIPTokenizer
from diffusax.training.data.examples import (
    choose_caption,
    choose_edit,
    clean_caption,
    prepare_images,
    read_image,
)


def cut_image(image, rng, **options):
    (pixels,), _ = prepare_images([image], rng, **options)
    return pixels


def ids_of(tokenizer, caption):
    return tokenize_caption([tokenizer], clean_caption(caption)).ids[0]


@pytest.mark.parametrize("size", [(40, 32), (31, 77), (16, 16), (8, 12)])
def test_pictures_are_resized_and_cropped_in_the_middle(size):
    image = picture(0, size)
    rng = np.random.default_rng(0)
    options = {"resolution": 16, "center_crop": True, "random_flip": False}
    result = cut_image(image, rng, **options)
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
    results = [cut_image(image, rng, **options) for _ in range(60)]
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
    loaded = read_image({"bytes": None, "path": str(tmp_path / "gray.png")})
    assert loaded.mode == "RGB"
    assert loaded.size == (32, 40)
    assert read_image(png(image)).tobytes() == image.tobytes()
    with pytest.raises(ValueError, match="no image bytes, but int"):
        read_image(3)


def test_deep_and_transparent_pictures_look_as_they_should():
    deep = Image.fromarray(np.full((4, 4), 0x8080, np.uint16))
    np.testing.assert_array_equal(np.asarray(read_image(png(deep))), 0x80)
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    np.testing.assert_array_equal(np.asarray(read_image(png(clear))), 255)


@pytest.mark.parametrize("size", [(1, 60_000), (60_000, 1), (2, 100)])
@pytest.mark.parametrize("center_crop", [True, False])
def test_long_and_narrow_pictures_are_cut_before_they_grow(size, center_crop):
    image = Image.new("L", size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = cut_image(
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
        read_image({"bytes": None, "path": special})


def test_captions_without_end_are_cut_off(checkpoint):
    tokenizer = CLIPTokenizer.from_folder(checkpoint / "tokenizer")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start = time.perf_counter()
        ids = ids_of(tokenizer, "a dog " * 2_000_000)
        assert time.perf_counter() - start < 5
    np.testing.assert_array_equal(ids, ids_of(tokenizer, "a dog " * 200))
    assert ids[-1] == tokenizer.eos_token_id
    np.testing.assert_array_equal(ids_of(tokenizer, "a\n dog"), tokenizer.windows("a\n dog")[0])
    assert ids_of(tokenizer, "half a pair: \ud83d").shape == ids.shape


def test_one_of_several_captions_is_drawn():
    rng = np.random.default_rng(0)
    assert {choose_caption(["a", "b"], rng) for _ in range(20)} == {"a", "b"}
    assert choose_caption("c", rng) == "c"
    with pytest.raises(ValueError, match="NoneType"):
        choose_caption(None, rng)


def test_pictures_before_and_after_are_cut_alike_and_their_place_is_noted():
    before = picture(0, (48, 30))
    after = Image.fromarray(255 - np.asarray(before))
    options = {"resolution": 16, "center_crop": False, "random_flip": True}
    rng = np.random.default_rng(0)
    whole = np.asarray(after.resize((26, 16), Image.Resampling.LANCZOS))
    mirrored = 0
    for _ in range(40):
        (edited, original), sizes = prepare_images([after, before], rng, **options)
        np.testing.assert_allclose(edited, 255.0 - original, atol=1)
        height, width, top, left, *target = sizes
        assert (height, width, *target) == (30, 48, 16, 16)
        places = [whole, whole[:, ::-1]]
        found = [np.array_equal(edited, p[top:, left : left + 16]) for p in places]
        assert any(found)
        mirrored += found[1]
    assert 10 < mirrored < 30


def test_a_picture_of_another_size_is_brought_to_the_edited_ones():
    after, before = Image.new("RGB", (40, 20), "red"), picture(0, (80, 40))
    options = {"resolution": 20, "center_crop": True, "random_flip": False}
    (edited, original), sizes = prepare_images([after, before], np.random.default_rng(0), **options)
    assert edited.shape == original.shape == (20, 20, 3)
    expected = before.resize((40, 20), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(original, np.asarray(expected)[:, 10:30])
    assert sizes.tolist() == [20, 40, 0, 10, 20, 20]


def test_one_edit_of_several_is_drawn():
    rng = np.random.default_rng(0)
    assert choose_edit("a", b"x", rng) == ("a", b"x")
    drawn = [choose_edit(["a", "b"], [b"x", b"y"], rng) for _ in range(40)]
    assert set(drawn) == {("a", b"x"), ("b", b"y")}
    assert 10 < drawn.count(("a", b"x")) < 30
    assert {choose_edit(["a", "", "b"], b"x", rng) for _ in range(40)} == {("a", b"x"), ("b", b"x")}
    assert choose_edit("a", [b"x"], rng) == ("a", b"x")
    for prompts, edited, message in (
        (["", " "], b"x", "are empty"),
        ("a", [b"x", b"y"], "one instruction for 2 edited images"),
        (" ", b"x", "instruction is empty"),
        (["a", "b"], [b"x"], "2 instructions for 1 edited images"),
        ([], [], "are empty"),
        (None, b"x", "not a text but NoneType"),
    ):
        with pytest.raises(ValueError, match=message):
            choose_edit(prompts, edited, rng)
