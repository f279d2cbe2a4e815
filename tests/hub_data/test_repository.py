"""Which files of a data set are meant."""

import json

import pytest

from diffusax.hub_data import Reference, open_dataset

FILES = {
    "README.md": b"a card",
    "data/test-00000.parquet": b"t",
    "data/train-00001.parquet": b"b",
    "data/train-00000.parquet": b"a",
    "en/shard-0.tar": b"tar",
    "validation/0.parquet": b"v",
}


def paths(files):
    return [file.path for file in files]


@pytest.fixture
def dataset(hub):
    hub({"datasets/someone/many": FILES})
    return open_dataset("someone/many")


def test_all_shards_are_listed_in_order_with_sizes_and_digests(dataset):
    assert dataset.commit == "a" * 40
    assert paths(dataset.shards()) == sorted(set(FILES) - {"README.md"})
    card, first = dataset.files[:2]
    assert (card.path, card.size, card.sha256) == ("README.md", 6, None)
    assert (first.path, first.size, len(first.sha256)) == ("data/test-00000.parquet", 1, 64)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"split": "train"}, ["data/train-00000.parquet", "data/train-00001.parquet"]),
        ({"split": "validation"}, ["validation/0.parquet"]),
        ({"include": ["*.md"]}, ["README.md"]),
        ({"include": ["en/*", "data/te*"]}, ["data/test-00000.parquet", "en/shard-0.tar"]),
        ({"below": "data", "split": "test"}, ["data/test-00000.parquet"]),
        ({"below": "data/*-00001.parquet"}, ["data/train-00001.parquet"]),
        ({"suffixes": [".tar"]}, ["en/shard-0.tar"]),
    ],
)
def test_some_of_the_files(dataset, options, found):
    assert paths(dataset.shards(**options)) == found


def test_the_card_says_what_subsets_and_splits_are(hub):
    english = [{"split": "train", "path": "en/*.parquet"}, {"split": "dev", "path": ["de/1*"]}]
    configs = [
        {"config_name": "english", "data_files": english},
        {"config_name": "german", "data_files": "de/*.parquet"},
        {"config_name": "broken", "data_files": [{"split": "train"}, 7]},
        "nonsense",
    ]
    names = ["en/0.parquet", "de/0.parquet", "de/1.parquet"]
    files = dict.fromkeys(names, b"x") | {"card.json": json.dumps({"configs": configs}).encode()}
    hub({"datasets/someone/carded": files})
    dataset = open_dataset("someone/carded")
    assert paths(dataset.shards(subset="german")) == ["de/0.parquet", "de/1.parquet"]
    assert paths(dataset.shards(split="dev")) == ["de/1.parquet"]
    assert paths(dataset.shards(subset="english", split="train")) == ["en/0.parquet"]
    with pytest.raises(ValueError, match=r"no subset 'french' in its card \(it has english,"):
        dataset.shards(subset="french")
    with pytest.raises(ValueError, match="no such files of subset='broken'"):
        dataset.shards(subset="broken")


def test_files_that_are_not_there_are_named_with_those_that_are(dataset):
    with pytest.raises(ValueError, match=r"no files of split='dev1' \(it has test, train, valid"):
        dataset.shards(split="dev1")
    with pytest.raises(ValueError, match=r"no files \*.zip \(it has .md, .parquet, .tar\)"):
        dataset.shards(include=["*.zip"])
    with pytest.raises(ValueError, match=r"no files .parquet or .tar in fr \(it has"):
        dataset.shards(below="fr")


@pytest.mark.parametrize(
    "name", ["../up.parquet", "a//b.parquet", "a\nb.parquet", "/etc/x.parquet"]
)
def test_a_file_that_leads_out_of_the_folder_is_refused(hub, name):
    hub({"datasets/someone/evil": {name: b"x"}})
    with pytest.raises(ValueError, match="leads out of a folder"):
        open_dataset("someone/evil")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("someone/many", ("someone/many", None, "")),
        ("someone/many@v1", ("someone/many", "v1", "")),
        ("hf://datasets/someone/many", ("someone/many", None, "")),
        ("hf://datasets/someone/many@v1/data/", ("someone/many", "v1", "data")),
        ("hf://datasets/someone/many/d/t-*.parquet", ("someone/many", None, "d/t-*.parquet")),
        ("hf://datasets/s/m@refs/convert/parquet/d", ("s/m", "refs/convert/parquet", "d")),
        ("hf://datasets/s/m@refs%2Fconvert%2Fparquet", ("s/m", "refs/convert/parquet", "")),
    ],
)
def test_a_reference_has_a_repository_a_revision_and_a_path(text, parts):
    found = Reference.parse(text)
    assert (found.repo, found.revision, found.path) == parts


@pytest.mark.parametrize("text", ["", "many", "a/b/c", "./many", "~/many", "hf://someone/many"])
def test_what_is_no_reference(text):
    assert Reference.parse(text) is None


def test_a_hub_that_has_no_such_data_set_or_does_not_answer_is_one_sentence(hub):
    hub({"datasets/someone/many": FILES, "datasets/someone/gated": None})
    for repo, message in [
        ("someone/absent", "no such repository on the Hub"),
        ("someone/gated", "is gated"),
    ]:
        with pytest.raises(ValueError, match=message):
            open_dataset(repo)
    with pytest.raises(ValueError, match="has no revision 'v9'"):
        open_dataset("someone/many", "v9")
