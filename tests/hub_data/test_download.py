"""Files of a data set onto this machine."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time

import pytest
from support.hub_server import running

from diffusax.cli.download import command
from diffusax.hub_data import download, open_dataset
from diffusax.hub_data.transfer import Downloaded

MIB = 2**20


def content(seed, size=1000):
    return random.Random(seed).randbytes(size)


FILES = {f"data/train-{i:05}.parquet": content(i, 1000 + i) for i in range(7)} | {
    "data/test-00000.parquet": content(9),
    "README.md": b"a card",
}


@pytest.fixture
def state(hub):
    return hub({"datasets/someone/pictures": dict(FILES)})


@pytest.fixture
def get(state, tmp_path):
    """Downloads the data set."""

    def run(**options) -> Downloaded:
        dataset = open_dataset("someone/pictures")
        shards = dataset.shards(**options)
        return download(dataset, shards, tmp_path / "out", progress=False)

    return run


def run_command(*args):
    command([str(arg) for arg in args]).run()


def files_in(folder):
    """The shards in a folder; each has the data set's card beside them if a command wrote it."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in folder.rglob("*")
        if file.is_file() and file.name != "README.md"
    }


def test_files_come_whole_and_are_fetched_once(get, state, tmp_path):
    done = get()
    expected = {name: data for name, data in FILES.items() if name != "README.md"}
    assert files_in(tmp_path / "out") == expected
    assert done.fetched == 8
    assert done.transferred == sum(map(len, expected.values()))
    assert get() == Downloaded(done.files, 0, 0)
    assert len(state.sent) == 8


def test_small_files_are_checked_by_the_digest_of_git(get, state, tmp_path):
    state.troubles["README.md"] = [b"A CARD"]
    assert get(include=["*.md"]).transferred == 12
    assert (tmp_path / "out/README.md").read_bytes() == b"a card"


def test_the_parts_of_machines_are_disjoint_and_complete(state, tmp_path):
    for part in ("0/3", "1/3", "2/3"):
        folder = tmp_path / part.replace("/", "of")
        run_command("someone/pictures", "--split", "train", "--part", part, "--output", folder)
    parts = [files_in(folder) for folder in sorted(tmp_path.iterdir())]
    assert [len(part) for part in parts] == [3, 2, 2]
    assert sorted(parts[0]) == [f"data/train-{i:05}.parquet" for i in (0, 3, 6)]
    together = {name: data for part in parts for name, data in part.items()}
    assert together == {name: data for name, data in FILES.items() if "train" in name}


