"""Images in files of their own, with their columns: a folder with metadata, or with captions."""

import collections
import dataclasses
import itertools
import json
import logging
import unicodedata
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from diffusax.boundary.files import csv_rows, unique_keys
from diffusax.boundary.messages import require_extra
from diffusax.training.data.captions import CAPTION_SUFFIXES, Lines, read_captions
from diffusax.training.data.image_files import METADATA, Listing, log_unread, not_utf8
from diffusax.training.data.sources import (
    MAX_BROKEN,
    Facts,
    Kind,
    as_list,
    check_columns,
    path_inside,
)

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """Image files with their columns."""

    folder: str
    rows: tuple[dict[str, Any], ...]
    files: tuple[dict[str, Any], ...]
    """For each column, the names of an image's files in the folder: one, or a list."""
    facts: Facts = dataclasses.field(default_factory=Facts, compare=False)

    @classmethod
    def from_metadata(
        cls,
        listing: Listing,
        columns: Sequence[str],
        kinds: Mapping[str, Kind] | None = None,
        leave_out: Set[str] = frozenset(),
    ) -> "FolderSource":
        """Reads the rows of all metadata files in a folder, like `datasets`' ImageFolder.

        file_name is the image in the first column, x_file_name one in the column x, and
        x_file_names a list of them. Names are those of files in the folder of the metadata.

        Args:
            listing: the folder.
            columns: the columns to read.
            kinds: what columns hold, which is checked for each row; others may hold anything.
            leave_out: images whose rows are left out, as those of other splits.

        Raises:
            ValueError: a line cannot be read, or lacks a column; or more than one row in a hundred
                names a file that is not there.
        """
        rows, files, missing = [], [], list[str]()
        known, counts = _Files(listing), collections.Counter[str]()
        for table in metadata_files(listing):
            below = table.rpartition("/")[0]
            for where, row in metadata_rows(listing.folder / table):
                names = _names_of(where, row, columns)
                found, lost = known.find_all(where, below, names)
                _check_row(where, row, names, columns, kinds or {})
                if lost:
                    missing.append(f"{where} names {lost[0]!r}")
                    continue
                if as_list(next(iter(found.values())))[0] in leave_out:
                    continue
                rows.append(row)
                files.append(found)
                counts[table] += 1
        count = len(rows) + len(missing)
        if not count:
            raise ValueError(f"{listing.folder / metadata_files(listing)[0]} has no rows")
        known.log_notes(missing, count)
        _log_passed_over(listing)
        named = {name for found in files for cell in found.values() for name in as_list(cell)}
        _log_unnamed(listing, named, files)
        return cls(str(listing.folder), tuple(rows), tuple(files), Facts(captions=dict(counts)))

    @classmethod
    def from_names(
        cls,
        listing: Listing,
        columns: Sequence[str],
        kinds: Mapping[str, Kind] | None = None,
        *,
        lines: Lines = "first",
    ) -> "FolderSource":
        """Finds images with their captions in files beside them, or in their names.

        Args:
            listing: the folder; all images of it are read.
            columns: the columns to read: images, and perhaps their captions.
            kinds: what columns hold, where that is known.
            lines: what files of several lines say; see `captions`.

        Raises:
            ValueError: there are no images, only some of them have a caption, or more columns are
                asked for than an image and its caption.
        """
        folder, images = listing.folder, listing.images
        image_column, *others = columns

        def of_images(column: str) -> bool:
            return (kinds or {}).get(column, "").startswith("image")

        if more := [c for c in others if of_images(c)] or others[1:]:
            keys = [f"{c}_file_name" if of_images(c) else c for c in more]
            raise ValueError(
                f"{folder} holds images with captions at most, and nothing of "
                f"{' and '.join(map(repr, more))}; name each by {' and '.join(keys)} in a "
                f"{METADATA[0]}, with the image's file_name"
            )
        facts = Facts()
        texts: Sequence[Any] = ()
        if others:
            may_lack = (kinds or {}).get(others[0]) == "text or none"
            captions = read_captions(listing, others[0], lines, may_lack=may_lack)
            texts, facts = captions.texts, Facts(captions=captions.sources)
        else:
            texts_beside = listing.ending(CAPTION_SUFFIXES)
            if texts_beside:
                log.info(
                    "%s: %d files such as %s are not read, as no column of captions is asked for",
                    folder,
                    len(texts_beside),
                    texts_beside[0],
                )
            beside = {*texts_beside}
            log_unread(folder, [path for path in listing.others if path not in beside])
        rows = tuple(dict.fromkeys(others, text) for text in texts) or ({},) * len(images)
        cells = tuple({image_column: image} for image in images)
        return cls(str(folder), rows, cells, facts)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cells = {column: self._cells(names) for column, names in self.files[index].items()}
        return {**self.rows[index], **cells}

    def name(self, index: int) -> str:
        """Returns the image's file, or the first of several, for messages."""
        first = next(iter(self.files[index].values()))
        return str(Path(self.folder) / as_list(first)[0])

    def _cells(self, names: Any) -> Any:
        if isinstance(names, list):
            return [self._cells(name) for name in names]
        return {"path": str(Path(self.folder) / names), "bytes": None}


