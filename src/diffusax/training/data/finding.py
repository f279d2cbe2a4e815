"""Finds a data set by its path: shards with rows, or images in files, here or on the Hub."""

import dataclasses
import glob
import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path, PurePosixPath
from typing import Any

import huggingface_hub
from huggingface_hub import constants

from diffusax.boundary.files import load_json
from diffusax.checkpoints.hub import hub_errors
from diffusax.hub_data import Reference, open_dataset
from diffusax.hub_data.splits import (
    ALL,
    TRAIN,
    Configs,
    Split,
    by_folders,
    by_names,
    choose_split,
    find_splits,
    pick_split,
    split_below,
)
from diffusax.training.data.captions import Lines
from diffusax.training.data.control_folders import pair_folders
from diffusax.training.data.edits import EditColumns
from diffusax.training.data.folders import FolderSource, metadata_files
from diffusax.training.data.image_files import (
    ARCHIVES,
    IMAGE_SUFFIXES,
    METADATA,
    SHARD_SUFFIXES,
    VIDEO_SUFFIXES,
    Listing,
    list_folder,
    nothing_in,
    suffix_of,
    without_companions,
)
from diffusax.training.data.records import read_records, record_files
from diffusax.training.data.sources import ArrowSource, Facts, Kind, column_names

log = logging.getLogger(__name__)

_LATENTS = "cache.json"
_CARD = "README.md"
_SPLITS_ON_DISK = "dataset_dict.json"
_RECORDS = (".json", ".jsonl")
_FETCHED = (*SHARD_SUFFIXES, ".txt", ".caption", *_RECORDS)

Finder = Callable[[Sequence[str]], dict[str, list[str]]]


@dataclasses.dataclass(frozen=True)
class Wanted:
    """What to read of a data set."""

    columns: tuple[str, ...]
    """The columns; first that of the images that name the rows of a folder."""
    kinds: Mapping[str, Kind] = dataclasses.field(default_factory=dict)
    """What columns hold, which is checked; others may hold anything."""
    split: str | None = None
    """A split, several with "+" between, or "all"; by default train, if there are splits."""
    subset: str | None = None
    """A config of the data set's card; by default the only one, or the default."""
    leave_out: str = ""
    """A folder whose images are no part of the data set; see `list_folder`."""
    caption_lines: Lines = "first"
    """What captions' files of several lines say; see `captions`."""
    edits: EditColumns | None = None
    """Which of the columns are those of edits; other names are then tried for them, too."""
    clips: bool = False
    """Whether videos are read like images."""
    own: bool = True
    """Whether paths in the data set may lead out of its folder, as in one that is not the Hub's."""

    @property
    def only_edits(self) -> EditColumns | None:
        """The columns of edits, if no others are wanted."""
        if self.edits is None or {*self.columns} - {*self.edits.names, self.edits.masks}:
            return None
        return self.edits

    def in_table(self, names: Sequence[str]) -> tuple[tuple[str, ...], Mapping[str, Kind]]:
        """Returns the columns as a table with these calls them, and what they hold."""
        if self.edits is None:
            return self.columns, self.kinds
        return self.edits.in_table(names, self.columns, self.kinds)


def open_source(path: str, columns: Sequence[str], **options: Any) -> ArrowSource | FolderSource:
    """Opens a data set from a folder, a glob of Parquet files, or the Hub.

    Names on the Hub are owner/name, owner/name@revision, or hf://datasets/owner/name@revision/path.

    A folder holds Parquet or Arrow shards, or images, at any depth; see docs/training/data.md for
    what is read of it, and what wins where two files disagree. Where it has splits, train is read.

    options: those of `Wanted`.

    Raises:
        ValueError: there is no such data set, split or column, or it can be read by halves only;
            says what there is instead.
    """
    wanted = Wanted(tuple(columns), **options)
    here = not path.startswith("hf://") and Path(path).exists()
    if path.startswith("hf://") or (Reference.parse(path) is not None and not here):
        return _open_on_hub(path, wanted)
    if any(c in path for c in "*?[") and not here:
        return _open_glob(path, wanted)
    if not here:
        raise ValueError(
            f"there is no file or folder {path!r} here, and a Hub data set is called owner/name"
        )
    return _open_path(Path(path), wanted, path, _card(Path(path)))


