"""Edits in records that name their images by paths: JSON, JSON lines, and Parquet without images.

The layouts are those of the data sets' own descriptions: the card of UCSC-VLAA/GPT-Image-Edit-1.5M
(a folder `metadata` beside `input` and `output`), the README of apple/pico-banana-400k with its
map_openimage_url_to_local.py, musubi-tuner's docs/dataset_config.md, and the Parquet files of
sysuyy/ImgEdit.
"""

import dataclasses
import functools
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from diffusax.training.data.edits import EditColumns
from diffusax.training.data.folders import FolderSource, metadata_rows
from diffusax.training.data.image_files import Listing, not_utf8, suffix_of
from diffusax.training.data.sources import MAX_BROKEN, Facts, as_list, columns_of_paths

log = logging.getLogger(__name__)

_TURNS = "metadata_edit_turn_prompts"
"""Pico-Banana's instructions of several turns."""
_PICO = ("local_input_image", "files", _TURNS)
_DATA = "data"
"""ImgEdit's turns, each with the names of its rows of one turn."""
_ROOTS = ("", "Singleturn", "Multiturn")
"""The folders below the data set's own in which ImgEdit's images are."""
_HEAD = 2**16
"""The number of characters that are read of a JSON file to see what it holds."""
_FEW = 16
"""Folders with more JSON files than this hold captions, or notes on each image."""


class _Edit(NamedTuple):
    originals: list[str]
    """The paths of the images to look at."""
    prompt: Any
    """The instruction, or several of which one is drawn each time."""
    edited: str | None
    """The path of the image after the edit."""
    mask: str | None = None
    """The path of its mask."""


def record_files(listing: Listing, columns: EditColumns) -> list[str]:
    """Returns the files of a folder whose records are edits that name their images by paths."""
    shards = listing.ending((".parquet",))
    if shards and _holds_paths(listing.folder / shards[0], columns):
        return [path for path in shards if _holds_paths(listing.folder / path, columns)]
    files = []
    for _, own in itertools.groupby(
        listing.ending((".json", ".jsonl")), lambda path: (path.rpartition("/")[0], suffix_of(path))
    ):
        few = list(own)
        if len(few) <= _FEW or suffix_of(few[0]) == ".jsonl":
            files += [path for path in few if _is_edit(_first(listing.folder / path), columns)]
    return files


def read_records(
    listing: Listing, files: Sequence[str], columns: EditColumns, *, outside: bool
) -> FolderSource:
    """Reads the edits of record files; those of several turns are an edit each.

    Paths are looked for from the folder of the record's file, then from those above it up to the
    data set's own, and then from where the program runs. In the rows, the columns have the names
    that were asked for.

    Args:
        listing: the folder.
        files: those of `record_files`.
        columns: the columns as they are asked for.
        outside: whether paths may lead out of the folder, as those of a person's own data do.

    Raises:
        ValueError: a record cannot be read; or more than one in a hundred lacks its instruction, or
            names a file that is not there.
    """
    places = _Places(listing, outside)
    archives = any(".tar" in path or path.endswith(".zip") for path in listing.others)
    left = _Left(archives, columns.optional, bool(columns.masks))
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    for path in files:
        below, before = path.rpartition("/")[0], len(rows)
        for where, record in _records(listing.folder / path):
            for edit in _edits(record, columns):
                found = left.count(where, edit, places, below)
                if found is not None:
                    rows.append({columns.prompt: edit.prompt})
                    names = (columns.edited, columns.originals[0], columns.masks)
                    cells.append({name: own for name, own in zip(names, found) if name})
        counts[PurePosixPath(path).name] = len(rows) - before
    left.check(listing.folder)
    return FolderSource(str(listing.folder), tuple(rows), tuple(cells), Facts(captions=counts))


class _Places:
    """Finds the files that records name."""

    def __init__(self, listing: Listing, outside: bool):
        self.folder, self.outside = listing.folder, outside
        self.exact = frozenset(listing.images)

    def find(self, below: str, name: str) -> str | None:
        """Returns a file's path in the data set's folder, or its whole path; None without one.

        below: the folder of the record's file.
        """
        folder = PurePosixPath(below)
        above = [str(folder), *map(str, folder.parents)] if below else []
        for base in dict.fromkeys([*above, *_ROOTS]):
            inside = os.path.normpath(os.path.join(base, name.replace("\\", "/")))
            if inside in self.exact:
                return inside
        if not self.outside:
            return None
        whole = next((p for p in (self.folder / below / name, Path(name)) if p.is_file()), None)
        return None if whole is None else os.path.abspath(whole)


