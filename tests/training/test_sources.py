"""Rows from Parquet, folders and the Hub."""

import os
import pickle
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hub_server import serve
from pictures import picture, png, row, write_image_folder, write_parquet

from diffusax.training.data import load_image
from diffusax.training.sources import cache_folder, open_source

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
    assert load_image(source[2]["image"]).tobytes() == picture(2).tobytes()
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
    assert load_image(source[0]["image"]).tobytes() == picture(0).tobytes()


def test_a_folder_of_images_with_metadata(tmp_path):
    source = open_source(str(write_image_folder(tmp_path / "data", 5)), COLUMNS)
    assert texts(source) == [f"number {i}" for i in range(5)]
    assert load_image(source[3]["image"]).tobytes() == picture(3).tobytes()
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
    with pytest.raises(ValueError, match="no data set at"):
        open_source(str(tmp_path / "nothing"), COLUMNS)
    with pytest.raises(ValueError, match="no file matches"):
        open_source(str(tmp_path / "*.parquet"), COLUMNS)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(ValueError, match=r"broken.parquet is not a whole Parquet file"):
        open_source(str(tmp_path), COLUMNS)
    (tmp_path / "metadata.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ValueError, match="line 1 has no file_name"):
        open_source(str(tmp_path), COLUMNS)


def test_a_hub_data_set_is_fetched(tmp_path):
    shard = write_parquet(tmp_path / "made", [row(i) for i in range(3)]) / "train-00000.parquet"
    files = {"data/train.parquet": shard.read_bytes(), "README.md": b"card", "model.bin": b"no"}
    program = """
        from diffusax.training.sources import open_source
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
    assert set(requested) == {"data/train.parquet"}
