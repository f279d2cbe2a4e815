"""Sizes of buckets, which image has which, and the order of batches of one size."""

import dataclasses
import json
import logging
import pickle

import numpy as np
import pytest
from PIL import Image
from support.data_sets import picture, png, row, write_parquet

from diffusax.images.reading import open_upright, upright_size
from diffusax.training import CaptionedDataConfig, DataConfig
from diffusax.training.data.batches import Batches
from diffusax.training.data.buckets import (
    SIZE,
    BucketedSource,
    BucketOrder,
    Buckets,
    nearest_sizes,
    parse_sizes,
    sizes_of_area,
)
from diffusax.training.data.examples import prepare_images
from diffusax.training.data.opening import open_images

SIZES = ((16, 16), (8, 24), (24, 8))


class Numbered:
    """Rows that hold their own index; some of them broken."""

    def __init__(self, rows: int, broken: tuple[int, ...] = ()):
        self.rows, self.broken = rows, broken

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        if index in self.broken:
            raise OSError("cannot be read")
        return {"x": np.int64(index)}

    def name(self, index):
        return f"row {index}"


def prepare(row, rng):
    return {"x": row["x"], "pixels": np.zeros(row[SIZE]), "noise": rng.standard_normal(2)}


def unsized(row, rng):
    return prepare({SIZE: SIZES[0], **row}, rng)


def bucketed(rows: int, sizes=SIZES, broken=(), unreadable=()) -> BucketedSource:
    of_row = np.random.default_rng(0).integers(len(sizes), size=rows).astype(np.int16)
    of_row[list(unreadable)] = -1
    return BucketedSource(Numbered(rows, broken), Buckets(tuple(sizes), of_row))


def batches(source, n=4, **options) -> Batches:
    function = prepare if isinstance(source, BucketedSource) else unsized
    return Batches(source, function, batch_size=n, **{"seed": 0, **options})


def take(run, count: int) -> list[dict[str, np.ndarray]]:
    return [next(run) for _ in range(count)]


def assert_same(run, expected) -> None:
    for batch, other in zip(run, expected, strict=True):
        assert batch.keys() == other.keys()
        for name, value in batch.items():
            np.testing.assert_array_equal(value, other[name])


def test_sizes_of_an_area_are_kohyas():
    tall = [(1024, 256), (768, 320), (704, 320), (640, 384), (576, 448)]
    tall += [(960, 256), (896, 256), (832, 256)]
    expected = {(512, 512), *tall, *((w, h) for h, w in tall)}
    assert set(sizes_of_area(512, 64)) == expected
    assert all(h % 64 == w % 64 == 0 and h * w <= 1000**2 for h, w in sizes_of_area(1000, 64))
    with pytest.raises(ValueError, match=r"bucket_step=64 must not be above data.resolution=32"):
        sizes_of_area(32, 64)


def test_each_image_gets_the_size_with_the_nearest_ratio():
    sizes = ((512, 512), (256, 256), (384, 640), (640, 384))
    images = np.array([[900, 900], [200, 210], [100, 170], [170, 100], [1, 9000], [0, 0]])
    assert nearest_sizes(sizes, images).tolist() == [0, 1, 2, 3, 2, -1]


def test_sizes_are_written_width_first():
    assert parse_sizes(["640x384, 512x512", "512x512"]) == ((384, 640), (512, 512))
    with pytest.raises(ValueError, match=r"WIDTHxHEIGHT, such as 448x576 \(got '64x0'\)"):
        parse_sizes(["64x0"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": ("8x8",), "bucket_step": 8}, "leave one of them out"),
        ({"buckets": ("8x8",), "resolution": 64}, "resolution=64 does nothing beside data.buckets"),
        ({"buckets": ("8x8",), "own_part": True}, "own_part cannot be with buckets"),
        ({"bucket_step": 8, "streaming": True}, "give data.width_column and data.height_column"),
        ({"width_column": "w"}, "give both data.width_column and data.height_column"),
        ({"width_column": "w", "height_column": "h"}, "only read for data.buckets"),
        (
            {
                **{"width_column": "w", "height_column": "h", "bucket_step": 8},
                **{"streaming": True, "streaming_window": 2},
            },
            "streaming_window=2 cannot be with buckets",
        ),
        ({"mask": "alpha", "mask_column": "mask"}, "are two masks"),
    ],
)
def test_options_that_do_not_go_together_are_one_sentence(options, message):
    with pytest.raises(ValueError, match=message):
        DataConfig("pictures", **options)


