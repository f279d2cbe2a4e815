"""Captions of images without metadata: text files beside them, and what other trainers write.

The rules are those of kohya's sd-scripts (train_util.py, config_util.py), ai-toolkit
(dataloader_mixins.py), OneTrainer and img2dataset.
"""

import collections
import dataclasses
import json
import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from diffusax.boundary.files import unique_keys
from diffusax.training.data.image_files import (
    METADATA,
    Listing,
    log_unread,
    not_utf8,
    stem_of,
    suffix_of,
)

log = logging.getLogger(__name__)

Lines = Literal["first", "any", "all"]
"""What a caption's file of several lines says: its first line, as in sd-scripts; any, drawn anew
each time, as in OneTrainer; or all as one caption, as in ai-toolkit."""

MAX_CAPTION_FILE = 2**20
"""The largest size of a caption's file in bytes."""
_MAX_TABLE = 2**28
"""The largest size in bytes of a JSON file with all captions."""
_TEXTS = (".txt", ".caption", ".cap", ".tags")
"""The suffixes of files with a caption; first the one that wins where an image has several."""
CAPTION_SUFFIXES = (*_TEXTS, ".json")
"""The suffixes of files that may hold an image's caption."""
_FOLDERS = frozenset(["captions", "caption", "texts", "text", "txt", "tags", "prompts"])
"""Folders, in lower case, that hold captions apart from the images."""
_KEYS = ("caption", "text", "prompt", "tags", "tag_string")
"""The names under which JSON files have an image's caption; first the one that wins."""
_DEFAULT = "default"
"""The name of ai-toolkit's file with the caption of all images in a folder that have none."""
_REPEATED = re.compile(r"(\d+)_(.+)")
"""sd-scripts' folders: how often their images come, and the caption of those without one."""
_BOXES = re.compile(r"(?:\d+(?:\s+[-+.\deE]+){4,}\s*)+")
"""The boxes of an object detector, as YOLO's text files have them."""
_TABLES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".xlsx")
_NOT_CAPTIONS = re.compile(
    r"(?:.*_stats|class|config|dataset_infos?|dataset_dict|state|model_index|manifest)\.json|"
    r"(?:readme|licen[cs]e|notes|requirements|log|info)[^/]*\.txt",
    re.IGNORECASE,
)
"""Files that hold no captions whatever they look like."""


@dataclasses.dataclass(frozen=True)
class Captions:
    """The captions of images, and where they come from."""

    texts: tuple[Any, ...]
    """A text for each image, or a list from which one is drawn each time."""
    sources: dict[str, int]
    """The number of images by the kind of their caption's source."""


def read_captions(
    listing: Listing, column: str, lines: Lines, *, may_lack: bool = False
) -> Captions:
    """Returns the captions of a folder's images: from files beside them, or else their names.

    Args:
        listing: the folder.
        column: the name of the captions in JSON files, besides usual ones.
        lines: what a file of several lines says.
        may_lack: whether images without a caption have None where others have one.

    Raises:
        ValueError: only some images have a caption, a file with one cannot be read, or captions
            seem to be in files that are not read; says what to do.
    """
    images = listing.images
    found = _Beside(listing, column, lines)
    texts: list[Any] = [found.caption(image) for image in images]
    used = found.used
    if not any(text is not None for text in texts):
        texts, used = _from_table(listing, images)
    missing = [image for image, text in zip(images, texts) if text is None]
    if some := 0 < len(missing) < len(images):
        found.sources["nothing"] = len(missing)
    if some and not may_lack:
        raise ValueError(
            f"{listing.folder / missing[0]} has no caption in a {_TEXTS[0]} file, and others have "
            f"({len(missing)} of {len(images)} images have none); write one for each image, "
            "which may be empty"
        )
    unread = [path for path in listing.others if path not in used]
    if missing and not some:
        _refuse_what_looks_like_captions(listing, unread)
        texts = [stem_of(image) for image in images]
        found.sources["file names"] = len(images)
        log.warning(
            "%s has no captions; the names of the files serve as such, such as %r",
            listing.folder,
            texts[0],
        )
    elif not found.sources.keys() - {"nothing"}:
        found.sources[", ".join(sorted(used))] = len(images) - len(missing)
    else:
        found.log_notes(unread)
    log_unread(listing.folder, [p for p in unread if suffix_of(p) not in _TEXTS])
    return Captions(tuple(texts), dict(found.sources))


