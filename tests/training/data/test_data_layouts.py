"""What is read of the folders that people have, and what is refused with a place and a mend."""

import io
import json
import logging
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image, ImageCms
from support.data_sets import picture, png, row

from diffusax.training.data.opening import open_data
from diffusax.training.data.options import CaptionedDataConfig, ControlDataConfig
from diffusax.training.recipes.class_images import class_source
from diffusax.training.recipes.dreambooth import DreamBoothDataConfig

COLUMNS = ("image", "text")
PNG = png(picture(0, size=(8, 8)))


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path_factory):
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture
def said(caplog):
    """What was logged, as one text."""
    caplog.set_level(logging.INFO, "diffusax.training")
    return lambda: "\n".join(caplog.messages)


def write(folder: Path, files: dict) -> Path:
    """Writes images for None, text, bytes, JSON for dicts, and Parquet for lists of captions."""
    for name, content in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            rows = [{"image": {"bytes": PNG, "path": None}, "text": text} for text in content]
            pq.write_table(pa.Table.from_pylist(rows), file)
        elif isinstance(content, dict):
            file.write_text(json.dumps(content), "utf-8")
        elif isinstance(content, str):
            file.write_bytes(content.encode())
        else:
            file.write_bytes(PNG if content is None else content)
    return folder


def found(folder: Path, config=CaptionedDataConfig, columns=COLUMNS, **options) -> list:
    """The captions of a data set in order."""
    source = open_data(config(str(folder), **options), columns)
    return [source[i].get("text") for i in range(len(source))]


def lines(*rows: dict) -> str:
    return "".join(json.dumps(one) + "\n" for one in rows)


CARD = """---
configs:
- config_name: red
  default: true
  data_files:
  - split: train
    path: x/*.parquet
  - split: dev
    path: [y/0.parquet]
- config_name: green
  data_files: z/**
---
"""
SHARDS = {
    "in data": {"data/train-00000-of-00001.parquet": ["a"], "data/odd-00000-of-00001.parquet": []},
    "folders": {"train/0.parquet": ["a"], "test/train.parquet": ["b"], "validation/0.parquet": []},
    "names": {"train.parquet": ["a"], "my-dev.parquet": ["b"], "valid_0.parquet": ["c"]},
    "other words": {"training-0.parquet": ["a"], "evaluation 1.parquet": ["b"]},
    "upper case": {"Train/0.parquet": ["a"], "TEST/0.parquet": ["b"]},
    "card": {"README.md": CARD, "x/test.parquet": ["a"], "y/0.parquet": ["b"], "z/0.parquet": []},
    "metadata": {
        "train/metadata.jsonl": lines({"file_name": "1.png", "text": "a"}),
        "test/metadata.csv": "file_name,text\n1.png,b\n",
        "train/1.png": None,
        "test/1.png": None,
    },
    "one metadata": {
        "metadata.jsonl": lines(
            {"file_name": "val/1.png", "text": "b"}, {"file_name": "train/1.png", "text": "a"}
        ),
        "train/1.png": None,
        "val/1.png": None,
    },
    "images": {"train/1.png": None, "train/1.txt": "a", "test/1.png": None, "test/1.txt": "b"},
    "images by name": {"train_1.png": None, "train_1.txt": "a", "test_1.png": None},
}


@pytest.mark.parametrize("name", SHARDS)
def test_of_a_data_set_with_splits_train_is_read_and_the_others_are_named(tmp_path, said, name):
    assert found(write(tmp_path, SHARDS[name])) == ["a"]
    assert "the split is train; files of other splits: " in said()


@pytest.mark.parametrize(
    ("name", "split", "expected"),
    [
        ("folders", "test", ["b"]),
        ("names", "validation", ["b", "c"]),
        ("names", "dev", ["b", "c"]),
        ("names", "train+validation", ["b", "a", "c"]),
        ("names", "all", ["b", "a", "c"]),
        ("card", "dev", ["b"]),
        ("metadata", "test", ["b"]),
        ("one metadata", "validation", ["b"]),
        ("images", "all", ["b", "a"]),
    ],
)
def test_a_split_can_be_chosen_by_any_of_its_words(tmp_path, name, split, expected):
    assert found(write(tmp_path, SHARDS[name]), split=split) == expected


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        (SHARDS["names"], {"split": "odd"}, r"no split 'odd' \(it has train, validation\)"),
        (SHARDS["names"], {"split": "train[:1]"}, r"no split 'train\[:1\]' \(it has train"),
        ({"test.parquet": ["b"]}, {}, r"no split 'train' \(it has test\)"),
        ({"x.parquet": ["b"]}, {"split": "test"}, r"no split 'test': nothing in its card"),
        (SHARDS["card"], {"subset": "blue"}, r"no subset 'blue' in its card \(it has red, green\)"),
        (
            {**SHARDS["card"], "README.md": CARD.replace("default", "other")},
            {},
            "has the subsets red, green, of which none is the default; give one as data.subset",
        ),
        (
            {"README.md": CARD, "z/0.parquet": ["a"]},
            {},
            "has none of the files that its card names for it; it has those of green: give one",
        ),
    ],
)
def test_a_split_that_is_not_there_is_named_with_those_that_are(tmp_path, files, options, message):
    with pytest.raises(ValueError, match=message):
        found(write(tmp_path, files), **options)


