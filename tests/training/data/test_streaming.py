"""Rows of a data set that stays on the Hub."""

import hashlib
import io
import pickle
import time
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_sets import row

from diffusax.training import CaptionedDataConfig, TextToImageConfig, text_to_image
from diffusax.training.data.batches import Batches
from diffusax.training.data.finding import open_source
from diffusax.training.data.opening import open_data, open_images, own_share
from diffusax.training.data.options import DataConfig
from diffusax.training.data.row_groups import RowGroups
from diffusax.training.data.sources import SourceFailed

COLUMNS = ("image", "text")
REPO = "someone/pictures"
ROWS, GROUP = 30, 4
PREFETCH = RowGroups.prefetch


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    """Short waits, a cache of its own for each test, and no thread that goes on after it."""
    monkeypatch.setattr(RowGroups, "prefetch", lambda self, groups: None)
    monkeypatch.setattr("diffusax.training.data.row_groups.WAITS", (0.01, 0.01))
    clock = types.SimpleNamespace(**{**vars(time), "sleep": lambda seconds: None})
    monkeypatch.setattr("huggingface_hub.utils._http.time", clock)
    monkeypatch.setenv("DIFFUSAX_CACHE", str(tmp_path / "cache"))


def noise(seed):
    """A column that nobody reads, larger than what is fetched with others for being in between."""
    return np.random.default_rng(seed).bytes(20_000)


