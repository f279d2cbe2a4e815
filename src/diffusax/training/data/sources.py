"""Random access to the rows of a data set: Parquet shards, image folders, cached latents.

A row is a dict of plain values. Parquet is unpacked once into memory-mapped Arrow files, as Hugging
Face `datasets` does, so that any row is one read away and worker processes share the pages.
"""

import bisect
import dataclasses
import functools
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import huggingface_hub

from diffusax.checkpoints.hub import hub_errors
from diffusax.extras import require_extra
from diffusax.hub_data import Reference
from diffusax.training.data.picture_files import (
    IMAGE_SUFFIXES,
    captions_beside,
    find_pictures,
    metadata_rows,
    visible,
)

log = logging.getLogger(__name__)

DATASET_PATTERNS = ("*.parquet", "**/*.parquet")
METADATA = ("metadata.jsonl", "metadata.csv")


class Source(Protocol):
    """Random access to rows; it must be small to pickle."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Returns where the row comes from, for messages."""


class SourceFailed(ValueError):
    """A source cannot be read, which is not the fault of a row and stops a run."""


def open_source(path: str, columns: Sequence[str], *, leave_out: str = "") -> Source:
    """Opens a data set from a folder, a glob of Parquet files, or the Hub.

    Names on the Hub are owner/name, owner/name@revision, or hf://datasets/owner/name@revision/path.

    A folder holds Parquet shards (at any depth); or images with a metadata.jsonl or metadata.csv
    whose rows have a file_name; or images with a .txt file beside each; or images alone, whose file
    names then are the captions. Hidden files and folders are no part of it.

    leave_out: a folder whose images are no part of the data set; see `find_pictures`.

    Raises:
        ValueError: there is no such data set, or a column is missing; lists those that exist.
    """
    if path.startswith("hf://"):
        path = str(_snapshot(path))
    if any(c in path for c in "*?["):
        anchor = Path(path).anchor
        files = sorted(Path(anchor or ".").glob(path.removeprefix(anchor)))
        if not files:
            raise ValueError(f"no file matches {path!r}")
        return ArrowSource.from_parquet(files, columns)
    folder = _folder(path)
    if folder.is_file():
        if folder.suffix.lower() in IMAGE_SUFFIXES or folder.name in METADATA:
            raise ValueError(f"{path} is a file of a data set; give the folder that it is in")
        return ArrowSource.from_parquet([folder], columns)
    if any((folder / name).is_file() for name in METADATA):
        return FolderSource.from_metadata(folder, columns)
    found = {file for pattern in DATASET_PATTERNS for file in folder.glob(pattern)}
    shards = visible(folder, found)
    if shards:
        return ArrowSource.from_parquet(shards, columns)
    return FolderSource.from_names(folder, columns, leave_out=leave_out)


@dataclasses.dataclass(frozen=True)
class ArrowSource:
    """The rows of memory-mapped Arrow files, in order."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    """The files' names in messages."""

    @classmethod
    def from_parquet(cls, shards: Sequence[Path], columns: Sequence[str]) -> "ArrowSource":
        """Unpacks the columns of each shard into the cache, unless an earlier run has."""
        files = [_unpack(shard, columns) for shard in shards]
        return cls(tuple(map(str, files)), tuple(map(str, shards)))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        part, row = self._locate(index)
        table = self._tables[part]
        values = {name: table.column(name)[row].as_py() for name in table.column_names}
        return {name: self._with_path(value, part) for name, value in values.items()}

    def name(self, index: int) -> str:
        """Returns the shard and the row in it, for messages."""
        part, row = self._locate(index)
        return f"{self.names[part]} row {row}"

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """Returns the key-value metadata of the first file."""
        return self._tables[0].schema.metadata or {}

    @functools.cached_property
    def _tables(self) -> list[Any]:
        pyarrow = require_extra("pyarrow", "train")
        return [pyarrow.ipc.open_file(pyarrow.memory_map(file)).read_all() for file in self.files]

    @functools.cached_property
    def _ends(self) -> list[int]:
        ends, total = [], 0
        for table in self._tables:
            total += table.num_rows
            ends.append(total)
        return ends

    def _with_path(self, cell: Any, part: int) -> Any:
        """Completes the path of an image that is in a file of its own, also in a list."""
        if isinstance(cell, list):
            return [self._with_path(entry, part) for entry in cell]
        if not isinstance(cell, dict) or cell.get("bytes") or not isinstance(cell.get("path"), str):
            return cell
        return cell | {"path": str(path_inside(Path(self.names[part]).parent, cell["path"]))}

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "names": self.names}


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """Image files with their columns."""

    folder: str
    rows: tuple[dict[str, Any], ...]
    files: tuple[dict[str, Any], ...]
    """For each column, the names of an image's files in the folder: one, or a list."""

    @classmethod
    def from_metadata(cls, folder: Path, columns: Sequence[str]) -> "FolderSource":
        """Reads rows from metadata.jsonl or .csv, like `datasets`' ImageFolder.

        file_name is the image in the first column, x_file_name one in the column x, and
        x_file_names a list of them.
        """
        file = next(folder / name for name in METADATA if (folder / name).is_file())
        rows, files = [], []
        for number, row in metadata_rows(file):
            where = f"{file} line {number}"
            names = _take_file_names(row, columns) if isinstance(row, dict) else {}
            every = [name for value in names.values() for name in _as_list(value)]
            if not every or not all(isinstance(name, str) and name for name in every):
                raise ValueError(f"{where} must be a row with a file_name")
            try:
                for name in every:
                    path_inside(folder, name)
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
            for column in columns:
                if any(isinstance(cell, dict) for cell in _as_list(row.get(column))):
                    raise ValueError(f"{where} must name its images by {column}_file_name")
            rows.append(row)
            files.append(names)
        if not rows:
            raise ValueError(f"{file} has no rows")
        check_columns(columns, {**rows[0], **files[0]}, file)
        return cls(str(folder), tuple(rows), tuple(files))

    @classmethod
    def from_names(
        cls, folder: Path, columns: Sequence[str], *, leave_out: str = ""
    ) -> "FolderSource":
        """Finds images with their captions in text files beside them, or in their names.

        The caption of "red apple.png" is the text in "red apple.txt", or "red apple" if no image
        has such a file.

        leave_out: a folder whose images are left out; see `find_pictures`.

        Raises:
            ValueError: there are no images, only some of them have a text file, more columns are
                asked for than an image and its caption, or the folder is the one to leave out.
        """
        files = find_pictures(folder, leave_out)
        if not files:
            raise ValueError(
                f"{folder} holds neither Parquet files, nor {' or '.join(METADATA)}, nor images"
            )
        image_column, *others = columns
        if more := others[1:]:
            raise ValueError(
                f"{folder} holds images with captions at most, and nothing of "
                f"{' and '.join(map(repr, more))}; name them in a {METADATA[0]}"
            )
        captions = captions_beside(files) if others else None
        if captions is None:
            captions = [file.stem for file in files]
            if others:
                log.warning("%s has no captions; the names of the files serve as such", folder)
        rows = tuple(dict.fromkeys(others, caption) for caption in captions)
        cells = tuple({image_column: str(file.relative_to(folder))} for file in files)
        return cls(str(folder), rows, cells)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        cells = {column: self._cells(names) for column, names in self.files[index].items()}
        return {**self.rows[index], **cells}

    def name(self, index: int) -> str:
        """Returns the image's file, or the first of several, for messages."""
        first = next(iter(self.files[index].values()))
        return str(Path(self.folder) / _as_list(first)[0])

    def _cells(self, names: Any) -> Any:
        if isinstance(names, list):
            return [self._cells(name) for name in names]
        return {"path": str(Path(self.folder) / names), "bytes": None}