def _open_path(
    folder: Path, wanted: Wanted, name: str, configs: Configs = ()
) -> ArrowSource | FolderSource:
    """Opens a folder or a file. name: what to call it."""
    if folder.is_file():
        if wanted.edits is not None and suffix_of(folder.name) in (*_RECORDS, ".parquet"):
            listing = list_folder(folder.parent, wanted.leave_out)
            if source := _open_records(listing, wanted, name, folder.name):
                return source
        if suffix_of(folder.name) not in SHARD_SUFFIXES:
            raise ValueError(
                f"{name} is a file of a data set; give the folder that it is in"
                if suffix_of(folder.name) not in ARCHIVES
                else f"{name} is an archive; unpack it, and give the folder"
            )
        split = split_below(
            [folder.name], (), below=folder.name, wanted=wanted.split, subset=None, where=name
        )
        return _open_shards([folder], wanted, Facts().of(name, split))
    if (folder / _LATENTS).is_file():
        raise ValueError(
            f"{name} holds latents that cache-latents wrote, which cannot be read as images; give "
            "the data set that they were made of"
        )
    listing = list_folder(folder, wanted.leave_out, clips=wanted.clips)
    if source := _open_records(listing, wanted, name):
        return source
    shards = _shards(listing, wanted)
    tables = metadata_files(listing) if listing.images or not shards else []
    if listing.images and (tables or not shards):
        if shards:
            log.warning(
                "%s: %s and the images are read, and %d files such as %s are not; give them "
                "alone to read those",
                name,
                tables[0],
                len(shards),
                shards[0],
            )
        return _open_images(listing, wanted, name, configs)
    if not shards:
        if tables:
            # Its lines name images that are not there.
            return FolderSource.from_metadata(listing, wanted.columns, wanted.kinds)
        raise nothing_in(listing)
    if saved := _splits_on_disk(folder, shards):
        split = choose_split(shards, saved, wanted.split, name)
    else:
        split = pick_split(shards, configs, wanted.split, wanted.subset, name)
    _log_loose(name, split)
    return _open_shards([folder / path for path in split.files], wanted, Facts().of(name, split))


def _open_shards(shards: Sequence[Path], wanted: Wanted, facts: Facts) -> ArrowSource:
    columns, kinds = wanted.in_table(column_names(shards[0]))
    return ArrowSource.from_shards(shards, columns, kinds, facts)


def _open_records(
    listing: Listing, wanted: Wanted, name: str, file: str = ""
) -> FolderSource | None:
    """Opens edits in records that name their images by paths; None where there are none.

    file: the only one to read.
    """
    others = tuple(p for p in listing.others if p == file) if file else listing.others
    files: list[str] = []
    if (edits := wanted.only_edits) is not None:
        files = record_files(dataclasses.replace(listing, others=others), edits)
    if edits is None or not files:
        return None
    split = choose_split(files, find_splits(files), wanted.split, name)
    _log_loose(name, split)
    source = read_records(listing, split.files, edits, outside=wanted.own)
    return dataclasses.replace(source, facts=source.facts.of(name, split))


def _open_glob(path: str, wanted: Wanted) -> ArrowSource:
    anchor = Path(path).anchor
    found = sorted(Path(anchor or ".").glob(path.removeprefix(anchor)))
    shards = [file for file in found if file.is_file()]
    if not shards:
        raise ValueError(f"no file matches {path!r}")
    if strange := [file for file in shards if suffix_of(file.name) not in SHARD_SUFFIXES]:
        raise ValueError(
            f"{path!r} matches {strange[0]}, which is no Parquet file; a glob is for these alone, "
            "and images are given by their folder"
        )
    # The names of folders above the data set tell nothing of its splits.
    fixed = itertools.takewhile(lambda part: not any(c in part for c in "*?["), Path(path).parts)
    above = Path(*fixed)
    files = {file.relative_to(above).as_posix(): file for file in shards}
    names = list(files)
    splits = find_splits(names) if wanted.split not in (None, ALL) else {}
    split = choose_split(names, splits, wanted.split, path)
    return _open_shards([files[name] for name in split.files], wanted, Facts().of(path, split))