@pytest.mark.parametrize("batch_size", [1, 3, 16])
def test_batches_come_when_their_last_row_does_and_the_rest_is_carried_over(batch_size):
    """Against the rule, followed step by step."""
    of_row = np.array([0, 1, 1, 2, 1, 0, 1, -1, 1, 0, 1], np.int16)
    rng = np.random.default_rng(0)
    rows = np.concatenate([rng.permutation(len(of_row)) for _ in range(40)])
    waiting, expected = {0: [], 1: [], 2: []}, []
    for place, chosen in enumerate(rows):
        bucket = of_row[chosen]
        if bucket < 0:
            continue
        waiting[bucket].append(place)
        if len(waiting[bucket]) == batch_size:
            expected.append((bucket, waiting[bucket]))
            waiting[bucket] = []
    order = BucketOrder(Buckets(SIZES, of_row), rows, batch_size)
    for number in range(len(expected)):
        bucket, places = order.batch(number)
        assert (bucket, places.tolist()) == expected[number]
    # Any batch is found without those before it.
    for number in rng.integers(len(expected), size=8):
        bucket, places = pickle.loads(pickle.dumps(order)).batch(int(number))
        assert (bucket, places.tolist()) == expected[number]


def test_one_size_gives_the_batches_of_no_buckets():
    expected = take(batches(Numbered(20)), 12)
    assert_same(take(batches(bucketed(20, SIZES[:1])), 12), expected)


def test_each_row_comes_once_an_epoch_in_batches_of_one_size():
    source = bucketed(50)
    run = batches(source)
    seen = {size: [] for size in source.buckets.sizes}
    for _ in range(60):
        batch = next(run)
        size = batch["pixels"].shape[1:]
        assert run.bucket == f"{size[1]}x{size[0]}"
        seen[size] += batch["x"].tolist()
    for bucket, rows in enumerate(seen.values()):
        own = np.flatnonzero(source.buckets.of_row == bucket).tolist()
        epochs = [rows[i : i + len(own)] for i in range(0, len(rows) - len(own), len(own))]
        assert len(epochs) > 3
        assert all(sorted(epoch) == own for epoch in epochs)
        assert epochs[0] != epochs[1]


def test_processes_step_through_the_same_sizes_and_share_the_batches_of_one():
    expected = take(batches(bucketed(30), 6), 20)
    parts = [take(batches(bucketed(30), 3, process_index=i, process_count=2), 20) for i in range(2)]
    for whole, *halves in zip(expected, *parts, strict=True):
        for name, value in whole.items():
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), value)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_continues_in_the_middle_of_an_epoch_whatever_the_workers(workers):
    run = batches(bucketed(30))
    take(run, 11)
    state = json.loads(json.dumps(run.get_state()))
    expected = take(run, 9)
    if not workers:
        again = batches(bucketed(30))
        again.set_state(state)
        assert_same(take(again, 9), expected)
        return
    several = batches(bucketed(30), workers=workers)
    take(several, 11)
    state = json.loads(json.dumps(several.get_state()))
    assert_same(take(several, 9), expected)
    several.close()
    again = batches(bucketed(30), workers=workers)
    again.set_state(state)
    assert_same(take(again, 9), expected)
    again.close()