def metadata_files(listing: Listing) -> list[str]:
    """Returns the metadata files in a folder, one of each folder in it: the first of `METADATA`."""
    found: dict[str, str] = {}
    for path in sorted(listing.named(METADATA), key=_rank):
        found.setdefault(path.rpartition("/")[0], path)
    return sorted(found.values(), key=lambda path: path.split("/"))


def _rank(path: str) -> int:
    return METADATA.index(path.rpartition("/")[2].lower())


def _log_passed_over(listing: Listing) -> None:
    """Logs the metadata files that are not read because another one is beside them."""
    read = metadata_files(listing)
    for path in listing.named(METADATA):
        if path not in read:
            log.warning(
                "%s: %s is not read, as another metadata file beside it is; leave one of them",
                listing.folder,
                path,
            )


class _Files:
    """Finds files by their names in metadata, which Windows may have written."""

    def __init__(self, listing: Listing):
        self.folder = listing.folder
        self.exact = frozenset(itertools.chain(listing.images, listing.others))
        self.alike: dict[str, list[str]] = {}
        for path in listing.images:
            self.alike.setdefault(_folded(path), []).append(path)
        self.respelt: list[str] = []
        """The lines whose name is another one in upper or lower case, or in Unicode's form."""

    def find_all(
        self, where: str, below: str, names: Mapping[str, Any]
    ) -> tuple[dict[str, Any], list[str]]:
        """Returns the files of a row by column, and the names of those that are not there.

        below: the folder of the metadata.
        """
        found, lost = {}, []
        for column, cell in names.items():
            paths = [(name, self._find(where, below, name)) for name in as_list(cell)]
            lost += [name for name, path in paths if path is None]
            found[column] = [p for _, p in paths] if isinstance(cell, list) else paths[0][1]
        return found, lost

    def _find(self, where: str, below: str, name: str) -> str | None:
        try:
            inside = path_inside(self.folder / below, name).relative_to(self.folder).as_posix()
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        if inside in self.exact or (self.folder / inside).is_file():
            return inside
        paths = self.alike.get(_folded(inside.replace("\\", "/")), [])
        if len(paths) != 1:
            return None
        if paths[0] != inside.replace("\\", "/"):
            self.respelt.append(f"{where} ({name!r} for {paths[0]!r})")
        return paths[0]

    def log_notes(self, missing: Sequence[str], count: int) -> None:
        """Logs the rows whose file has another spelling or is not there.

        missing: the rows whose file is not there. count: the number of all rows.

        Raises:
            ValueError: they are more than one in a hundred.
        """
        if self.respelt:
            log.warning(
                "%d file names differ from the files' own in upper and lower case, such as in %s",
                len(self.respelt),
                self.respelt[0],
            )
        if missing:
            text = f"{missing[0]}, which is not there ({len(missing)} of {count} rows do so)"
            if len(missing) > MAX_BROKEN * count:
                raise ValueError(f"{text}; bring the files, or remove the lines")
            log.warning("%s; these are left out", text)