def _open_images(listing: Listing, wanted: Wanted, name: str, configs: Configs) -> FolderSource:
    """Opens images in files, those of the wanted splits."""
    whole = listing
    if not metadata_files(listing):
        listing = without_companions(listing)
    images = listing.images
    finder = _image_splits(images, wanted, name, configs)
    split = choose_split(images, finder(images), wanted.split, name)
    _log_loose(name, split)
    if left := {*images} - {*split.files}:
        listing = _without(listing, left, finder, split.name.split("+"))
    columns, kinds = wanted.columns, wanted.kinds
    if metadata_files(listing):
        source = FolderSource.from_metadata(listing, columns, kinds, leave_out=left)
    else:
        lines, edits = wanted.caption_lines, wanted.only_edits
        paired = None
        if edits is not None:
            paired = pair_folders(listing, edits, lines, all_images=whole.images)
        source = paired or FolderSource.from_names(listing, columns, kinds, lines=lines)
    return dataclasses.replace(source, facts=source.facts.of(name, split))


def _without(listing: Listing, left: Set[str], finder: Finder, names: Sequence[str]) -> Listing:
    """Returns a folder without some images, and without other splits' files beside them.

    names: the splits that are read.
    """
    of_others = finder(listing.others)
    theirs = {p for own, paths in of_others.items() if own not in names for p in paths}
    theirs -= {p for own in names for p in of_others.get(own, ())}
    images = tuple(path for path in listing.images if path not in left)
    return Listing(listing.folder, images, tuple(p for p in listing.others if p not in theirs))


def _image_splits(images: Sequence[str], wanted: Wanted, name: str, configs: Configs) -> Finder:
    """Chooses the function that finds the splits of images and of the files beside them.

    The names of folders tell splits if train is among them, or if they hold all images; the names
    of images only if they tell the splits of all, because "train at noon.png" shows a train.
    """
    if configs or wanted.subset is not None:
        of_card = find_splits(images, configs, wanted.subset)
        if of_card and any("data_files" in c or "data_dir" in c for c in configs):
            return lambda paths: find_splits(paths, configs, wanted.subset)
    found = by_folders(images)
    if found:
        covered = set().union(*found.values())
        if wanted.split not in (None, ALL) or TRAIN in found or len(covered) == len(images):
            return by_folders
        if wanted.split is None:
            log.warning(
                "%s: %s look like splits, and there is none for training beside %d other images, "
                "so all are read; data.split chooses",
                name,
                ", ".join(f"{split} ({len(own)} images)" for split, own in found.items()),
                len(images) - len(covered),
            )
    found = by_names(images) if by_names(images[:1]) else {}
    if len(found) > 1 and len(set().union(*found.values())) == len(images):
        return by_names
    return lambda paths: {}


def _log_loose(name: str, split: Split) -> None:
    """Logs the files that are not read because they belong to no split."""
    if split.loose:
        log.warning(
            "%s: %d files belong to no split and are not read, such as %s; data.split=%s reads all",
            name,
            len(split.loose),
            split.loose[0],
            ALL,
        )


