"""The files in a folder of pictures: pictures, captions beside them, and rows of metadata."""

import collections
import csv
import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

log = logging.getLogger(__name__)

MAX_CAPTION_FILE = 2**20
"""The largest size of a caption's file in bytes."""
# Not every Pillow comes with AVIF.
_AVIF = (".avif",) if ".avif" in Image.registered_extensions() else ()
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", *_AVIF)
_CAPTION_SUFFIX = ".txt"


def visible(folder: Path, files: Iterable[Path]) -> list[Path]:
    """Returns the files that are not hidden and in no hidden folder below the folder, sorted.

    Editors and operating systems leave copies there, such as .ipynb_checkpoints/a.png and ._a.jpg.
    """
    parts = ((file, file.relative_to(folder).parts) for file in files)
    return sorted(file for file, names in parts if not any(name[0] == "." for name in names))


def find_pictures(folder: Path, leave_out: str = "") -> list[Path]:
    """Returns the pictures at any depth of a folder, without hidden ones; logs its other files.

    leave_out: a folder that is not looked into, such as that of the run's results.

    Raises:
        ValueError: that folder is the data set's own.
    """
    results = _inside(folder, leave_out) if leave_out else None
    if results == folder:
        raise ValueError(
            f"{folder} is the data set and the run's output, whose pictures would become data; "
            "give another output, which may be a folder in it"
        )
    files = [
        file
        for file in visible(folder, folder.rglob("*"))
        if not file.is_dir() and not (results and file.is_relative_to(results))
    ]
    others = collections.Counter(file.suffix.lower() or "without an ending" for file in files)
    for suffix in (*IMAGE_SUFFIXES, _CAPTION_SUFFIX):
        del others[suffix]
    if others:
        kinds = ", ".join(f"{suffix} {count}" for suffix, count in sorted(others.items()))
        log.warning("%s has files that are not read: %s", folder, kinds)
    return [file for file in files if file.suffix.lower() in IMAGE_SUFFIXES]


def _inside(folder: Path, path: str) -> Path | None:
    """Returns the path as one below the folder; None where it is not."""
    root, resolved = folder.resolve(), Path(path).resolve()
    return folder / resolved.relative_to(root) if resolved.is_relative_to(root) else None


def captions_beside(pictures: Sequence[Path]) -> list[str] | None:
    """Reads the .txt files beside pictures; returns None where there are none.

    Raises:
        ValueError: only some pictures have such a file, or one of them holds no caption.
    """
    texts = [picture.with_suffix(_CAPTION_SUFFIX) for picture in pictures]
    present = [text.is_file() for text in texts]
    if not any(present):
        return None
    if not all(present):
        raise ValueError(
            f"{pictures[present.index(False)]} has no caption in a .txt file, and others have; "
            "write one for each picture"
        )
    large = next((text for text in texts if text.stat().st_size > MAX_CAPTION_FILE), None)
    if large is not None:
        raise ValueError(f"{large} is no caption: it has more than {MAX_CAPTION_FILE} bytes")
    return [_caption(text) for text in texts]


def metadata_rows(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the numbers of lines and the rows of a metadata.jsonl or .csv, without blank lines.

    Raises:
        ValueError: a line cannot be read.
    """
    try:
        yield from _csv_rows(file) if file.suffix == ".csv" else _json_rows(file)
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def _json_rows(file: Path) -> Iterator[tuple[int, Any]]:
    # Unlike splitlines, files split only at line ends, not at other separators inside a text.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line)
            except (json.JSONDecodeError, RecursionError) as error:
                raise ValueError(f"{file} line {number}: {error}") from None


def _csv_rows(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        yield from ((reader.line_num, row) for row in reader)


def _caption(file: Path) -> str:
    try:
        return file.read_text("utf-8-sig").strip()
    except UnicodeDecodeError:
        raise _not_utf8(file) from None


def _not_utf8(file: Path) -> ValueError:
    return ValueError(f"{file} is not text in UTF-8; save it as such")
