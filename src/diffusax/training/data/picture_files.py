"""The files in a folder of pictures: pictures, captions beside them, and rows of metadata."""

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

MAX_CAPTION_FILE = 2**20
"""The largest size of a caption's file in bytes."""
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")
_CAPTION_SUFFIX = ".txt"


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
    """Yields the numbers of lines and the rows of a metadata.jsonl or .csv.

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