class _Beside:
    """The captions' files beside images, and how many of each kind were read."""

    def __init__(self, listing: Listing, column: str, lines: Lines):
        self.folder, self.lines = listing.folder, lines
        self.keys = tuple(dict.fromkeys([column, *_KEYS]))
        self.exact = frozenset(listing.others)
        self.lower = {path.lower(): path for path in listing.others}
        # Otherwise a million images would be looked for in folders that are not there.
        self.apart = sorted({f for path in listing.others for f in _caption_folders(path)})
        self.sources: collections.Counter[str] = collections.Counter()
        self.used: set[str] = set()
        self.several: dict[str, int] = {}
        """The files of several lines, by the number of lines."""
        self.passed_over: list[str] = []
        """Further files with a caption of an image that has one."""
        self.repeats: set[str] = set()

    def caption(self, image: str) -> Any:
        """Returns the caption of an image; None where there is none."""
        files = list(self._files(image))
        for i, (file, kind) in enumerate(files):
            text = self._json(file) if suffix_of(file) == ".json" else self._text(file)
            if text is None:
                continue
            self.used.update(other for other, _ in files)
            self.passed_over += [f for f, _ in files[i + 1 :] if suffix_of(f) in _TEXTS]
            self.sources[kind] += 1
            return text
        parent = image.rpartition("/")[0]
        for suffix in _TEXTS:
            if default := self._named(f"{parent}/{_DEFAULT}{suffix}".lstrip("/")):
                self.used.add(default)
                self.sources[f"{_DEFAULT}{suffix}"] += 1
                return self._text(default)
        repeated = _REPEATED.fullmatch(parent.rpartition("/")[2] or self.folder.name)
        if repeated:
            self.repeats.add(repeated[0])
            self.sources["names of folders"] += 1
            return repeated[2]
        return None

    def log_notes(self, unread: Sequence[str]) -> None:
        """Logs the choices that were made among several ways to read the captions."""
        if self.several:
            meaning = {
                "first": "the first is the caption, as in sd-scripts; data.caption_lines=any draws "
                "one each time, =all takes all",
                "any": "one is drawn each time",
                "all": "all are one caption",
            }[self.lines]
            log.warning(
                "%s: %d captions have several lines, such as %s; %s",
                self.folder,
                len(self.several),
                next(iter(self.several)),
                meaning,
            )
        if self.passed_over:
            log.warning(
                "%s: %d files are not read because their image has another caption, such as %s; "
                "the order is %s: remove those that are not meant",
                self.folder,
                len(self.passed_over),
                self.passed_over[0],
                ", ".join(CAPTION_SUFFIXES),
            )
        orphans = [path for path in unread if suffix_of(path) in _TEXTS]
        if orphans:
            log.warning(
                "%s: %d files with a caption have no image of their name, such as %s",
                self.folder,
                len(orphans),
                orphans[0],
            )
        if self.repeats:
            log.warning(
                "%s has folders named as for sd-scripts, such as %s: what follows the number is "
                "the caption of images without one, and the number, their repeats, is not used; "
                "list an image several times in a %s to have it more often",
                self.folder,
                sorted(self.repeats)[0],
                METADATA[0],
            )

    def _files(self, image: str) -> Iterator[tuple[str, str]]:
        """Yields the files that may hold an image's caption, each with its kind."""
        for base in (image.rpartition(".")[0], image):
            for suffix in CAPTION_SUFFIXES:
                if file := self._named(base + suffix):
                    yield file, f"{suffix} files"
        for place in self.apart:
            for base in _apart(image, place):
                for suffix in CAPTION_SUFFIXES:
                    if file := self._named(base + suffix):
                        yield file, f"{suffix} files in {place}"

    def _named(self, path: str) -> str | None:
        return path if path in self.exact else self.lower.get(path.lower())

    def _text(self, file: str) -> Any:
        text = read_text_file(self.folder / file)
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        if len(lines) > 1:
            if _BOXES.fullmatch(text):
                raise ValueError(
                    f"{self.folder / file} is no caption, but boxes of an object detector; move "
                    "such files elsewhere"
                )
            self.several[file] = len(lines)
            if self.lines == "any":
                return lines
        return " ".join(lines) if self.lines == "all" else next(iter(lines), "")

    def _json(self, file: str) -> Any:
        """Returns the caption in an image's JSON file; None where there is none in it."""
        if (self.folder / file).stat().st_size > MAX_CAPTION_FILE:
            return None
        try:
            data = json.loads(read_text_file(self.folder / file), object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{self.folder / file} is not JSON ({error}); mend it, or move it elsewhere"
            ) from None
        return _caption_in(data, self.keys, str(self.folder / file))