def test_a_process_of_several_gets_its_own_part(state, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusax.cli.download.jax_part", lambda: (1, 3))
    run_command("someone/pictures", "--split", "train", "--distributed", "--output", tmp_path)
    assert sorted(files_in(tmp_path)) == [f"data/train-{i:05}.parquet" for i in (1, 4)]


def test_a_command_says_what_comes_and_goes_to_a_folder_of_its_own(
    state, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    run_command("hf://datasets/someone/pictures@main/data", "--split", "test")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        f"1 files, 1.00kB, of someone/pictures at {'a' * 40}",
        "data/pictures (1 files downloaded, 0 were there)",
    ]
    assert list(files_in(tmp_path / "data/pictures")) == ["data/test-00000.parquet"]
    # From the card a run that reads the folder knows its splits.
    assert (tmp_path / "data/pictures/README.md").read_bytes() == FILES["README.md"]


def test_a_file_that_was_damaged_or_comes_damaged_is_fetched_again(get, state, tmp_path, caplog):
    name = "data/train-00002.parquet"
    state.troubles[name] = [content(77, 1002)]
    assert get().fetched == 8
    assert (tmp_path / "out" / name).read_bytes() == FILES[name]
    assert f"{name} has not the digest" in caplog.text
    (tmp_path / "out" / name).write_bytes(content(78, 1002))
    assert get().fetched == 1
    assert (tmp_path / "out" / name).read_bytes() == FILES[name]


def test_a_file_that_stays_wrong_is_an_error_and_does_not_appear(get, state, tmp_path):
    name = "data/train-00002.parquet"
    state.troubles[name] = [content(77, 1002)] * 2
    with pytest.raises(ValueError, match=f"{name} of 'someone/pictures' came twice with another"):
        get()
    assert name not in files_in(tmp_path / "out")
    assert not [file for file in files_in(tmp_path / "out") if name in file]


def test_transient_failures_are_waited_for(get, state, tmp_path, monkeypatch):
    monkeypatch.setattr("diffusax.hub_data.transfer.WAITS", (0.01, 0.01))
    name = "data/train-00002.parquet"
    state.troubles[name] = [503, 500]
    assert get().fetched == 8
    assert (tmp_path / "out" / name).read_bytes() == FILES[name]
    shutil.rmtree(tmp_path / "out")
    state.troubles[name] = [503] * 3
    with pytest.raises(ValueError, match="the Hub does not answer for 'someone/pictures'"):
        get()
    assert state.troubles[name] == []


def test_a_connection_that_breaks_goes_on_inside_the_file(hub, tmp_path):
    big = content(5, 25 * MIB)
    state = hub({"datasets/someone/big": {"big.parquet": big}})
    state.troubles["big.parquet"] = [("cut", 12 * MIB)]
    dataset = open_dataset("someone/big")
    download(dataset, dataset.shards(), tmp_path, progress=False)
    assert (tmp_path / "big.parquet").read_bytes() == big
    # The Hub's client writes ten mebibytes at a time.
    assert state.sent == [("big.parquet", 12 * MIB), ("big.parquet", 15 * MIB)]


def test_a_server_that_knows_no_ranges_sends_the_file_anew(get, state, tmp_path):
    name, data = "data/test-00000.parquet", FILES["data/test-00000.parquet"]
    (shard,) = open_dataset("someone/pictures").shards(split="test")
    partial = tmp_path / "out" / f"{name}.{shard.blob[:12]}.partial"
    partial.parent.mkdir(parents=True)
    for trouble, count in (([], 600), (["whole"], 1000)):
        (tmp_path / "out" / name).unlink(missing_ok=True)
        partial.write_bytes(data[:400])
        state.troubles[name] = trouble
        assert get(split="test").transferred == count
        assert files_in(tmp_path / "out") == {name: data}


@pytest.mark.slow
def test_a_killed_download_goes_on_inside_the_file(tmp_path):
    big = content(5, 25 * MIB)
    files = {"a.parquet": content(1), "b.parquet": big}
    arguments = ["download", "someone/big", "--output", str(tmp_path / "out")]
    with running({"datasets/someone/big": files}) as (address, state):
        state.troubles["b.parquet"] = [("stall", 21 * MIB)]
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_XET": "1"}

        def start():
            return subprocess.Popen(
                [sys.executable, "-m", "diffusax", *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                text=True,
            )

        first = start()
        assert state.stalled.wait(60)
        partial = tmp_path / "out"
        while sum(f.stat().st_size for f in partial.rglob("*.pa*") if f.is_file()) < 20 * MIB:
            assert first.poll() is None
            time.sleep(0.05)
        first.send_signal(signal.SIGKILL)
        first.wait()
        assert sorted(files_in(partial))[0] == "a.parquet"
        assert "b.parquet" not in files_in(partial)
        state.sent.clear()
        second = start()
        said = second.communicate()[0]
    assert second.returncode == 0
    assert "1 files downloaded, 1 were there" in said
    assert files_in(partial) == files
    assert state.sent == [("b.parquet", 5 * MIB)]


def test_a_full_disk_is_noticed_before(get, monkeypatch, state):
    usage = shutil.disk_usage("/")._replace(free=8000)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage)
    with pytest.raises(ValueError, match=r"need 8.02kB more and .* has 8.00kB free"):
        get()
    assert state.sent == []
    assert get(split="test").fetched == 1
    # What is there needs no room.
    assert get(include=["data/train-0000[0-5]*", "data/test*"]).fetched == 6


def test_a_list_of_addresses_for_aria2(state, tmp_path, capsys):
    file = tmp_path / "lists" / "urls.txt"
    run_command("someone/pictures", "--include", "*.md", "data/test*", "--urls", file)
    dataset = open_dataset("someone/pictures")
    card, shard = dataset.files[0], dataset.shards(split="test")[0]
    resolve = f"/datasets/someone/pictures/resolve/{'a' * 40}/"
    address, *lines = file.read_text().splitlines()
    assert address.endswith(resolve + "README.md")
    assert lines == [
        "  out=README.md",
        address.replace("README.md", shard.path),
        f"  out={shard.path}",
        f"  checksum=sha-256={shard.sha256}",
    ]
    assert card.sha256 is None
    assert state.sent == []
    assert "urls.txt (2 files, 1.01kB" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["pictures"], "repo must be owner/name"),
        (["a/b", "--part", "4/4"], "part must be i/n with i from 0 to n - 1"),
        (["a/b", "--part", "0/2", "--distributed"], "leave --part out"),
        (["a/b", "--urls", "x", "--output", "y"], "--output cannot be given with --urls"),
        (["a/b@v1", "--revision", "v2"], "--revision v2 is not the revision in a/b@v1"),
        (["someone/pictures", "--part", "0/99"], "has 8 files, too few for 99 parts"),
        (["a/b", "--threads", "0"], "threads must be a whole number from 1"),
    ],
)
def test_options_that_cannot_be(state, capsys, args, message):
    with pytest.raises((ValueError, SystemExit)) as error:
        run_command(*args)
    assert message in " ".join(f"{error.value} {capsys.readouterr().err}".split())


def test_a_hub_that_does_not_answer_is_one_sentence(hub, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ValueError, match="the Hub does not answer for 'a/b'") as error:
        run_command("a/b", "--output", tmp_path / "out")
    assert "\n" not in str(error.value)