@dataclasses.dataclass
class _Left:
    """The edits that are left out, with why."""

    archives: bool
    """Whether archives are beside them, which may hold the images."""
    optional: bool = False
    """Whether edits may lack all images to look at."""
    masked: bool = False
    """Whether they need a mask."""
    total: int = 0
    broken: int = 0
    absent: int = 0
    """The edits whose records say themselves that an image is not there."""
    reasons: list[str] = dataclasses.field(default_factory=list)

    def count(
        self, where: str, edit: _Edit, places: _Places, below: str
    ) -> tuple[str, list[str], str] | None:
        """Returns the files of an edit: of the edited image, those to look at, and of the mask (""
        where it needs none); None where it is left out.
        """
        self.total += 1
        if edit.edited is None or not (edit.originals or self.optional):
            self.absent += 1
            self._note(f"{where} names no image {'before' if edit.edited else 'after'} the edit")
            return None
        if not any(isinstance(text, str) and text.strip() for text in as_list(edit.prompt)):
            self.broken += 1
            self._note(f"{where} has no instruction")
            return None
        if self.masked and edit.mask is None:
            self.broken += 1
            self._note(f"{where} names no mask")
            return None
        paths = []
        for name in (edit.mask if self.masked else edit.edited, edit.edited, *edit.originals):
            assert name is not None
            if (path := places.find(below, name)) is None:
                self.broken += 1
                self._note(f"{where} names {name!r}, which is not there")
                return None
            paths.append(path)
        mask, edited, *originals = paths
        return edited, originals, mask if self.masked else ""

    def _note(self, reason: str) -> None:
        if len(self.reasons) < 3:
            self.reasons.append(reason)

    def check(self, folder: Path) -> None:
        """Logs the edits that are left out. Raises ValueError where they are too many, or all."""
        lost = self.broken + self.absent
        if not self.total:
            raise ValueError(f"{folder} has records of edits, and no edit in them")
        if not lost:
            return
        text = f"{lost} of {self.total} edits of {folder} cannot be used: {'; '.join(self.reasons)}"
        if self.broken > MAX_BROKEN * self.total or lost == self.total:
            mend = "unpack the archives, " if self.archives else ""
            raise ValueError(f"{text}; {mend}bring the files, or remove the records")
        log.warning("%s; these are left out", text)


def _edits(record: Any, columns: EditColumns) -> Iterator[_Edit]:
    """Yields the edits of a record, one for each of its turns."""
    if not isinstance(record, dict):
        return
    if all(key in record for key in _PICO):
        yield from _turns_of_pico(record)
    elif isinstance(record.get(_DATA), list):
        yield from _turns(record[_DATA], columns)
    else:
        yield from _turns([record], columns)


def _turns(records: Sequence[Any], columns: EditColumns) -> Iterator[_Edit]:
    """Yields the edits of turns; one without an image starts from the one before."""
    previous: list[str] = []
    for record in records:
        found = _find(columns, tuple(record)) if isinstance(record, dict) else None
        if found is None:
            yield _Edit([], None, None)
            continue
        names = (*found.originals, *found.further)
        originals = [path for name in names for path in _paths(record.get(name))] or previous
        edited = _paths(record[found.edited])
        previous = edited[:1]
        mask = _paths(record.get(columns.masks)) if columns.masks else []
        prompt = record[found.prompt]
        yield _Edit(originals, prompt, next(iter(edited), None), next(iter(mask), None))


# Millions of records have the same keys.
@functools.lru_cache
def _find(columns: EditColumns, keys: tuple[str, ...]) -> EditColumns | None:
    return columns.find(keys)


def _turns_of_pico(record: dict[str, Any]) -> Iterator[_Edit]:
    """Yields the edits of a record of Pico-Banana: each turn's image is what the next starts from.

    The images are called edit_turn1, edit_turn2 and so on, the last final_image.
    """
    files = {f["id"]: f.get("url") for f in as_list(record["files"]) if isinstance(f, dict)}
    prompts, image = as_list(record[_TURNS]), record["local_input_image"]
    for number, prompt in enumerate(prompts, 1):
        last = files.get("final_image") if number == len(prompts) else None
        edited = files.get(f"edit_turn{number}") or last
        yield _Edit(_paths(image), prompt, next(iter(_paths(edited)), None))
        image = edited


def _paths(cell: Any) -> list[str]:
    """Returns the paths in a cell, which ImgEdit has in lists of lists."""
    if isinstance(cell, list):
        return [path for part in cell for path in _paths(part)]
    return [cell] if isinstance(cell, str) and cell.strip() else []


def _records(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the places and the records of a file.

    Raises:
        ValueError: it cannot be read; says where.
    """
    if file.suffix.lower() != ".json":
        yield from metadata_rows(file)
        return
    try:
        found = json.loads(file.read_text("utf-8-sig"))
    except UnicodeDecodeError:
        raise not_utf8(file) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: {error}; it must be one list of records") from None
    for number, record in enumerate(as_list(found)):
        yield f"{file} record {number}", record


def _first(file: Path) -> Any:
    """Returns the first record of a file of JSON; None where it holds something else."""
    try:
        with file.open(encoding="utf-8-sig") as opened:
            head = opened.read(_HEAD).lstrip()
        return json.JSONDecoder().raw_decode(head.removeprefix("[").lstrip())[0]
    except (OSError, ValueError, RecursionError):
        return None


def _is_edit(record: Any, columns: EditColumns) -> bool:
    """Returns whether a record is an edit, or several, whose images are paths."""
    if not isinstance(record, dict) or "file_name" in record:
        return False
    turns = record.get(_DATA)
    if all(key in record for key in _PICO):
        return True
    one = turns[0] if isinstance(turns, list) and turns else record
    return isinstance(one, dict) and columns.find(one) is not None


def _holds_paths(file: Path, columns: EditColumns) -> bool:
    """Returns whether a Parquet file's rows are edits whose images are paths."""
    names, paths = columns_of_paths(file)
    found = columns.find(names)
    return _DATA in names and _DATA in paths if found is None else found.edited in paths