def between(values, other):
    return {"image": values["image"], "other": other, "text": values["text"]}


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Two files of pictures, in row groups of four; the last of each is smaller."""
    folder = tmp_path_factory.mktemp("local")
    for i, part in enumerate((range(18), range(18, ROWS))):
        table = pa.Table.from_pylist([between(row(n), noise(n)) for n in part])
        pq.write_table(table, folder / f"train-{i}.parquet", row_group_size=GROUP)
    return folder


@pytest.fixture
def state(hub, local):
    files = {f"data/{file.name}": file.read_bytes() for file in sorted(local.iterdir())}
    return hub({f"datasets/{REPO}": {**files, "README.md": b"card"}})


def streamed(**options):
    return open_data(DataConfig(path=REPO, streaming=True, **options), COLUMNS)


def texts(source):
    return [source[i]["text"] for i in range(len(source))]


def prepare(row, rng):
    number = int(row["text"].removeprefix("number "))
    digest = hashlib.sha256(row["image"]["bytes"]).digest()
    drawn = rng.integers(2**31)
    return {"row": np.array([number, drawn]), "bytes": np.frombuffer(digest, np.uint8)}


def batches(source, count, seed=3, state=None, **options):
    loader = Batches(source, prepare, batch_size=4, seed=seed, **options)
    if state is not None:
        loader.set_state(state)
    try:
        return [next(loader) for _ in range(count)], loader.get_state()
    finally:
        loader.close()


def rows_of(found):
    return np.concatenate([batch["row"][:, 0] for batch in found]).tolist()


def assert_same(left, right):
    for one, other in zip(left, right, strict=True):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name])


def test_rows_are_those_of_local_files_in_the_same_order(state, local):
    source, expected = streamed(), open_source(str(local), COLUMNS)
    assert len(source) == len(expected) == ROWS
    for i in range(ROWS):
        assert source[i] == expected[i]
        name = expected.name(i).removeprefix(str(local))
        assert source.name(i) == f"{REPO}/data{name}"
    again = pickle.loads(pickle.dumps(source))
    assert texts(again) == texts(source)


def test_batches_are_those_of_local_files(state, local):
    expected, _ = batches(open_source(str(local), COLUMNS), 12)
    found, position = batches(streamed(), 5)
    rest, _ = batches(streamed(), 7, state=position)
    assert_same(found + rest, expected)
    assert len(set(rows_of(expected)[:ROWS])) == ROWS


def test_training_sees_the_same_examples(state, local, checkpoint):
    found = []
    for options in ({"path": str(local)}, {"path": f"hf://datasets/{REPO}", "streaming": True}):
        recipe = text_to_image(
            TextToImageConfig(model=str(checkpoint), data=CaptionedDataConfig(**options))
        )
        loader = Batches(recipe.source, recipe.example, batch_size=4, seed=5)
        found.append([next(loader) for _ in range(3)])
        loader.close()
    assert_same(*found)


def test_only_the_row_groups_and_columns_that_are_read_are_fetched(state, local):
    source = streamed()
    state.sent.clear()
    assert source[5]["text"] == source[6]["text"].replace("6", "5")
    footer = pq.read_metadata(local / "train-0.parquet")
    group = footer.row_group(1)
    sizes = [group.column(j).total_compressed_size for j in range(group.num_columns)]
    names = [group.column(j).path_in_schema for j in range(group.num_columns)]
    wanted = sum(size for size, name in zip(sizes, names) if name != "other")
    # One range for the picture, one for the text behind the column in between.
    assert len(state.sent) == 2
    assert sum(count for _, count in state.sent) == wanted
    # Another process finds it, and the footers, on the disk.
    state.sent.clear()
    assert streamed()[5]["text"] == "number 5"
    assert state.sent == []


def test_the_cache_keeps_to_its_limit_and_a_group_that_is_gone_comes_again(
    state, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr("diffusax.training.data.row_groups.OPEN_TABLES", 1)
    source = streamed(streaming_cache=4e-5)
    assert "in use at a time and data.streaming_cache is 40.0kB" in caplog.text
    caplog.clear()
    streamed(streaming_cache=6e-5, streaming_window=1)
    assert "in use at a time" not in caplog.text
    expected = [f"number {i}" for i in range(ROWS)]
    assert texts(source) == expected
    state.sent.clear()
    assert texts(source) == expected
    assert len(state.sent) > 2
    kept = [file.stat().st_size for file in (tmp_path / "cache/row-groups").glob("*.arrow")]
    assert 1 < len(kept) < 8
    assert sum(kept) <= 4e4


def test_windows_mix_few_groups_and_each_process_fetches_its_own(state):
    whole, parts = set(), []
    for index in (0, 1):
        source = streamed(streaming_window=2)
        found, _ = batches(source, 10, process_index=index, process_count=2)
        again, _ = batches(source, 4, process_index=index, process_count=2)
        assert_same(again, found[:4])
        later, _ = batches(
            source,
            3,
            state=batches(source, 7, process_index=index, process_count=2)[1],
            process_index=index,
            process_count=2,
        )
        assert_same(later, found[7:])
        numbers = rows_of(found)
        size = len(set(numbers))
        assert sorted(numbers[:size]) == sorted(set(numbers))
        assert numbers[:size] != numbers[size : 2 * size]
        parts.append(set(numbers))
        groups = [n // GROUP if n < 18 else 5 + (n - 18) // GROUP for n in numbers]
        assert len(set(groups[:4])) <= 2
        whole |= parts[-1]
    assert whole == set(range(ROWS))
    assert not parts[0] & parts[1]


def test_the_order_of_windows_can_be_sent_to_worker_processes(state):
    order = streamed(streaming_window=3).order(0, 1, 2)
    again = pickle.loads(pickle.dumps(order))
    assert [again[i] for i in range(40)] == [order[i] for i in range(40)]


@pytest.mark.slow
def test_windows_are_the_same_in_worker_processes(state):
    expected, _ = batches(streamed(streaming_window=3), 8)
    found, _ = batches(streamed(streaming_window=3), 8, workers=2)
    assert_same(found, expected)


def test_the_groups_of_the_next_window_are_fetched_ahead(state, tmp_path, monkeypatch):
    source = streamed(streaming_window=2)
    order = source.order(0, 0, 1)
    ahead = []
    with monkeypatch.context() as patched:
        patched.setattr(RowGroups, "prefetch", lambda self, groups: ahead.append([*groups]))
        for position in range(len(source)):
            order[position]
    assert [len(groups) for groups in ahead] == [2, 2, 2]
    PREFETCH(source._row_groups, [group for groups in ahead for group in groups])
    deadline = time.monotonic() + 30
    while len(list((tmp_path / "cache/row-groups").glob("*.arrow"))) < 6:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_full_disk_is_named_and_not_waited_for(state, monkeypatch, caplog):
    source = streamed()
    full = OSError(28, "No space left on device")
    monkeypatch.setattr("pyarrow.ipc.new_file", lambda *_: (_ for _ in ()).throw(full))
    with pytest.raises(SourceFailed, match=r"row-groups/.* could not be written \(No space left"):
        source[0]
    assert "once more" not in caplog.text


def test_transient_failures_are_waited_for(state):
    name = "data/train-0.parquet"
    state.troubles[name] = [503]
    source = streamed()
    state.troubles[name] = [503, ("cut", 100), 500, 502]
    assert texts(source) == [f"number {i}" for i in range(ROWS)]
    assert state.troubles[name] == []


def test_damaged_bytes_are_fetched_again(state, local):
    name = "data/train-0.parquet"
    source = streamed()
    state.troubles[name] = [bytes((local / "train-0.parquet").stat().st_size)]
    assert source[0]["text"] == "number 0"


def test_a_hub_that_stays_away_stops_the_run_and_is_no_broken_row(state):
    source = streamed()
    name = "data/train-0.parquet"
    state.troubles[name] = [503] * 10_000
    with pytest.raises(SourceFailed, match=f"{name} cannot be read: the Hub does not answer"):
        source[0]
    with pytest.raises(ValueError, match="the Hub does not answer for") as error:
        batches(source, 2)
    assert str(error.value).startswith(f"{name} cannot be read")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("hf://datasets/someone/absent", "no such repository on the Hub"),
        ("someone/gated", "is gated"),
        ("someone/down", "the Hub does not answer for 'someone/down'"),
        ("someone/tar", r"no files .parquet \(it has .tar\)"),
        (f"{REPO}@v9", "has no revision 'v9'"),
        (f"hf://datasets/{REPO}/en", r"no files .parquet in en"),
        ("pictures", "streaming needs a Hub data set, and 'pictures' is none"),
        ("/", "streaming needs a Hub data set, and '/' is on this machine"),
    ],
)
def test_what_cannot_be_streamed_is_one_sentence(state, path, message):
    others = {"someone/gated": None, "someone/down": 503, "someone/tar": {"a.tar": b"x"}}
    state.repos |= {f"datasets/{name}": files for name, files in others.items()}
    config = DataConfig(path=path, streaming=True)
    with pytest.raises(ValueError, match=message) as error:
        open_data(config, COLUMNS)
    assert "\n" not in str(error.value)


def test_a_split_is_streamed_alone(state, local, caplog):
    caplog.set_level("INFO", "diffusax.training")
    files = state.repos[f"datasets/{REPO}"]
    files["data/test-0.parquet"] = (local / "train-1.parquet").read_bytes()
    assert len(streamed()) == ROWS
    assert "the split is train; files of other splits: test 1" in caplog.text
    assert texts(streamed(split="eval")) == [f"number {i}" for i in range(18, ROWS)]
    assert len(streamed(split="all")) == ROWS + ROWS - 18
    with pytest.raises(ValueError, match=r"no split 'validation' \(it has train, test\)"):
        streamed(split="validation")
    with pytest.raises(ValueError, match=r"column 'image' holds struct<.*, not texts"):
        open_data(CaptionedDataConfig(REPO, streaming=True, caption_column="image"), ("image",))


def test_each_process_may_have_data_of_its_own(monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 2)
    monkeypatch.setattr("jax.process_count", lambda: 4)
    assert own_share(DataConfig()) == (2, 4)
    assert own_share(DataConfig(own_part=True)) == (0, 1)
    with pytest.raises(ValueError, match=r"own_part cannot be with data\.streaming"):
        streamed(own_part=True)


def test_a_missing_column_and_pictures_in_files_of_their_own_are_named(state):
    with pytest.raises(ValueError, match=r"train-0.parquet has no column 'caption'; it has image"):
        open_data(DataConfig(path=REPO, streaming=True), ("image", "caption"))
    sink = pa.BufferOutputStream()
    table = pa.table({"image": [{"bytes": None, "path": "a.png"}], "text": ["a"]})
    pq.write_table(table, sink)
    state.repos["datasets/someone/paths"] = {"a.parquet": sink.getvalue().to_pybytes()}
    source = open_data(DataConfig(path="someone/paths", streaming=True), COLUMNS)
    with pytest.raises(ValueError, match=r"file of its own, 'a.png', which is not streamed"):
        source[0]


def test_a_part_of_a_repository_is_downloaded_to_the_cache(state, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for path in (f"hf://datasets/{REPO}/data/train-1*", f"hf://datasets/{REPO}@main/data"):
        source = open_data(DataConfig(path=path), COLUMNS)
        first = 18 if "*" in path else 0
        assert texts(source) == [f"number {i}" for i in range(first, ROWS)]
    with pytest.raises(ValueError, match="a Hub data set is called hf://datasets/owner/name"):
        open_data(DataConfig(path="hf://someone"), COLUMNS)


def test_streamed_images_have_their_sizes_from_columns(hub):
    rows = [row(i, size=(120, 100)) for i in range(12)]
    rows = [{**one, "wide": 40 if i % 3 else 32, "high": 32} for i, one in enumerate(rows)]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=GROUP)
    state = hub({f"datasets/{REPO}": {"data/train-0.parquet": file.getvalue()}})
    options = {"width_column": "wide", "height_column": "high", "buckets": ("40x32", "32x32")}
    config = DataConfig(path=REPO, streaming=True, **options)
    source = open_images(config, COLUMNS, image_column="image", side=32, factor=4)
    assert source.buckets.of_row.tolist() == [int(i % 3 == 0) for i in range(12)]
    # The images stay on the Hub until they are needed.
    assert sum(count for _, count in state.sent) < len(file.getvalue()) / 2
    assert source[4]["text"] == "number 4"