def test_a_glob_is_read_as_a_whole_unless_a_split_is_asked_for(tmp_path):
    write(tmp_path, {"train-0.parquet": ["a"], "test-0.parquet": ["b"]})
    assert found(tmp_path / "*.parquet") == ["b", "a"]
    assert found(tmp_path / "*.parquet", split="train") == ["a"]


def test_files_of_no_split_are_named(tmp_path, said):
    write(tmp_path, {"train.parquet": ["a"], "more.parquet": ["b"]})
    assert found(tmp_path) == ["a"]
    assert "1 files belong to no split and are not read, such as more.parquet" in said()


def test_names_of_images_alone_tell_no_splits(tmp_path, said):
    write(tmp_path, {"train at noon.png": None, "a cat.png": None, "eval/a dog.png": None})
    assert found(tmp_path) == ["a cat", "a dog", "train at noon"]
    assert "test (1 images) look like splits" in said()


def test_what_datasets_saves_to_disk_is_read(tmp_path):
    for split, text in (("train", "a"), ("odd", "b")):
        folder = tmp_path / split
        folder.mkdir()
        table = pa.Table.from_pylist([{**row(0), "text": text}])
        for name, writer in (
            ("data-00000-of-00001", pa.ipc.new_stream),
            ("cache-1", pa.ipc.new_file),
        ):
            with writer(str(folder / f"{name}.arrow"), table.schema) as opened:
                opened.write_table(table)
    write(tmp_path, {"dataset_dict.json": {"splits": ["train", "odd"]}})
    assert found(tmp_path) == ["a"]
    assert found(tmp_path, split="odd") == ["b"]


CAPTIONS = {
    ".TXT": ({"1.png": None, "1.TXT": "a"}, ["a"]),
    ".caption": ({"1.png": None, "1.caption": "a"}, ["a"]),
    "after the suffix": ({"1.png": None, "1.png.txt": "a"}, ["a"]),
    ".txt before .caption": ({"1.png": None, "1.txt": "a", "1.caption": "b"}, ["a"]),
    "img2dataset": (
        {
            "00/1.jpg": None,
            "00/1.json": {"caption": "a", "url": "http://", "exif": "{}"},
            "00.parquet": [],
            "00_stats.json": {"count": 1},
        },
        ["a"],
    ),
    "tags in JSON": ({"1.png": None, "1.json": {"tags": ["cat", "sofa"]}}, ["cat, sofa"]),
    "captions": ({"images/1.png": None, "captions/1.txt": "a"}, ["a"]),
    "captions inside": ({"in/1.png": None, "in/captions/1.txt": "a"}, ["a"]),
    "sd-scripts": ({"1.png": None, "meta.json": {"1": {"caption": "a", "tags": "b"}}}, ["a, b"]),
    "ai-toolkit": ({"1.png": None, "x.json": {"/home/me/1.png": {"caption": "a"}}}, ["a"]),
    "default.txt": ({"1.png": None, "2.png": None, "2.txt": "b", "default.txt": "a"}, ["a", "b"]),
    "10_sks dog": ({"10_sks dog/1.png": None, "10_sks dog/2.png": None}, ["sks dog"] * 2),
    "empty": ({"1.png": None, "1.txt": " \n"}, [""]),
    "first line": ({"1.png": None, "1.txt": "\r\na\u2028b\r\nc\r\n"}, ["a\u2028b"]),
    "semicolons": ({"1.png": None, "metadata.csv": "file_name;text\n1.png;a, b\n"}, ["a, b"]),
    "quotes": (
        {"1.png": None, "metadata.csv": '\ufefffile_name, text\r\n1.png, "a, b"\r\n'},
        ["a, b"],
    ),
    "upper case": ({"1.PNG": None, "METADATA.CSV": "file_name,text\n1.png,a\n"}, ["a"]),
    "Windows": ({"in/é.png": None, "metadata.csv": "file_name,text\nin\\e\u0301.png,a\n"}, ["a"]),
    "two of three": (
        {"1.png": None, "metadata.jsonl": lines({"file_name": "1.png", "text": "a"}) * 2},
        ["a", "a"],
    ),
}


