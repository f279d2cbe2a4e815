"""Lists the files of a data set on the Hugging Face Hub at one commit."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote

import huggingface_hub
from huggingface_hub.hf_api import RepoFile

from diffusax.checkpoints.hub import hub_errors
from diffusax.hub_data.splits import WORDS, Split, data_files, matching, split_below

SHARD_SUFFIXES = (".parquet", ".tar")
"""The suffixes of a data set's files: Parquet and WebDataset."""

_REFERENCE = re.compile(
    r"(?P<scheme>hf://datasets/)?(?P<repo>[^/@\s]+/[^/@\s]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/\s]+|[^/\s]+))?(?:/(?P<path>.*))?"
)


@dataclasses.dataclass(frozen=True)
class Reference:
    """A data set, or some of its files, in the form that users write."""

    repo: str
    revision: str | None = None
    """A branch, a tag or a commit."""
    path: str = ""
    """A folder, a file or a glob inside the repository; empty for all."""

    @classmethod
    def parse(cls, text: str) -> "Reference | None":
        """Parses owner/name, owner/name@revision or hf://datasets/owner/name@revision/path.

        Returns None for any other text. A path is allowed only after hf://datasets/.
        """
        found = _REFERENCE.fullmatch(text)
        if found is None or (found["path"] and not found["scheme"]):
            return None
        if not found["scheme"] and text.startswith((".", "~")):
            return None
        revision = found["revision"] and unquote(found["revision"])
        return cls(found["repo"], revision, (found["path"] or "").strip("/"))


@dataclasses.dataclass(frozen=True)
class HubFile:
    """A file of a repository at a commit."""

    path: str
    size: int
    """The number of bytes."""
    blob: str
    """The SHA-1 of git's blob, or of its pointer if the file has a SHA-256."""
    sha256: str | None = None
    """The digest of a large file; None for a small one."""


@dataclasses.dataclass(frozen=True)
class HubDataset:
    """The files of a data-set repository at one commit, in the order of their paths."""

    repo: str
    commit: str
    files: tuple[HubFile, ...]
    configs: tuple[dict[str, Any], ...] = ()
    """The subsets and splits of the card: name and data_files, unchecked."""

    def shards(
        self,
        *,
        split: str | None = None,
        subset: str | None = None,
        include: Sequence[str] = (),
        below: str = "",
        suffixes: Sequence[str] = SHARD_SUFFIXES,
    ) -> list[HubFile]:
        """Returns the files that hold the rows, in the order of their paths.

        Args:
            split: a split such as train: its files are those that the card names, or else those
                with the split in their path. By default all splits.
            subset: a config of the card. By default all.
            include: globs of paths, instead of Parquet and tar files; ** matches folders too.
            below: a folder, a file or a glob that the files are in; empty for all.
            suffixes: the suffixes of the files, if there is no `include`.

        Raises:
            ValueError: there are no such files; says what there is instead.
        """
        around = _matching(self.files, (below, f"{below}/**")) if below else self.files
        wanted = _matching(around, include)
        if not include:
            wanted = [file for file in around if file.path.endswith(tuple(suffixes))]
        if not wanted:
            where = f" in {below}" if below else ""
            kinds = " or ".join(include or suffixes)
            there = ", ".join(sorted({PurePosixPath(f.path).suffix or f.path for f in self.files}))
            raise ValueError(
                f"{self.repo!r} has no files {kinds}{where} (it has {there or 'no files'})"
            )
        if subset is not None:
            wanted = _matching(wanted, self._card_patterns(self._config(subset), None))
        if split is not None:
            wanted = self._of_split(wanted, split, subset)
        if not wanted:
            raise ValueError(f"{self.repo!r} has no such files of subset={subset!r}")
        return wanted

    def split_of(
        self, files: Sequence[HubFile], *, below: str, split: str | None, subset: str | None
    ) -> tuple[list[HubFile], Split]:
        """Returns the files of the splits to train on, and what is known of the others.

        Args:
            files: those to choose from.
            below: a folder, a file or a glob that they are in; empty for all.
            split: the splits; by default train, or all where nothing tells splits.
            subset: a config of the card; by default the only one, or the default.

        Raises:
            ValueError: there is no such split or subset; names those that there are.
        """
        found = split_below(
            [file.path for file in files],
            self.configs,
            below=below,
            wanted=split,
            subset=subset,
            where=repr(self.repo),
        )
        chosen = {*found.files}
        return [file for file in files if file.path in chosen], found

    def _config(self, subset: str) -> tuple[dict[str, Any], ...]:
        configs = [config for config in self.configs if config.get("config_name") == subset]
        if not configs:
            names = ", ".join(str(config.get("config_name")) for config in self.configs)
            raise ValueError(
                f"{self.repo!r} has no subset {subset!r} in its card (it has {names or 'none'}); "
                "name its files with include"
            )
        return tuple(configs)

    def _of_split(self, files: list[HubFile], split: str, subset: str | None) -> list[HubFile]:
        configs = self.configs if subset is None else self._config(subset)
        patterns = self._card_patterns(configs, split)
        chosen = _matching(files, patterns) if patterns else []
        if not chosen:
            chosen = [file for file in files if _names_split(file.path, split)]
        if not chosen:
            known = {*self._card_splits(configs)}
            known |= {name for name in WORDS for f in files if _names_split(f.path, name)}
            raise ValueError(
                f"{self.repo!r} has no files of split={split!r} (it has "
                f"{', '.join(sorted(known)) or 'none that a name tells'}); name files with include"
            )
        return chosen

    def _card_splits(self, configs: Iterable[dict[str, Any]]) -> Iterator[str]:
        for config in configs:
            yield from (split for split, _ in data_files(config))

    def _card_patterns(
        self, configs: Iterable[dict[str, Any]], split: str | None
    ) -> tuple[str, ...]:
        return tuple(
            pattern
            for config in configs
            for name, pattern in data_files(config)
            if split in (None, name)
        )