def _shards(listing: Listing, wanted: Wanted) -> list[str]:
    """Returns the files with rows; beside images only those that hold images themselves."""
    metadata = set(listing.named(METADATA))
    # `datasets` keeps what its functions have computed beside the files that it saved.
    files = [
        path
        for path in listing.ending(SHARD_SUFFIXES)
        if not PurePosixPath(path).name.startswith(("cache-", "tmp"))
    ]
    if not listing.images:
        tables = [
            p for p in files if p in metadata and "file_name" in column_names(listing.folder / p)
        ]
        return [path for path in files if path not in tables]
    heads = {path.rpartition("/")[0]: path for path in reversed(files) if path not in metadata}
    with_images = {
        folder
        for folder, path in heads.items()
        if (names := column_names(listing.folder / path)) and wanted.in_table(names)[0][0] in names
    }
    return [p for p in files if p not in metadata and p.rpartition("/")[0] in with_images]


def _splits_on_disk(folder: Path, shards: Sequence[str]) -> dict[str, list[str]]:
    """Returns the splits of a folder that `DatasetDict.save_to_disk` wrote; none of others."""
    if not (folder / _SPLITS_ON_DISK).is_file():
        return {}
    names = load_json(folder / _SPLITS_ON_DISK).get("splits")
    if not isinstance(names, list):
        return {}
    found = {str(name): [p for p in shards if p.startswith(f"{name}/")] for name in names}
    return {name: own for name, own in found.items() if own}


def _card(folder: Path) -> Configs:
    """Returns the subsets in the card of a data set's folder."""
    file = folder / _CARD
    if not file.is_file():
        return ()
    try:
        card = huggingface_hub.metadata_load(file)
    # What stands at the head of a README need not be a card.
    except Exception as error:
        log.warning("%s is no card of a data set: %s", file, str(error).splitlines()[0])
        return ()
    configs = (card or {}).get("configs")
    return [c for c in configs if isinstance(c, dict)] if isinstance(configs, list) else ()


def _open_on_hub(path: str, wanted: Wanted) -> ArrowSource | FolderSource:
    """Downloads a Hub data set to the Hub's cache, those of its files that are read, and opens it.

    Without the Hub, what an earlier run has fetched is read.
    """
    reference = Reference.parse(path)
    if reference is None:
        raise ValueError(f"a Hub data set is called hf://datasets/owner/name (got {path!r})")
    with hub_errors(reference.repo, reference.revision):
        folder = huggingface_hub.snapshot_download(
            reference.repo,
            repo_type="dataset",
            revision=reference.revision,
            allow_patterns=[_CARD, *_patterns(reference, wanted)],
        )
    place, wanted = Path(folder) / reference.path, dataclasses.replace(wanted, own=False)
    if any(c in reference.path for c in "*?[") and not place.exists():
        source: ArrowSource | FolderSource = _open_glob(str(place), wanted)
    else:
        configs = () if reference.path else _card(Path(folder))
        source = _open_path(place, wanted, path, configs)
    return dataclasses.replace(source, facts=dataclasses.replace(source.facts, place=path))


def _patterns(reference: Reference, wanted: Wanted) -> list[str]:
    """Returns globs of the files to fetch: the shards of the wanted splits, or all that is read."""
    below = reference.path
    suffixes = (*IMAGE_SUFFIXES, *(VIDEO_SUFFIXES if wanted.clips else ()))
    fetched = (*suffixes, *_FETCHED, *METADATA)
    every = [f"*{name}" for one in fetched for name in (one, one.upper())]
    if below:
        every = [below, f"{below}/**"]
    if constants.HF_HUB_OFFLINE:
        return every
    try:
        dataset = open_dataset(reference.repo, reference.revision)
    except ValueError:
        # The download says why, or takes what an earlier run has fetched.
        return every
    paths = [file.path for file in dataset.files]
    if any(suffix_of(path) in suffixes for path in paths):
        return every
    shards = [path for path in paths if suffix_of(path) in SHARD_SUFFIXES]
    if not shards or _SPLITS_ON_DISK in paths:
        return every
    split = split_below(
        shards,
        dataset.configs,
        below=below,
        wanted=wanted.split,
        subset=wanted.subset,
        where=repr(reference.repo),
    )
    if not split.left and not split.loose:
        return every
    # A glob for many files, as each is compared with all files.
    return sorted({re.sub(r"\d+", "*", glob.escape(path)) for path in split.files})
