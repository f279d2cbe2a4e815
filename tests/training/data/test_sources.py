"""Rows from Parquet, folders and the Hub."""

import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_sets import picture, png, row, write_image_folder, write_parquet
from support.hub_server import serve

from diffusax.training.data.examples import read_image
from diffusax.training.data.finding import open_source
from diffusax.training.data.image_files import IMAGE_SUFFIXES
from diffusax.training.data.sources import cache_folder

COLUMNS = ("image", "text")


def texts(source) -> list[str]:
    return [source[i]["text"] for i in range(len(source))]


@pytest.mark.parametrize("how", ["folder", "glob", "file"])
def test_parquet_shards_are_read_in_order(tmp_path, how):
    folder = write_parquet(tmp_path / "data", [row(i) for i in range(11)], shards=3)
    path = {"folder": folder, "glob": folder / "*.parquet", "file": folder / "train-00000.parquet"}
    source = open_source(str(path[how]), COLUMNS)
    expected = [f"number {i}" for i in range(3 if how == "file" else 11)]
    assert texts(source) == expected
    assert read_image(source[2]["image"]).tobytes() == picture(2).tobytes()
    assert source.name(2).endswith("train-00000.parquet row 2")


def test_only_the_columns_named_are_unpacked_and_only_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path / "cache"))
    rows = [{**row(i), "other": i} for i in range(4)]
    folder = write_parquet(tmp_path / "data", rows)
    assert set(open_source(str(folder), COLUMNS)[0]) == {"image", "text"}
    (unpacked,) = (cache_folder() / "arrow").iterdir()
    before = unpacked.stat().st_mtime_ns
    open_source(str(folder), COLUMNS)
    assert unpacked.stat().st_mtime_ns == before
    write_parquet(folder, rows[:3])
    os.utime(folder / "train-00000.parquet", ns=(1, 1))
    assert len(open_source(str(folder), COLUMNS)) == 3


def test_images_may_be_bytes_alone(tmp_path):
    table = pa.table({"image": [png(picture(0))], "text": ["a"]})
    pq.write_table(table, tmp_path / "x.parquet")
    source = open_source(str(tmp_path), COLUMNS)
    assert read_image(source[0]["image"]).tobytes() == picture(0).tobytes()


def test_a_folder_of_images_with_metadata(tmp_path):
    source = open_source(str(write_image_folder(tmp_path / "data", 5)), COLUMNS)
    assert texts(source) == [f"number {i}" for i in range(5)]
    assert read_image(source[3]["image"]).tobytes() == picture(3).tobytes()
    assert source.name(3).endswith("3.png")


def test_the_names_of_images_alone_are_their_captions(tmp_path):
    (tmp_path / "deep").mkdir()
    picture(0).save(tmp_path / "deep" / "red apple.png")
    picture(1).save(tmp_path / "a cat.png")
    assert texts(open_source(str(tmp_path), COLUMNS)) == ["a cat", "red apple"]


def test_sources_can_be_sent_to_worker_processes(tmp_path):
    source = open_source(str(write_parquet(tmp_path / "data", [row(i) for i in range(3)])), COLUMNS)
    assert texts(source) == texts(pickle.loads(pickle.dumps(source)))


@pytest.mark.parametrize("kind", ["parquet", "folder"])
def test_a_missing_column_is_named_with_those_there_are(tmp_path, kind):
    if kind == "parquet":
        write_parquet(tmp_path / "data", [row(0)])
    else:
        write_image_folder(tmp_path / "data", 1)
    with pytest.raises(ValueError, match=r"no column 'caption'; it has .*text"):
        open_source(str(tmp_path / "data"), ("image", "caption"))