def _folded(path: str) -> str:
    # A Mac's names are decomposed, and Windows' ones are alike in upper and lower case.
    return unicodedata.normalize("NFC", path).casefold()


def _names_of(where: str, row: Any, columns: Sequence[str]) -> dict[str, Any]:
    """Removes the names of images from a row of metadata and returns them by column."""
    if not isinstance(row, dict):
        raise ValueError(f"{where} must be a row with a file_name (got {str(row)[:60]})")
    keys = [(columns[0], "file_name")]
    keys += [(c, f"{c}_{ending}") for c in columns for ending in ("file_name", "file_names")]
    present = [(column, key) for column, key in keys if row.get(key) not in (None, "")]
    names = {column: row.pop(key) for column, key in present}
    if len(names) < len(present):
        twice = [key for _, key in present]
        raise ValueError(f"{where} has {' and '.join(twice)} for one column; leave one of them")
    every = [name for value in names.values() for name in as_list(value)]
    if not every or not all(isinstance(name, str) and name for name in every):
        raise ValueError(
            f"{where} must be a row with a file_name, which names its image (it has "
            f"{', '.join(map(str, [*row, *(key for _, key in present)])) or 'nothing'})"
        )
    return names


def _check_row(
    where: str,
    row: Mapping[str, Any],
    names: Mapping[str, Any],
    columns: Sequence[str],
    kinds: Mapping[str, Kind],
) -> None:
    """Raises ValueError where a row lacks a column, or has something else in it."""
    optional = [column for column in columns if kinds.get(column, "").endswith("or none")]
    check_columns(columns, {*row, *names, *optional}, where)
    for column in columns:
        cell, kind = row.get(column), kinds.get(column)
        if column in names:
            if kind in ("text", "text or none"):
                raise ValueError(f"{where} names files in {column!r}, which must be a text")
            continue
        if kind == "image or none" and cell is None:
            continue
        if (kind or "").startswith("image") or any(
            isinstance(part, dict) for part in as_list(cell)
        ):
            raise ValueError(
                f"{where} must name its images by {column}_file_name, a path in the metadata's "
                f"folder (got {column}: {str(cell)[:60]})"
            )
        if kind not in ("text", "text or none"):
            continue
        parts, may_lack = as_list(cell), kind == "text or none"
        texts = all(isinstance(part, str) or (part is None and may_lack) for part in parts)
        if not texts or not (parts or may_lack):
            got = "null" if cell is None else str(cell)[:60]
            raise ValueError(
                f"{where}: {column} must be a text, or a list of texts (got {got}); an image "
                'without a caption has ""'
            )


def _log_unnamed(listing: Listing, named: set[str], files: Sequence[Mapping[str, Any]]) -> None:
    unnamed = [image for image in listing.images if image not in named]
    if unnamed:
        log.warning(
            "%s: %d images are not read, as no line of the metadata names them, such as %s",
            listing.folder,
            len(unnamed),
            unnamed[0],
        )
    first = collections.Counter(tuple(map(str, row.values())) for row in files)
    if repeated := [names for names, count in first.items() if count > 1]:
        log.warning(
            "%s: %d images are named by several lines of the metadata, each of which is an "
            "example, such as %s",
            listing.folder,
            len(repeated),
            repeated[0][0],
        )


def metadata_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the places and the rows of a metadata file, without blank lines.

    Raises:
        ValueError: a line cannot be read, or not wholly; names it and says what to do.
    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".parquet": _parquet_rows}
    try:
        yield from readers[file.suffix.lower()](file)
    except UnicodeDecodeError:
        raise not_utf8(file) from None


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    # Unlike splitlines, files split only at line ends, not at other separators inside a text.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                yield where, json.loads(line, object_pairs_hook=unique_keys)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: {error}; each line must be one JSON object") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, row in csv_rows(file, ("file_name", "file_names")):
        yield f"{file} line {number}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = require_extra("pyarrow", "train")
    parquet = require_extra("pyarrow.parquet", "train")
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{file} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from None