def open_dataset(repo: str, revision: str | None = None) -> HubDataset:
    """Lists the data set at the present commit of the revision, which is main by default.

    HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they do for huggingface_hub.

    Raises:
        ValueError: there is no such repository or revision, or the Hub does not answer; says why.
    """
    api = huggingface_hub.HfApi()
    with hub_errors(repo, revision):
        info = api.dataset_info(repo, revision=revision)
        tree = api.list_repo_tree(repo, recursive=True, revision=info.sha, repo_type="dataset")
        files = [
            HubFile(entry.path, entry.size, entry.blob_id, entry.lfs.sha256 if entry.lfs else None)
            for entry in tree
            if isinstance(entry, RepoFile)
        ]
    strange = next((file.path for file in files if not _stays_inside(file.path)), None)
    if strange is not None:
        raise ValueError(f"{repo!r} has a file {strange!r}, which leads out of a folder")
    card = info.card_data.to_dict() if info.card_data else {}
    configs = card.get("configs")
    known = [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else []
    ordered = sorted(files, key=lambda file: PurePosixPath(file.path))
    return HubDataset(repo, str(info.sha), tuple(ordered), tuple(known))


def _stays_inside(path: str) -> bool:
    """Returns whether a path can be written below a folder, and into a line of a list."""
    parts = path.split("/")
    return path.isprintable() and "\\" not in path and not {"", ".", ".."} & {*parts}


def _matching(files: Iterable[HubFile], patterns: Sequence[str]) -> list[HubFile]:
    files = list(files)
    paths = {*matching((file.path for file in files), patterns)}
    return [file for file in files if file.path in paths]


def _names_split(path: str, split: str) -> bool:
    """Returns whether a path contains the split as a word, such as data/train-00000.parquet."""
    words = "|".join(map(re.escape, WORDS.get(split, (split,))))
    return re.search(rf"(?:^|[-._ 0-9/])(?:{words})(?:[-._ 0-9/]|$)", path) is not None