def test_what_is_no_data_set_says_so(tmp_path):
    with pytest.raises(ValueError, match="neither Parquet files"):
        open_source(str(tmp_path), COLUMNS)
    for name in (str(tmp_path / "nothing"), "nopics", "a/b/c"):
        with pytest.raises(ValueError, match=f"no file or folder '{name}' here"):
            open_source(name, COLUMNS)
    with pytest.raises(ValueError, match="no file matches"):
        open_source(str(tmp_path / "*.parquet"), COLUMNS)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"broken.parquet is not a whole Parquet file"):
        open_source(str(tmp_path), COLUMNS)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"}', "line 2 must be a row with a file_name"),
        ('{"text": "a", "file_name": null}', "line 2 must be a row with a file_name"),
        ("7", "line 2 must be a row with a file_name"),
        ("[" * 100_000, "line 2: "),
        ("{", "line 2: "),
        ('{"file_name": "../../etc/passwd"}', "line 2: the path '../../etc/passwd' leads out of"),
        ('{"file_name": "/etc/passwd"}', "line 2: the path '/etc/passwd' leads out of"),
        ('{"file_name": "a/../../b.png"}', "leads out of"),
        ('{"file_name": "a\\u0000.png"}', "leads out of"),
    ],
)
def test_rows_of_metadata_that_cannot_be_are_named(tmp_path, line, message):
    first = '{"text": "a", "file_name": "b/../a.png"}'
    (tmp_path / "metadata.jsonl").write_text(f"{first}\n{line}\n")
    with pytest.raises(ValueError, match=re.escape(message)):
        open_source(str(tmp_path), COLUMNS)


def test_blank_lines_of_metadata_are_no_rows(tmp_path):
    line = '{"text": "a", "file_name": "a.png"}'
    picture(0).save(tmp_path / "a.png")
    (tmp_path / "metadata.jsonl").write_text(f"{line}\n\n{line}\n  \n")
    assert len(open_source(str(tmp_path), COLUMNS)) == 2


@pytest.mark.parametrize("name", ["a.png", "metadata.jsonl"])
def test_a_file_of_a_folder_is_no_data_set(tmp_path, name):
    write_image_folder(tmp_path, 1)
    picture(0).save(tmp_path / "a.png")
    with pytest.raises(ValueError, match=f"{name} is a file of a data set; give the folder"):
        open_source(str(tmp_path / name), COLUMNS)


def test_captions_may_hold_any_separator(tmp_path):
    captions = ["a\u2028b", "c\x85d", "e\x0bf", "g\x1ch"]
    for i in range(len(captions)):
        picture(i).save(tmp_path / f"{i}.png")
    rows = [{"file_name": f"{i}.png", "text": caption} for i, caption in enumerate(captions)]
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines), "utf-8")
    assert texts(open_source(str(tmp_path), COLUMNS)) == captions
    (tmp_path / "metadata.jsonl").unlink()
    lines = [f'{row["file_name"]},"{row["text"]}\n"' for row in rows]
    (tmp_path / "metadata.csv").write_text("\n".join(["file_name,text", *lines]), "utf-8")
    source = open_source(str(tmp_path), COLUMNS)
    assert texts(source) == [caption + "\n" for caption in captions]
    assert read_image(source[1]["image"]).tobytes() == picture(1).tobytes()


def test_captions_in_files_beside_the_pictures(tmp_path, caplog):
    for i, name in enumerate("abc"):
        picture(i).save(tmp_path / f"{name}.png")
    assert texts(open_source(str(tmp_path), COLUMNS)) == ["a", "b", "c"]
    assert any("names of the files serve as such" in message for message in caplog.messages)
    (tmp_path / "a.txt").write_text("a red apple\n")
    with pytest.raises(ValueError, match=r"b.png has no caption"):
        open_source(str(tmp_path), COLUMNS)
    assert len(open_source(str(tmp_path), ("image",))) == 3
    (tmp_path / "b.txt").write_text("two dogs")
    (tmp_path / "c.txt").write_text("the sea")
    assert texts(open_source(str(tmp_path), COLUMNS)) == ["a red apple", "two dogs", "the sea"]
    (tmp_path / "c.txt").write_bytes(bytes(2**21))
    with pytest.raises(ValueError, match=r"c.txt is no caption"):
        open_source(str(tmp_path), COLUMNS)


def test_a_mark_of_utf8_is_no_part_of_a_caption_and_other_encodings_are_named(tmp_path):
    picture(0).save(tmp_path / "a.png")
    caption = tmp_path / "a.txt"
    caption.write_text("a red apple", "utf-8-sig")
    assert texts(open_source(str(tmp_path), COLUMNS)) == ["a red apple"]
    for encoding in ("latin-1", "utf-16"):
        caption.write_text("une pomme très rouge", encoding)
        with pytest.raises(ValueError, match=r"a.txt is not text in UTF-8; save it as such"):
            open_source(str(tmp_path), COLUMNS)
    for name, text in (
        ("metadata.csv", "file_name,text\na.png,très rouge"),
        ("metadata.jsonl", '{"file_name": "a.png", "text": "très rouge"}'),
    ):
        (tmp_path / name).write_text(text, "latin-1")
        with pytest.raises(ValueError, match=f"{name} is not text in UTF-8; save it as such"):
            open_source(str(tmp_path), COLUMNS)