def test_continues_with_another_batch_size_at_a_whole_batch():
    run = batches(bucketed(30), 4)
    take(run, 5)
    again = batches(bucketed(30), 3)
    again.set_state(run.get_state())
    # Twenty examples are six batches of three, and two more.
    assert_same(take(again, 9), take(batches(bucketed(30), 3), 15)[6:])


def test_another_row_of_the_size_stands_in_for_a_broken_one(caplog):
    whole, source = bucketed(400), bucketed(400, broken=(5,))
    run, expected = batches(source, 20), take(batches(whole, 20), 20)
    with caplog.at_level(logging.WARNING):
        found = take(run, 20)
    (other, *_) = source.buckets.others(5)
    changed = 0
    for batch, like in zip(found, expected, strict=True):
        assert batch["pixels"].shape == like["pixels"].shape
        replaced = np.where(like["x"] == 5, other, like["x"])
        np.testing.assert_array_equal(batch["x"], replaced)
        changed += (like["x"] == 5).sum()
    assert run.tally.broken == changed == 1
    assert any("skipped row 5" in message for message in caplog.messages)


def test_where_none_of_a_size_can_be_read_the_run_stops():
    source = BucketedSource(Numbered(300, (3,)), Buckets(SIZES, np.eye(1, 300, 3, np.int16)[0]))
    with pytest.raises(ValueError, match="no image of 24x8 can be read; the last is row 3"):
        take(batches(source, 1), 300)


def test_an_example_is_one_of_the_largest():
    run = batches(bucketed(20, ((8, 8), (24, 24), (8, 24))))
    assert run.bucket == "24x24"
    assert run.example()["pixels"].shape == (24, 24)


def test_sizes_are_read_from_headers_once_and_upright(tmp_path, monkeypatch):
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = picture(0, (40, 20))
    for name in ("a.png", "b.jpg"):
        turned.save(tmp_path / name, exif=exif)
        assert upright_size(tmp_path / name) == open_upright(tmp_path / name).size[::-1] == (40, 20)
    plain = picture(0, (20, 40))
    plain.save(tmp_path / "c.webp")
    (tmp_path / "metadata.jsonl").write_text(
        "\n".join(json.dumps({"file_name": n, "text": n}) for n in ("a.png", "b.jpg", "c.webp"))
    )
    config = CaptionedDataConfig(str(tmp_path), buckets=("16x8", "8x16"))
    columns = {"image_column": "image", "side": 16, "factor": 4}
    source = open_images(config, ("image", "text"), **columns)
    assert source.buckets.of_row.tolist() == [1, 1, 1]
    assert source[0][SIZE] == (16, 8)
    monkeypatch.setattr("diffusax.training.data.image_sizes.upright_size", None)
    assert open_images(config, ("image", "text"), **columns).buckets.of_row.tolist() == [1, 1, 1]


