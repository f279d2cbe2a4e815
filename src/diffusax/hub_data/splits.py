"""Splits and subsets of a data set, found as the library `datasets` finds them.

Upstream: huggingface/datasets, data_files.py (the patterns and their order) and utils/metadata.py
(the `configs` of a data set's card).
"""

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fsspec.utils import glob_translate

TRAIN = "train"
"""The split that is trained on, as by diffusers' scripts."""
ALL = "all"
"""The name of all splits together, as in `datasets`."""

Configs = Sequence[Mapping[str, Any]]
"""The subsets of a data set's card, unchecked: config_name, data_files or data_dir, default."""

WORDS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""The words by which splits are found, by split."""
_SHARD = re.compile(r"data/(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_SPLIT = {
    split: re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(words)})(?:[-._ 0-9]|$)", re.IGNORECASE)
    for split, words in WORDS.items()
}


class Split(NamedTuple):
    """The files of the splits that were asked for."""

    name: str
    """The name of the splits; empty where nothing tells one from another."""
    files: list[str]
    left: dict[str, int]
    """The number of files of each split that was not asked for."""
    loose: list[str]
    """The files of no split, beside those of some."""
    subset: str = ""
    """The subset of the card, where it has several."""


def find_splits(
    paths: Sequence[str], configs: Configs = (), subset: str | None = None
) -> dict[str, list[str]]:
    """Returns the files of each split; none where nothing tells one split from another.

    The first of these that finds files decides: the card; data/SPLIT-00000-of-00001.*; a word such
    as train, dev or test in the names of folders; or in those of files.

    Args:
        paths: the data set's files, as paths in it with slashes.
        configs: the subsets of its card.
        subset: the name of one of them; by default the only one, or the one that is the default.

    Raises:
        ValueError: there is no such subset, or there are several and none is the default.
    """
    config = _choose_config(configs, subset)
    if config is not None:
        if config.get("data_files") is not None:
            return _of_card(paths, config)
        folder = config.get("data_dir")
        if isinstance(folder, str) and (folder := folder.strip("./")):
            inside = [path for path in paths if path.startswith(f"{folder}/")]
            found = find_splits([path.removeprefix(f"{folder}/") for path in inside])
            if not found:
                return {TRAIN: inside} if inside else {}
            return {name: [f"{folder}/{path}" for path in own] for name, own in found.items()}
    return _by_shards(paths) or by_folders(paths) or by_names(paths)


def pick_split(
    paths: Sequence[str], configs: Configs, wanted: str | None, subset: str | None, where: str
) -> Split:
    """Returns the files of the wanted splits of a subset; see `find_splits` and `choose_split`.

    Raises:
        ValueError: their errors; or none of the subset's files is there.
    """
    splits = find_splits(paths, configs, subset)
    if configs and not splits and (subset is not None or _names_files(configs, subset)):
        there = [name for name in subsets(configs) if find_splits(paths, configs, name)]
        rest = f"; it has those of {', '.join(there)}: give one as data.subset" if there else ""
        raise ValueError(f"{where} has none of the files that its card names for it{rest}")
    if len(configs) < 2:
        return choose_split(paths, splits, wanted, where)
    # What belongs to another subset is no file that is left out by mistake.
    known = set().union(*splits.values())
    found = choose_split([path for path in paths if path in known], splits, wanted, where)
    config = _choose_config(configs, subset) or {}
    return found._replace(subset=str(config.get("config_name")))


def choose_split(
    paths: Sequence[str], splits: Mapping[str, list[str]], wanted: str | None, where: str
) -> Split:
    """Returns the files of the splits that are wanted, in the order of the paths.

    Args:
        paths: the files of all splits.
        splits: what `find_splits` found.
        wanted: a split, several with "+" between, or "all"; by default train.
        where: the data set, for messages.

    Raises:
        ValueError: there is no such split; names those that there are.
    """
    if not splits:
        if wanted not in (None, TRAIN, ALL):
            raise ValueError(
                f"{where} has no split {wanted!r}: nothing in its card or in the names of its "
                "files tells splits; leave data.split out, or name files by a glob"
            )
        return Split("", list(paths), {}, [])
    known = set().union(*splits.values())
    loose = [path for path in paths if path not in known]
    if wanted == ALL:
        return Split(ALL, list(paths), {}, [])
    names = [_spelt(name.strip(), splits) for name in (wanted or TRAIN).split("+")]
    if missing := [name for name in names if name not in splits]:
        raise ValueError(
            f"{where} has no split {missing[0]!r} (it has {', '.join(splits)}); give one of these, "
            f"several with + between, or {ALL} as data.split"
        )
    chosen = set().union(*(splits[name] for name in names))
    left = {name: len(own) for name, own in splits.items() if name not in names}
    return Split("+".join(names), [path for path in paths if path in chosen], left, loose)


def split_below(
    paths: Sequence[str],
    configs: Configs,
    *,
    below: str,
    wanted: str | None,
    subset: str | None,
    where: str,
) -> Split:
    """Returns the files of the wanted splits in a folder of a data set, or of a glob.

    What a glob or the name of a file chooses is read as a whole, unless a split is asked for.

    Args:
        paths: the data set's files.
        configs: the subsets of its card, which speak of the whole data set alone.
        below: a folder, a file or a glob that the files are in; empty for all.
        wanted: see `choose_split`.
        subset: see `find_splits`.
        where: the data set, for messages.

    Raises:
        ValueError: the errors of `find_splits` and `choose_split`.
    """
    inside = [path for path in paths if path.startswith(f"{below}/")] if below else list(paths)
    if not inside:
        inside = matching(paths, [below, f"{below}/**"])
        splits = find_splits(inside) if wanted not in (None, ALL) else {}
        return choose_split(inside, splits, wanted, where)
    start = f"{below}/" if below else ""
    names = [path.removeprefix(start) for path in inside]
    found = pick_split(names, () if below else configs, wanted, subset, where)
    files, loose = ([start + path for path in own] for own in (found.files, found.loose))
    return found._replace(files=files, loose=loose)


def by_folders(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each split by the names of their folders, such as test/1.png."""
    return _by_words(paths, lambda path: path.split("/")[:-1])