@pytest.mark.parametrize("name", CAPTIONS)
def test_captions_are_read_where_other_programs_write_them(tmp_path, name):
    files, expected = CAPTIONS[name]
    assert found(write(tmp_path, files)) == expected


def test_a_metadata_parquet_is_metadata_and_no_shard(tmp_path):
    table = pa.Table.from_pylist([{"file_name": "1.png", "text": "a"}])
    write(tmp_path, {"1.png": None})
    pq.write_table(table, tmp_path / "metadata.parquet")
    assert found(tmp_path) == ["a"]


def test_captions_of_several_lines_are_read_by_one_rule_which_the_log_names(tmp_path, said):
    write(tmp_path, {"1.png": None, "1.txt": "a cat\n\n a dog \n"})
    assert found(tmp_path) == ["a cat"]
    assert "1 captions have several lines, such as 1.txt; the first is the caption" in said()
    assert found(tmp_path, caption_lines="any") == [["a cat", "a dog"]]
    assert found(tmp_path, caption_lines="all") == ["a cat a dog"]
    write(tmp_path, {"metadata.csv": "file_name,text\n1.png,a\n"})
    with pytest.raises(ValueError, match=r"data.caption_lines=all does nothing"):
        found(tmp_path, caption_lines="all")


ONE = {"1.png": None}


def csv(text: str) -> dict:
    return {"metadata.csv": text}


def meta(*rows: dict) -> dict:
    return {"metadata.jsonl": lines(*rows)}


def captioned(caption) -> dict:
    return meta({"file_name": "1.png", "text": caption})


REFUSED = [
    (csv("file_name,text\n1.png,1girl, solo\n"), 'line 2 has 3 values.*"1girl, solo"'),
    (csv("file_name,text\n\n1.png\n"), "line 3 has 1 value, and the header has 2"),
    (csv('file_name,text\n1.png,"a\n1.png,b\n'), "csv line 2: unexpected end of data"),
    (csv('file_name,text\n1.png,"a "b" c"\n'), "line 2: .* write each of its own twice"),
    (csv("file_name,text,text\n1.png,a,b\n"), "line 1 has two columns 'text'"),
    (csv("image,text\n1.png,a\n"), r"line 2 must be a row with a file_name.*image, text"),
    ({"metadata.jsonl": '{"file_name": "1.png", "a": 1, "a": 2}'}, "line 1: 'a' stands there"),
    ({"metadata.jsonl": '[\n{"file_name": "1.png"}]'}, "line 1: .* must be one JSON object"),
    (meta({"file_name": "1.png"}), "line 1 has no column 'text'"),
    (captioned(None), r"text must be .*\(got null\)"),
    (captioned(7), r"text must be .*\(got 7\)"),
    (captioned(["a", 7]), "line 1: text must be a"),
    (captioned([]), r"line 1: text must be a .*\(got \[\]\)"),
    (meta({"file_name": "2.png", "text": "a"}), "line 1 names '2.png', which is not there"),
    (
        meta({"file_name": "1.png", "image_file_name": "1.png", "text": "a"}),
        "has file_name and image_file_name for one column",
    ),
    ({"captions.csv": "a,b\n"}, "has captions.csv, which may hold captions"),
    ({"a.txt": "a", "b.txt": "b"}, "has a.txt and 1 more files, which may hold captions"),
    ({"list.json": '[{"image": "1.png", "caption": "a"}]'}, "has list.json, which may hold"),
    ({"a.json": {"1": "a"}, "b.json": {"1": "b"}}, "captions in a.json and b.json; leave one"),
    ({"1.json": '{"caption": '}, "1.json is not JSON"),
    ({"1.json": {"caption": 7}}, r"1.json: caption must be a text \(got 7\)"),
    ({"1.txt": "0 .5 .5 .1 .1\n1 .2 .2 .1 .1\n"}, "is no caption, but boxes"),
    ({"2.png": None, "1.txt": "a"}, r"2.png has no caption in a .txt .* \(1 of 2 images"),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_what_would_be_read_by_halves_is_an_error_at_the_start(tmp_path, files, message):
    with pytest.raises(ValueError, match=message) as error:
        found(write(tmp_path, {**ONE, **files}))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("text", [7], "column 'text' holds int64, not texts"),
        ("image", ["http://"], "column 'image' holds string, not images"),
        ("text", [None, "a"], "text is null in 1 of 2 rows"),
    ],
)
def test_columns_of_shards_that_hold_something_else_are_an_error_at_the_start(
    tmp_path, column, values, message
):
    table = {"image": [PNG] * len(values), "text": ["a"] * len(values), column: values}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    with pytest.raises(ValueError, match=message):
        found(tmp_path)