def test_a_damaged_or_missing_cache_of_sizes_costs_a_warning(tmp_path, monkeypatch, caplog):
    picture(0, (20, 40)).save(tmp_path / "a.png")
    (tmp_path / "a.txt").write_text("a")
    cache = tmp_path / "cache"
    monkeypatch.setenv("DIFFUSAX_CACHE", str(cache))
    config = CaptionedDataConfig(str(tmp_path), buckets=("16x8", "8x16"))
    columns = {"image_column": "image", "side": 16, "factor": 4}

    def warnings_about_sizes():
        caplog.clear()
        assert open_images(config, ("image", "text"), **columns).buckets.of_row.tolist() == [1]
        return [text for text in caplog.messages if "sizes" in text]

    cache.touch()
    assert ["not kept" in text for text in warnings_about_sizes()] == [True]
    cache.unlink()
    assert not warnings_about_sizes()
    (kept,) = (cache / "sizes").iterdir()
    kept.write_bytes(kept.read_bytes()[:20])
    assert ["made anew" in text for text in warnings_about_sizes()] == [True]
    assert not warnings_about_sizes()


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_sizes_may_stand_in_columns(tmp_path, kind):
    rows = [{**row(i), "w": 10 + 30 * (i % 2), "h": 20} for i in range(4)]
    if kind == "parquet":
        write_parquet(tmp_path, rows)
    else:
        lines = []
        for i, one in enumerate(rows):
            picture(i).save(tmp_path / f"{i}.png")
            own = {"file_name": f"{i}.png", "text": "x", "w": str(one["w"]), "h": one["h"]}
            lines.append(json.dumps(own))
        (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    config = CaptionedDataConfig(
        str(tmp_path), bucket_step=8, resolution=16, width_column="w", height_column="h"
    )
    columns = {"image_column": "image", "side": 16, "factor": 4}
    source = open_images(config, ("image", "text"), **columns)
    named = [source.buckets.name(i) for i in source.buckets.of_row]
    assert named == ["8x24", "24x8"] * 2
    wrong = dataclasses.replace(config, width_column="nix")
    with pytest.raises(ValueError, match="has no column 'nix'"):
        open_images(wrong, ("image", "text"), **columns)


def test_images_that_cannot_be_read_are_named_and_left_out(tmp_path, caplog):
    rows = [row(i) for i in range(120)]
    rows[7]["image"]["bytes"] = b"no picture"
    write_parquet(tmp_path, rows)
    config = CaptionedDataConfig(str(tmp_path), buckets=("16x16",))
    columns = {"image_column": "image", "side": 16, "factor": 4}
    with caplog.at_level(logging.WARNING):
        source = open_images(config, ("image", "text"), **columns)
    assert any("row 7" in message for message in caplog.messages)
    assert source.buckets.counts.tolist() == [119]
    rows[9]["image"]["bytes"] = b""
    write_parquet(tmp_path / "two", rows)
    with pytest.raises(ValueError, match="2 of 10 rows are broken"):
        open_images(dataclasses.replace(config, path=str(tmp_path / "two")), ("image",), **columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"buckets": ("18x16",)},
            r"divisible by 4, the pixels per latent \(got 18x16\); use 16x16",
        ),
        ({"bucket_step": 6}, r"bucket_step must be divisible by 4.*\(got 6\); use 8"),
    ],
)
def test_sizes_have_whole_latents(pictures, options, message):
    config = CaptionedDataConfig(str(pictures), **options)
    with pytest.raises(ValueError, match=message):
        open_images(config, ("image", "text"), image_column="image", side=16, factor=4)


@pytest.mark.parametrize("size", [(24, 40), (40, 24), (16, 16)])
def test_images_cover_their_size_and_time_ids_are_upstreams(size):
    """The formula of train_text_to_image_sdxl.py, compute_time_ids, with a size of its own."""
    high, wide = size
    image = picture(0, (90, 50))
    for seed in range(6):
        (pixels,), sizes = prepare_images(
            [image],
            np.random.default_rng(seed),
            resolution=size,
            center_crop=bool(seed % 2),
            random_flip=True,
        )
        scale = max(high / 50, wide / 90)
        whole = image.resize(
            (max(wide, round(90 * scale)), max(high, round(50 * scale))), Image.Resampling.LANCZOS
        )
        assert whole.width == wide or whole.height == high
        original_size, target_size = (image.height, image.width), (high, wide)
        matches = []
        for flipped in (whole, whole.transpose(Image.Transpose.FLIP_LEFT_RIGHT)):
            y1, x1 = (int(n) for n in sizes[2:4])
            crop = np.asarray(flipped)[y1 : y1 + high, x1 : x1 + wide]
            matches.append(np.array_equal(crop, pixels))
        assert any(matches)
        assert sizes.tolist() == list(original_size + (y1, x1) + target_size)


def test_bytes_and_files_have_the_same_size(tmp_path):
    picture(0, (30, 20)).save(tmp_path / "a.png")
    assert upright_size(tmp_path / "a.png") == upright_size(png(picture(0, (30, 20)))) == (20, 30)
    with pytest.raises(ValueError, match="is not an image that Pillow knows"):
        upright_size(b"no picture")
