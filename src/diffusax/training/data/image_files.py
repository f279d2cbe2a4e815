"""The files in a folder of images: which are data, and which other programs left there."""

import collections
import dataclasses
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from PIL import Image

log = logging.getLogger(__name__)

# Not every Pillow comes with AVIF.
_AVIF = (".avif",) if ".avif" in Image.registered_extensions() else ()
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", *_AVIF)
VIDEO_SUFFIXES = (".mp4", ".mov", ".webm", ".mkv", ".avi", ".m4v")
"""The suffixes of videos, which are clips beside animated images."""
METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
"""The files that say what images of a folder show, as `datasets` names them; first the one that
wins where a folder has several."""
SHARD_SUFFIXES = (".parquet", ".arrow")
"""The suffixes of files with rows."""
ARCHIVES = (".tar", ".zip", ".gz", ".7z", ".rar")
"""The suffixes of files that have to be unpacked."""

# OneTrainer's masks and conditioning images, and what graphic programs and browsers write.
_MASK = re.compile(r"(.+)-(?:masklabel|condlabel)", re.IGNORECASE)
_COMPANION = re.compile(r"(.+)[-_.](?:mask|thumb|thumbnail|preview)", re.IGNORECASE)
_SIDE_FOLDERS = frozenset(
    [
        *("mask", "masks", "_controls", "conditioning", "conditioning_images", "reg", "@eadir"),
        *("sample", "samples", "preview", "previews"),
        *("thumb", "thumbs", "thumbnail", "thumbnails"),
    ]
)
"""The folders, in lower case, whose images other programs put beside those to learn."""
_HARMLESS = frozenset([".npz", ".safetensors", ".ini", ".db", ".ds_store", ".gitattributes"])
"""The suffixes of files beside images that nobody takes for data: caches, systems' own, notes."""


@dataclasses.dataclass(frozen=True)
class Listing:
    """The files of a folder, as sorted paths in it with slashes."""

    folder: Path
    images: tuple[str, ...]
    others: tuple[str, ...]
    """All files that are no images."""

    def named(self, names: Iterable[str]) -> list[str]:
        """Returns the files with one of these lower-case names, in any folder."""
        wanted = frozenset(names)
        return [path for path in self.others if PurePosixPath(path).name.lower() in wanted]

    def ending(self, suffixes: Sequence[str]) -> list[str]:
        """Returns the other files with one of these suffixes."""
        return [path for path in self.others if suffix_of(path) in suffixes]


def list_folder(folder: Path, leave_out: str = "", *, clips: bool = False) -> Listing:
    """Lists the files at any depth of a folder, without hidden ones.

    Hidden are names with a dot in front, such as .ipynb_checkpoints/a.png and ._a.jpg, and folders
    with two underscores in front, such as __MACOSX, as for `datasets`.

    Args:
        folder: the folder.
        leave_out: a folder that is not looked into, such as that of the run's results.
        clips: whether videos are among the images.

    Raises:
        ValueError: that folder is the data set's own.
    """
    results = _inside(folder, leave_out) if leave_out else None
    if results == folder:
        raise ValueError(
            f"{folder} is the data set and the run's output, whose images would become data; "
            "give another output, which may be a folder in it"
        )
    files = sorted(_walk(folder, results), key=lambda path: path.split("/"))
    suffixes = (*IMAGE_SUFFIXES, *(VIDEO_SUFFIXES if clips else ()))
    images = tuple(path for path in files if suffix_of(path) in suffixes)
    return Listing(folder, images, tuple(p for p in files if suffix_of(p) not in suffixes))


def without_companions(listing: Listing) -> Listing:
    """Returns a folder without the images that other programs put beside those to learn.

    The log names them.

    They are masks (a-masklabel.png, a_mask.png beside a.png), thumbnails and previews, and the
    images in folders such as masks, samples or thumbnails that have others beside them.
    """
    inside = [path for path in listing.images if not _in_side_folder(path)]
    kept = inside or list(listing.images)
    stems = {path.rpartition(".")[0].lower() for path in kept}
    images = [path for path in kept if not _is_companion(path, stems)] or kept
    chosen = set(images)
    if aside := [path for path in listing.images if path not in chosen]:
        log.warning(
            "%s: %d images are not read, as they look like masks, thumbnails or samples of other "
            "programs, such as %s; to read them, give their folder as the data set, or name them "
            "in a %s",
            listing.folder,
            len(aside),
            aside[0],
            METADATA[0],
        )
    return dataclasses.replace(listing, images=tuple(images))


def log_unread(folder: Path, paths: Iterable[str]) -> None:
    """Logs the kinds of files that are not read, except those that nobody takes for data."""
    others = collections.Counter(suffix_of(path) or "without an ending" for path in paths)
    kinds = [f"{suffix} {n}" for suffix, n in sorted(others.items()) if suffix not in _HARMLESS]
    if kinds:
        log.warning("%s has files that are not read: %s", folder, ", ".join(kinds))


def suffix_of(path: str) -> str:
    """Returns the suffix of a path in lower case."""
    return PurePosixPath(path).suffix.lower()


def stem_of(path: str) -> str:
    """Returns the name of a path without its suffix."""
    return PurePosixPath(path).stem


def _walk(folder: Path, leave_out: Path | None) -> Iterator[str]:
    seen: set[tuple[int, int]] = set()
    for place, folders, files in os.walk(folder, followlinks=True):
        below, stat = Path(place), os.stat(place)
        if (stat.st_dev, stat.st_ino) in seen:
            # Links may lead around in a circle, or to one folder twice.
            folders.clear()
            continue
        seen.add((stat.st_dev, stat.st_ino))
        folders[:] = sorted(
            name
            for name in folders
            if not name.startswith((".", "__")) and (not leave_out or below / name != leave_out)
        )
        start = below.relative_to(folder).as_posix()
        start = "" if start == "." else f"{start}/"
        yield from (start + name for name in files if not name.startswith("."))


def _inside(folder: Path, path: str) -> Path | None:
    """Returns the path as one below the folder; None where it is not."""
    root, resolved = folder.resolve(), Path(path).resolve()
    return folder / resolved.relative_to(root) if resolved.is_relative_to(root) else None


def _in_side_folder(path: str) -> bool:
    return any(part.lower() in _SIDE_FOLDERS for part in path.split("/")[:-1])


def _is_companion(path: str, stems: set[str]) -> bool:
    """Returns whether an image is another one's mask, thumbnail or preview. stems: lower case."""
    stem = path.rpartition(".")[0]
    if _MASK.fullmatch(stem):
        return True
    found = _COMPANION.fullmatch(stem)
    return found is not None and found[1].lower() in stems


def not_utf8(file: Path) -> ValueError:
    """Returns the error of a text file in another encoding."""
    return ValueError(f"{file} is not text in UTF-8; save it as such")


def nothing_in(listing: Listing) -> ValueError:
    """Returns the error of a folder without anything that is read."""
    kinds = collections.Counter(suffix_of(p) or "without an ending" for p in listing.others)
    there = ", ".join(f"{kind} {count}" for kind, count in sorted(kinds.items()))
    mend = "; unpack the archives first" if any(kind in ARCHIVES for kind in kinds) else ""
    return ValueError(
        f"{listing.folder} holds neither Parquet files, nor {', '.join(METADATA)}, nor images "
        f"(it has {there or 'no files'}){mend}"
    )