def read_text_file(file: Path) -> str:
    """Reads a caption's file.

    Raises:
        ValueError: it is too large, or not UTF-8.
    """
    if file.stat().st_size > MAX_CAPTION_FILE:
        raise ValueError(f"{file} is no caption: it has more than {MAX_CAPTION_FILE} bytes")
    try:
        return file.read_text("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise not_utf8(file) from None


def _caption_in(data: Any, keys: Sequence[str], where: str) -> Any:
    """Returns the caption in a JSON object: a text, a list of captions, or tags with commas."""
    if not isinstance(data, dict):
        return None
    for key in keys:
        value = data.get(key)
        if value is None:
            continue
        if isinstance(value, str):
            return value.strip()
        if isinstance(value, list) and all(isinstance(part, str) for part in value):
            return ", ".join(value) if key == "tags" else value or ""
        raise ValueError(f"{where}: {key} must be a text (got {str(value)[:60]})")
    return "" if any(key in data for key in keys) else None


def _caption_folders(path: str) -> Iterator[str]:
    parts = path.split("/")[:-1]
    yield from (
        "/".join(parts[: i + 1]) for i, part in enumerate(parts) if part.lower() in _FOLDERS
    )


def _apart(image: str, place: str) -> Iterator[str]:
    """Yields the paths that an image's caption may have in a folder, without the suffix.

    It is captions/1 for images/1.png, 1.png and images/captions for images/1.png; folders in
    between are the same.
    """
    parts = image.rpartition(".")[0].split("/")
    around = place.split("/")[:-1]
    if parts[: len(around)] != around:
        return
    rest = parts[len(around) :]
    yield "/".join([place, *rest])
    if len(rest) > 1:
        yield "/".join([place, *rest[1:]])


def _from_table(listing: Listing, images: Sequence[str]) -> tuple[list[str | None], set[str]]:
    """Returns the captions in a JSON file of all images, and the file's name.

    It is sd-scripts' metadata (merge_captions_to_metadata.py, merge_dd_tags_to_metadata.py) or
    ai-toolkit's: {"1.png": {"caption": "a cat", "tags": "cat, sofa"}}; or {"1.png": "a cat"}.
    """
    none: list[str | None] = [None] * len(images)
    tables = {
        path: table
        for path in listing.ending((".json",))
        if "/" not in path and not _NOT_CAPTIONS.fullmatch(path)
        if (table := _json_table(listing.folder / path)) is not None
    }
    if not tables:
        return none, set()
    if len(tables) > 1:
        raise ValueError(
            f"{listing.folder} has captions in {' and '.join(tables)}; leave one of them there"
        )
    ((path, table),) = tables.items()
    where = f"{listing.folder / path}"
    found = {_key(name): _table_caption(entry, where) for name, entry in table.items()}
    texts = []
    for image in images:
        names = [image, image.rpartition(".")[0], image.rpartition("/")[2], stem_of(image)]
        names.insert(0, _key(str((listing.folder / image).absolute())))
        texts.append(next((found[key] for n in names if (key := _key(n)) in found), None))
    if not any(text is not None for text in texts):
        # sd-scripts' whole paths may be those of another machine.
        last = {name.rpartition("/")[2]: text for name, text in found.items()}
        texts = [last.get(_key(image.rpartition("/")[2])) for image in images]
    if not any(text is not None for text in texts):
        return none, set()
    return texts, {path}


def _json_table(file: Path) -> dict[str, Any] | None:
    """Returns a JSON object whose values are captions or objects with one; None for other files."""
    if file.stat().st_size > _MAX_TABLE:
        return None
    try:
        data = json.loads(file.read_text("utf-8-sig"), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not data:
        return None
    entries = list(data.values())
    texts = all(isinstance(entry, str) for entry in entries)
    objects = all(isinstance(entry, dict) for entry in entries)
    captions = objects and any("caption" in entry or "tags" in entry for entry in entries)
    return data if texts or captions else None


def _table_caption(entry: Any, where: str) -> str:
    """Returns the caption of an entry; its tags follow after a comma, as in sd-scripts."""
    if isinstance(entry, str):
        return entry.strip()
    parts = [entry.get("caption"), entry.get("tags")]
    if any(part is not None and not isinstance(part, str) for part in parts):
        raise ValueError(f"{where}: caption and tags must be texts (got {str(entry)[:60]})")
    return ", ".join(filter(None, parts))


def _key(name: str) -> str:
    return name.replace("\\", "/").removeprefix("./").lower()


def _refuse_what_looks_like_captions(listing: Listing, unread: Sequence[str]) -> None:
    """Raises ValueError where images have no caption and files that are not read may hold them."""
    images = listing.images[:10]
    suspects = [
        path
        for path in unread
        if suffix_of(path) in (*_TABLES, *_TEXTS)
        and not _NOT_CAPTIONS.fullmatch(path.rpartition("/")[2])
        and not (suffix_of(path) == ".json" and not _speaks_of(listing.folder / path, images))
    ]
    if not suspects:
        return
    many = f" and {len(suspects) - 1} more files" if len(suspects) > 1 else ""
    image = listing.images[0]
    raise ValueError(
        f"{listing.folder} has {suspects[0]}{many}, which may hold captions and fit no image; "
        f"write {stem_of(image)}{_TEXTS[0]} beside {image} and so on, or a {METADATA[0]} with "
        '{"file_name": "' + image + '", "text": "..."} for each; or move them elsewhere, and the '
        "names of the images are the captions"
    )


def _speaks_of(file: Path, images: Sequence[str]) -> bool:
    """Returns whether a JSON file mentions captions, or one of these images."""
    with file.open("rb") as opened:
        start = opened.read(MAX_CAPTION_FILE)
    return b"caption" in start or any(
        image.rpartition("/")[2].encode() in start for image in images
    )