def test_a_few_files_that_are_not_there_are_left_out_and_named(tmp_path, said):
    rows = [{"file_name": "1.png", "text": str(i)} for i in range(100)]
    rows[7]["file_name"] = "2.png"
    write(tmp_path, {**ONE, "3.png": None, "metadata.jsonl": lines(*rows)})
    assert len(found(tmp_path)) == 99
    assert "line 8 names '2.png', which is not there (1 of 100 rows do so)" in said()
    assert "1 images are not read, as no line of the metadata names them, such as 3.png" in said()
    assert "1 images are named by several lines" in said()


def test_a_path_in_the_place_of_an_image_says_how_images_are_named(tmp_path):
    one = {"file_name": "1.png", "text": "a", "conditioning_image": "1.png"}
    write(tmp_path, {**ONE, "metadata.jsonl": lines(one)})
    with pytest.raises(ValueError, match="name its images by conditioning_image_file_name"):
        found(tmp_path, ControlDataConfig, (*COLUMNS, "conditioning_image"))


def test_captions_may_be_missing_where_an_instance_prompt_stands_for_them(tmp_path):
    rows = [{"file_name": "1.png", **more} for more in ({}, {"text": None}, {"text": "a"})]
    write(tmp_path, {**ONE, "metadata.jsonl": lines(*rows)})
    assert found(tmp_path, DreamBoothDataConfig, caption_column="text") == [None, None, "a"]


def test_a_missing_file_is_a_missing_caption(tmp_path, said):
    write(tmp_path, {**ONE, "2.png": None, "2.txt": "b"})
    assert found(tmp_path, DreamBoothDataConfig, caption_column="text") == [None, "b"]
    assert "1 from .txt files, 1 from nothing" in said()
    found(tmp_path, DreamBoothDataConfig, columns=("image",))
    assert "1 files such as 2.txt are not read, as no column of captions is asked for" in said()


def test_links_to_folders_are_followed_once(tmp_path):
    write(tmp_path / "elsewhere", {**ONE, "1.txt": "a"})
    (tmp_path / "data").mkdir()
    (tmp_path / "data/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere/back").symlink_to(tmp_path / "data")
    assert found(tmp_path / "data") == ["a"]


LEFTOVERS = [
    *("1-masklabel.png", "1-condlabel.png", "1_mask.png", "1.thumb.jpg", "masks/1.png", "._1.png"),
    *("_controls/1.depth.jpg", "samples/0001.png", ".ipynb_checkpoints/1.png", "__MACOSX/1.png"),
    *("@eaDir/1.png", "thumbnails/1.png"),
]


def test_what_other_programs_leave_is_no_image_no_caption_and_no_error(tmp_path, said):
    files = [
        "Thumbs.db",
        ".DS_Store",
        "1_sd.npz",
        "1_te_outputs.npz",
        "_latent_cache/1.safetensors",
    ]
    write(tmp_path, {**ONE, "1.txt": "a", **dict.fromkeys(LEFTOVERS), **dict.fromkeys(files, b"x")})
    assert found(tmp_path) == ["a"]
    assert "9 images are not read, as they look like masks" in said()
    assert "files that are not read" not in said()
    # A folder of nothing else is data.
    assert len(found(tmp_path / "samples")) == 1


def test_leftovers_are_no_pictures_of_a_class(tmp_path):
    write(tmp_path, {**ONE, "class-00000.png": None, **dict.fromkeys(LEFTOVERS)})
    source = class_source(tmp_path, 10, "image")
    assert [Path(source.name(i)).name for i in range(len(source))] == ["1.png", "class-00000.png"]


def test_a_run_begins_with_what_was_found(tmp_path, said):
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    srgb = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    images = [("RGB", (8, 16), profile), ("CMYK", (24, 8), srgb), ("L", (8, 8), None)]
    for i, (mode, size, icc) in enumerate(images):
        file = io.BytesIO()
        Image.new(mode, size).save(file, "JPEG", icc_profile=icc)
        write(tmp_path, {f"{i}.jpg": file.getvalue(), f"{i}.txt": "a cat" if i else ""})
    found(tmp_path)
    text = said()
    assert f"data: 3 rows of {tmp_path}; columns image, text" in text
    assert "data: text: 3 from .txt files, 1 empty; such as 'a cat'" in text
    assert "image: sizes 8x8 to 24x8; modes RGB 1, CMYK 1, L 1; 1 with a colour profile" in text


def test_a_large_data_set_is_looked_at_here_and_there(tmp_path, said, monkeypatch):
    monkeypatch.setattr("diffusax.training.data.summary.LOOKED_AT", 2)
    found(write(tmp_path, {"train.parquet": ["a", "", "c", "d", "e"]}))
    assert "data: image of 2 looked at: sizes 8x8; modes RGB 2" in said()


def test_other_processes_say_nothing(tmp_path, said, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    found(write(tmp_path, {"1.png": None, "1.txt": "a"}))
    assert "data:" not in said()