def _folder(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    if Reference.parse(path) is None:
        raise ValueError(
            f"there is no file or folder {path!r} here, and a Hub data set is called owner/name"
        )
    return _snapshot(path)


def _snapshot(path: str) -> Path:
    """Downloads a Hub data set and returns its folder in the Hub's cache, or the path inside it."""
    reference = Reference.parse(path)
    if reference is None:
        raise ValueError(f"a Hub data set is called hf://datasets/owner/name (got {path!r})")
    patterns = [*DATASET_PATTERNS, *METADATA, "**/*.txt", *(f"**/*{s}" for s in IMAGE_SUFFIXES)]
    if reference.path:
        patterns = [reference.path, f"{reference.path}/**"]
    repo, revision = reference.repo, reference.revision
    with hub_errors(repo, revision):
        folder = huggingface_hub.snapshot_download(
            repo, repo_type="dataset", revision=revision, allow_patterns=patterns
        )
    return Path(folder) / reference.path


def path_inside(folder: Path, name: str) -> Path:
    """Returns the path of a data set's file. Links are followed, because the Hub's cache has them.

    Raises:
        ValueError: the name leads out of the folder.
    """
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(os.path.normpath(folder)):
        raise ValueError(f"the path {name!r} leads out of the data set's folder")
    return path


def _take_file_names(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Removes the names of images from a row of metadata and returns them by column."""
    keys = [(columns[0], "file_name")]
    keys += [(c, f"{c}_{ending}") for c in columns for ending in ("file_name", "file_names")]
    return {column: row.pop(key) for column, key in keys if key in row}


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def check_columns(wanted: Sequence[str], present: Any, where: Path) -> None:
    """Raises ValueError where a column is missing; lists those that exist."""
    missing = [column for column in wanted if column not in present]
    if missing:
        raise ValueError(
            f"{where} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(sorted(present))}"
        )


def cache_folder() -> Path:
    """Returns DIFFUSAX_CACHE, or ~/.cache/diffusax.

    Raises:
        ValueError: neither that variable nor a home folder is known.
    """
    if folder := os.environ.get("DIFFUSAX_CACHE"):
        return Path(folder)
    try:
        return Path.home() / ".cache" / "diffusax"
    except RuntimeError:
        raise ValueError("there is no home folder; set DIFFUSAX_CACHE to a folder") from None


def _unpack(shard: Path, columns: Sequence[str]) -> Path:
    """Writes a Parquet file's columns to an Arrow file in the cache, which appears only when whole.

    It takes as much room as the columns unpacked, which may be many times the size of the shard.
    """
    pyarrow = require_extra("pyarrow", "train")
    parquet = require_extra("pyarrow.parquet", "train")
    try:
        file = parquet.ParquetFile(shard)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{shard} is not a whole Parquet file: {error}") from None
    check_columns(columns, file.schema_arrow.names, shard)
    stat = shard.stat()
    identity = [str(shard.resolve()), stat.st_mtime_ns, stat.st_size, *columns]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    target = cache_folder() / "arrow" / f"{digest}.arrow"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns])
    try:
        with pyarrow.ipc.new_file(str(partial), schema) as writer:
            # Few rows at a time, because a small file may repeat a large value many times.
            for batch in file.iter_batches(batch_size=32, columns=list(columns)):
                writer.write_batch(batch.select(list(columns)))
        os.replace(partial, target)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{shard} cannot be unpacked to {target.parent}: {error}") from None
    finally:
        partial.unlink(missing_ok=True)
    return target