def by_names(paths: Iterable[str]) -> dict[str, list[str]]:
    """Returns the files of each split by their own names, such as test-1.parquet."""
    return _by_words(paths, lambda path: path.split("/")[-1:])


def subsets(configs: Configs) -> list[str]:
    """Returns the names of a card's subsets."""
    return [str(config.get("config_name")) for config in configs]


def _choose_config(configs: Configs, subset: str | None) -> Mapping[str, Any] | None:
    if subset is not None:
        for config in configs:
            if config.get("config_name") == subset:
                return config
        names = ", ".join(subsets(configs))
        raise ValueError(
            f"the data set has no subset {subset!r} in its card (it has {names or 'none'})"
        )
    if len(configs) < 2:
        return next(iter(configs), None)
    for config in configs:
        if config.get("default") or config.get("config_name") == "default":
            return config
    raise ValueError(
        f"the data set has the subsets {', '.join(subsets(configs))}, of which none is the "
        "default; give one as data.subset"
    )


def _names_files(configs: Configs, subset: str | None) -> bool:
    config = _choose_config(configs, subset) or {}
    return any(config.get(name) is not None for name in ("data_files", "data_dir"))


def _of_card(paths: Sequence[str], config: Mapping[str, Any]) -> dict[str, list[str]]:
    patterns: dict[str, list[str]] = {}
    for split, pattern in data_files(config):
        patterns.setdefault(split, []).append(pattern)
    found = {split: matching(paths, own) for split, own in patterns.items()}
    return {split: own for split, own in found.items() if own}


def data_files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the splits and globs of a card's config; a glob without a split belongs to train."""
    listed = config.get("data_files")
    if isinstance(listed, Mapping):
        listed = [{"split": split, "path": path} for split, path in listed.items()]
    for entry in listed if isinstance(listed, list) else [listed]:
        entry = {"split": TRAIN, "path": entry} if not isinstance(entry, Mapping) else entry
        paths = entry.get("path")
        for path in paths if isinstance(paths, list) else [paths]:
            if isinstance(path, str):
                yield str(entry.get("split", TRAIN)), path.removeprefix("./")


def matching(paths: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Returns the paths that a glob matches; only ** matches several folders, as in fsspec."""
    expressions = [re.compile(glob_translate(pattern)) for pattern in patterns]
    return [path for path in paths if any(e.match(path) for e in expressions)]


def _by_shards(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        if match := _SHARD.fullmatch(path):
            found.setdefault(match["split"], []).append(path)
    order = [*WORDS, *sorted(found)]
    return dict(sorted(found.items(), key=lambda one: order.index(one[0])))


def _by_words(paths: Iterable[str], parts: Callable[[str], list[str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {split: [] for split in _SPLIT}
    # A million images are in few folders.
    of_name = functools.cache(_splits_of)
    for path in paths:
        for split in {split: None for name in parts(path) for split in of_name(name)}:
            found[split].append(path)
    return {split: own for split, own in found.items() if own}


def _splits_of(name: str) -> list[str]:
    return [split for split, word in _SPLIT.items() if word.search(name)]


def _spelt(name: str, splits: Mapping[str, list[str]]) -> str:
    """Returns the split's own name where it is asked for by another word, such as val."""
    if name in splits:
        return name
    alike = next((words for words in WORDS.values() if name.lower() in words), ())
    return next((word for word in alike if word in splits), name)
