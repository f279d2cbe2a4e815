"""Masks for the loss, and captions with triggers and shuffled tags."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import torch
from PIL import Image
from support.data_sets import edit_row, picture, png, row, write_parquet

from diffusax.training import (
    AutoencoderConfig,
    CacheConfig,
    CacheDataConfig,
    CaptionedDataConfig,
    DataConfig,
    EditDataConfig,
    ImageDataConfig,
    InstructPix2PixConfig,
    TextToImageConfig,
    UnconditionalConfig,
    autoencoder,
    cache_latents,
    instruct_pix2pix,
    text_to_image,
    unconditional,
)
from diffusax.training.data.buckets import SIZE
from diffusax.training.data.examples import cut_images, mask_weights, write_caption
from diffusax.training.data.opening import open_data
from diffusax.training.step.denoising import squared_error


def grey(seed: int, size: tuple[int, int] = (40, 32)) -> Image.Image:
    return picture(seed, size).convert("L")


def transparent(seed: int) -> bytes:
    image = picture(seed)
    image.putalpha(grey(seed + 100))
    return png(image)


def masked_row(index: int) -> dict:
    return {**row(index), "mask": {"bytes": png(grey(index + 100)), "path": None}}


@pytest.mark.parametrize("normalized", [True, False])
def test_the_loss_is_weighted_by_the_masks_means_over_latents(normalized):
    """Upstream's is kohya's apply_masked_loss (library/custom_train_functions.py)."""
    rng = np.random.default_rng(0)
    masks = rng.integers(0, 256, (3, 48, 32), np.uint8)
    prediction, target = rng.standard_normal((2, 3, 12, 8, 4), np.float32)
    weights = np.stack([mask_weights(mask, 4, normalized=normalized) for mask in masks])
    assert weights.shape == (3, 12, 8)
    assert weights.dtype == np.float32
    ours = squared_error(prediction, target, weights)

    mask = torch.tensor(masks)[:, None].float() / 255
    mask = torch.nn.functional.interpolate(mask, size=(12, 8), mode="area")
    difference = torch.tensor(np.moveaxis(prediction - target, -1, 1))
    expected = (difference.square() * mask).mean((1, 2, 3))
    if normalized:
        expected = expected / mask.mean((1, 2, 3))
    np.testing.assert_allclose(ours, expected, rtol=1e-5)


def test_where_nothing_counts_the_loss_is_zero_and_of_white_it_is_as_without():
    black, white = np.zeros((8, 8), np.uint8), np.full((8, 8), 255, np.uint8)
    assert not mask_weights(black, 4, normalized=True).any()
    x, y = np.random.default_rng(0).standard_normal((2, 1, 2, 2, 4), np.float32)
    weights = mask_weights(white, 4, normalized=True)[None]
    np.testing.assert_array_equal(squared_error(x, y, weights), squared_error(x, y))


@pytest.mark.parametrize("kind", ["alpha", "column"])
def test_masks_are_cut_and_mirrored_as_their_images(kind):
    options = {"mask": "alpha"} if kind == "alpha" else {"mask_column": "mask"}
    config = ImageDataConfig(random_flip=True, **options)
    image, shades = picture(5), grey(3)
    if kind == "alpha":
        image.putalpha(shades)
    one = {"image": png(image), "mask": png(shades), SIZE: (16, 24)}

    def cut(config, seed, cell):
        return cut_images(config, 8, one, [cell], np.random.default_rng(seed), factor=4)

    plain = dataclasses.replace(config, mask="none", mask_column="")
    seen = set()
    for seed in range(12):
        (pixels,), sizes, extra = cut(config, seed, one["image"])
        (alone,), same, nothing = cut(plain, seed, one["image"])
        np.testing.assert_array_equal(pixels, alone)
        np.testing.assert_array_equal(sizes, same)
        assert not nothing
        assert pixels.shape == (16, 24, 3)
        weights = extra["loss_weights"]
        (mask,), _, _ = cut(plain, seed, one["mask"])
        np.testing.assert_allclose(weights, mask_weights(mask[..., 0], 4, normalized=True))
        seen.add(weights.tobytes())
    assert len(seen) > 4


def test_opaque_images_count_everywhere():
    config = ImageDataConfig(mask="alpha")
    _, _, extra = cut_images(config, 16, {}, [png(picture(0))], np.random.default_rng(0), factor=4)
    np.testing.assert_array_equal(extra["loss_weights"], np.ones((4, 4), np.float32))


def test_recipes_read_masks_and_an_autoencoder_says_that_it_does_not(checkpoint, tmp_path):
    rows = [{**masked_row(i), **edit_row(i)} for i in range(2)]
    write_parquet(tmp_path, rows)
    options = {"resolution": 32, "mask_column": "mask"}
    rng = np.random.default_rng(0)
    for make, config, data, shape in (
        (text_to_image, TextToImageConfig, CaptionedDataConfig, (8, 8)),
        (instruct_pix2pix, InstructPix2PixConfig, EditDataConfig, (8, 8)),
        (unconditional, UnconditionalConfig, ImageDataConfig, (32, 32)),
    ):
        model = {} if make is unconditional else {"model": str(checkpoint)}
        recipe = make(config(data=data(str(tmp_path), **options), **model))
        assert recipe.example(recipe.source[0], rng)["loss_weights"].shape == shape
    with pytest.raises(ValueError, match="an autoencoder's loss reads no masks"):
        autoencoder(
            AutoencoderConfig(model=str(checkpoint), data=ImageDataConfig(str(tmp_path), **options))
        )


MASKED = {
    "lines": ("mask", {"all.jsonl": None}),
    "folders": ("areas", {"1.txt": "a", "control/1.png": 1, "areas/1.png": 3}),
    "beside": ("mask", {"1.txt": "a", "control/1.png": 1, "1_mask.png": 3}),
    "metadata": ("mask", {"metadata.jsonl": None}),
}


@pytest.mark.parametrize("layout", MASKED)
def test_masks_of_edits_may_lie_beside_the_edited_images(tmp_path, layout):
    column, files = MASKED[layout]
    for name, content in {"1.png": 2, **files}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if isinstance(content, int):
            picture(content, (32, 32)).save(tmp_path / name)
        elif content is not None:
            (tmp_path / name).write_text(content)
    if layout in ("lines", "metadata"):
        for name, number in (("0.png", 1), ("2.png", 3)):
            picture(number, (32, 32)).save(tmp_path / name)
        line = '{"image_path": "1.png", "control_path": "0.png", "mask": "2.png", "caption": "a"}'
        if layout == "metadata":
            line = '{"edited_image_file_name": "1.png", "input_image_file_name": "0.png", '
            line += '"mask_file_name": "2.png", "edit_prompt": "a"}'
        (tmp_path / next(iter(files))).write_text(line)
    config = EditDataConfig(str(tmp_path), mask_column=column, random_flip=False)
    source = open_data(config, ("input_image", "edit_prompt", "edited_image"))
    assert len(source) == 1
    row = source[0]
    cells = [row["edited_image"], *row["input_image"]]
    pixels, _, weights = cut_images(config, 32, row, cells, np.random.default_rng(0), factor=8)
    np.testing.assert_array_equal(pixels[0], np.asarray(picture(2, (32, 32))))
    np.testing.assert_array_equal(pixels[1], np.asarray(picture(1, (32, 32))))
    grey = np.asarray(picture(3, (32, 32)).convert("L"))
    np.testing.assert_array_equal(weights["loss_weights"], mask_weights(grey, 8, normalized=True))
    for name in ("areas/1.png", "1_mask.png", "2.png"):
        (tmp_path / name).unlink(missing_ok=True)
    with pytest.raises(ValueError, match=r"has no mask of its name|which is not there"):
        open_data(config, ("input_image", "edit_prompt", "edited_image"))


@pytest.mark.slow
def test_a_cache_holds_the_weights_of_masks(checkpoint, tmp_path):
    rows = [{**row(i), "image": {"bytes": transparent(i), "path": None}} for i in range(4)]
    write_parquet(tmp_path / "rows", rows)
    options = {"resolution": 32, "center_crop": True, "mask": "alpha"}
    output = str(tmp_path / "cache")
    data = CacheDataConfig(str(tmp_path / "rows"), **options)
    cache_latents(CacheConfig(model=str(checkpoint), data=data, output=output, batch_size=3))
    results = []
    for given in (
        CaptionedDataConfig(str(tmp_path / "rows"), **options),
        CaptionedDataConfig(output),
    ):
        config = TextToImageConfig(
            model=str(checkpoint), data=given, compute_dtype="float32", caption_dropout=0.0
        )
        recipe = text_to_image(config)
        rng = np.random.default_rng(0)
        elements = [recipe.example(recipe.source[i], rng) for i in (2, 0, 3)]
        batch = {name: np.stack([e[name] for e in elements]) for name in elements[0]}
        keys = jax.vmap(jax.random.key)(np.arange(3))
        loss = jax.jit(recipe.denoising)
        results.append(loss(recipe.trained(), recipe.frozen(), batch, keys))
        without = {name: value for name, value in batch.items() if name != "loss_weights"}
        plain = loss(recipe.trained(), recipe.frozen(), without, keys)
        assert np.abs(results[-1] / plain - 1).min() > 1e-4
    np.testing.assert_allclose(*results, rtol=1e-5)


def write(caption, seed: int = 0, **options) -> str:
    return write_caption(CaptionedDataConfig(**options), caption, np.random.default_rng(seed))


def test_tags_are_shuffled_but_for_those_that_stay():
    tags = "1girl, solo ,red hair,  smile, sky"
    assert write(tags) == tags
    found = [write(tags, seed, shuffle_tags=True, keep_tags=2) for seed in range(20)]
    assert len(set(found)) > 3
    for caption in found:
        first, second, *others = caption.split(", ")
        assert (first, second) == ("1girl", "solo")
        assert sorted(others) == ["red hair", "sky", "smile"]
    assert write(tags, 3, shuffle_tags=True) == write(tags, 3, shuffle_tags=True)
    barred = write("a|b|c", 1, shuffle_tags=True, tag_separator="|", keep_tags=9)
    assert barred == "a| b| c"
    assert write("a,, b, ", 1, shuffle_tags=True, keep_tags=9) == "a, b"


def test_a_trigger_stands_before_each_caption_and_never_moves():
    assert write("a dog", trigger="sks") == "sks, a dog"
    assert write("", trigger="sks") == "sks"
    several = {write(["a", "b"], seed, trigger="sks") for seed in range(20)}
    assert several == {"sks, a", "sks, b"}
    shuffled = {write("a, b", seed, trigger="sks", shuffle_tags=True) for seed in range(20)}
    assert shuffled == {"sks, a, b", "sks, b, a"}


def test_a_folder_with_text_files_has_them_as_captions(checkpoint, tmp_path):
    for i in range(2):
        picture(i).save(tmp_path / f"{i}.png")
        (tmp_path / f"{i}.txt").write_text(f"number {i}, a square\n")
    config = TextToImageConfig(
        model=str(checkpoint), data=CaptionedDataConfig(str(tmp_path), trigger="sks")
    )
    recipe = text_to_image(config)
    ids = recipe.example(recipe.source[1], np.random.default_rng(0))["input_ids"]
    np.testing.assert_array_equal(ids, recipe.base.tokenize("sks, number 1, a square")["input_ids"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_normalized": False}, "mask_normalized=false does nothing without data.mask or"),
        ({"keep_tags": 2, "trigger": "sks"}, "keep_tags=2 does nothing without data.shuffle_tags"),
        ({"tag_separator": ";"}, "tag_separator=';' does nothing without data.shuffle_tags or"),
    ],
)
def test_options_that_do_nothing_are_refused(pictures, options, message):
    with pytest.raises(ValueError, match=f"data.{message}"):
        open_data(CaptionedDataConfig(str(pictures), **options), ("image", "text"))


def test_options_of_captions_are_refused_where_nothing_reads_them(checkpoint, edits, tmp_path):
    data = CacheDataConfig(str(edits), trigger="sks")
    with pytest.raises(ValueError, match="trigger is nothing that recipe=instruct-pix2pix"):
        cache_latents(CacheConfig(model=str(checkpoint), data=data, recipe="instruct-pix2pix"))
    (tmp_path / "cache.json").write_text(json.dumps({"shapes": {}}))
    data = CaptionedDataConfig(str(tmp_path), trigger="sks", buckets=("8x8",))
    with pytest.raises(ValueError, match=r"data\.buckets and data\.trigger can do nothing"):
        text_to_image(TextToImageConfig(model=str(checkpoint), data=data))


@pytest.mark.parametrize(
    ("columns", "line", "message"),
    [
        (
            ("image", "text"),
            "",
            "nothing of 'mask'; name each by mask_file_name in a",
        ),
        (("image",), "", "name each by mask_file_name in a metadata.jsonl"),
        (
            ("image",),
            '{"file_name": "a.png", "mask": "b.png"}',
            "its images by mask_file_name",
        ),
    ],
)
def test_a_folder_without_masks_says_how_they_are_named(tmp_path, columns, line, message):
    picture(0).save(tmp_path / "a.png")
    if line:
        (tmp_path / "metadata.jsonl").write_text(line)
    with pytest.raises(ValueError, match=message):
        open_data(DataConfig(str(tmp_path), mask_column="mask"), columns)


def test_a_mask_that_is_no_image_makes_a_row_broken():
    config = ImageDataConfig(mask_column="mask")
    with pytest.raises(ValueError, match="cannot read the image"):
        cut_images(config, 8, {"mask": b"x"}, [png(picture(0))], np.random.default_rng(0))