def test_hidden_files_and_the_runs_results_are_no_pictures_of_a_folder(tmp_path, caplog):
    names = ["a.JPG", "b/c.png", "run/validation/0001.png", ".ipynb_checkpoints/a.png", "._a.jpg"]
    for name in (*names, "d.tiff", "e.heic", "notes.md", "f.png/g.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        with (tmp_path / name).open("wb") as file:
            picture(0).save(file, "TIFF" if name.endswith("tiff") else "PNG")

    def found(output: str) -> list[str]:
        source = open_source(str(tmp_path), ("image",), leave_out=output)
        assert all(read_image(source[i]["image"]).size for i in range(len(source)))
        return [Path(source.name(i)).relative_to(tmp_path).as_posix() for i in range(len(source))]

    assert found(str(tmp_path / "run")) == ["a.JPG", "b/c.png", "d.tiff", "f.png/g.png"]
    (said,) = [message for message in caplog.messages if "not read" in message]
    assert said.endswith("has files that are not read: .heic 1, .md 1")
    assert "run/validation/0001.png" in found(str(tmp_path / "runs"))
    assert len(found(str(tmp_path.parent))) == 5
    with pytest.raises(ValueError, match="is the data set and the run's output"):
        found(str(tmp_path / "b" / ".."))


@pytest.mark.skipif(".avif" not in IMAGE_SUFFIXES, reason="this Pillow reads no AVIF")
def test_pictures_may_be_avif(tmp_path):
    picture(0).save(tmp_path / "a.avif")
    assert read_image(open_source(str(tmp_path), ("image",))[0]["image"]).size == picture(0).size


def test_hidden_parquet_files_are_no_shards(tmp_path):
    write_parquet(tmp_path, [row(0)])
    (tmp_path / "._train-00000.parquet").write_bytes(b"of a Mac")
    assert len(open_source(str(tmp_path), COLUMNS)) == 1


@pytest.mark.parametrize("path", ["../out.png", "/etc/passwd"])
def test_pictures_beside_a_parquet_file_stay_in_its_folder(tmp_path, path):
    folder = tmp_path / "data"
    folder.mkdir()
    picture(0).save(folder / "in.png")
    picture(1).save(tmp_path / "out.png")
    cells = [{"bytes": None, "path": name} for name in ("in.png", path)]
    pq.write_table(pa.table({"image": cells, "text": ["a", "b"]}), folder / "x.parquet")
    source = open_source(str(folder), COLUMNS)
    assert read_image(source[0]["image"]).tobytes() == picture(0).tobytes()
    with pytest.raises(ValueError, match="leads out of the data set's folder"):
        source[1]


def test_without_a_home_folder_the_cache_goes_where_the_variable_says(monkeypatch):
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setenv("DIFFUSAX_CACHE", "/there")
    assert cache_folder() == Path("/there")
    monkeypatch.delenv("DIFFUSAX_CACHE")
    with pytest.raises(ValueError, match="set DIFFUSAX_CACHE"):
        cache_folder()


def test_a_hub_data_set_is_fetched(tmp_path):
    shard = write_parquet(tmp_path / "made", [row(i) for i in range(3)]) / "train-00000.parquet"
    files = dict.fromkeys(("data/train.parquet", "data/test.parquet"), shard.read_bytes())
    files |= {"README.md": b"card", "model.bin": b"no"}
    program = """
        from diffusax.training.data.finding import open_source
        source = open_source("someone/pictures", ("image", "text"))
        print([source[i]["text"] for i in range(len(source))])
        try:
            open_source("someone/absent", ("image", "text"))
        except ValueError as error:
            print(error)
    """
    with serve({"datasets/someone/pictures": files}) as (address, requested):
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home")}
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            capture_output=True,
            text=True,
            env={**environment, "HF_HUB_DISABLE_XET": "1"},
        )
    assert done.returncode == 0, done.stderr
    texts, error = done.stdout.splitlines()
    assert texts == "['number 0', 'number 1', 'number 2']"
    assert "no such repository on the Hub" in error
    # Of other splits nothing is fetched.
    assert set(requested) == {"data/train.parquet", "README.md"}
