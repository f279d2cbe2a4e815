"""Rows of a data set, by index: Parquet shards, image folders, cached latents.

A row is a dict of plain values. Parquet is unpacked once into memory-mapped Arrow files, as Hugging
Face `datasets` does, so that any row is one read away and worker processes share the pages.
"""

import bisect
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from diffusax.checkpoints.hub import hub_errors
from diffusax.extras import require_extra

DATASET_PATTERNS = ("*.parquet", "**/*.parquet")
METADATA = "metadata.jsonl"
IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif")


class Source(Protocol):
    """Random access to rows; small to pickle."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Where the row comes from, for messages."""


def open_source(path: str, columns: Sequence[str]) -> Source:
    """A data set from a folder, a glob of Parquet files, or a Hub data-set id.

    A folder holds Parquet shards (at any depth), or images with a metadata.jsonl whose lines have
    file_name, or images alone, whose file names then are the captions.

    Raises:
        ValueError: there is no such data set, or a column is missing; lists the ones there are.
    """
    if any(c in path for c in "*?["):
        anchor = Path(path).anchor
        files = sorted(Path(anchor or ".").glob(path.removeprefix(anchor)))
        if not files:
            raise ValueError(f"no file matches {path!r}")
        return ArrowSource.from_parquet(files, columns)
    folder = _folder(path)
    if folder.is_file():
        return ArrowSource.from_parquet([folder], columns)
    if (folder / METADATA).is_file():
        return FolderSource.from_metadata(folder, columns)
    shards = sorted({file for pattern in DATASET_PATTERNS for file in folder.glob(pattern)})
    if shards:
        return ArrowSource.from_parquet(shards, columns)
    return FolderSource.from_names(folder, columns)


@dataclasses.dataclass(frozen=True)
class ArrowSource:
    """The rows of memory-mapped Arrow files, in order."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    """What the files are called in messages."""

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
        return {name: table.column(name)[row].as_py() for name in table.column_names}

    def name(self, index: int) -> str:
        """The shard and the row in it."""
        part, row = self._locate(index)
        return f"{self.names[part]} row {row}"

    @property
    def metadata(self) -> dict[bytes, bytes]:
        """The key-value metadata of the first file."""
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

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "names": self.names}


@dataclasses.dataclass(frozen=True)
class FolderSource:
    """Image files with their columns; the first column is the image."""

    folder: str
    rows: tuple[dict[str, Any], ...]
    files: tuple[str, ...]
    image_column: str

    @classmethod
    def from_metadata(cls, folder: Path, columns: Sequence[str]) -> "FolderSource":
        """Rows from metadata.jsonl (`datasets`' ImageFolder): file_name and the other columns."""
        rows = []
        for number, line in enumerate((folder / METADATA).read_text("utf-8").splitlines(), 1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{folder / METADATA} line {number}: {error}") from None
            if "file_name" not in row:
                raise ValueError(f"{folder / METADATA} line {number} has no file_name")
            rows.append(row)
        image_column, *others = columns
        _check_columns(others, set(rows[0]) if rows else set(), folder / METADATA)
        files = tuple(row.pop("file_name") for row in rows)
        return cls(str(folder), tuple(rows), files, image_column)

    @classmethod
    def from_names(cls, folder: Path, columns: Sequence[str]) -> "FolderSource":
        """Images alone; "red apple.png" is called "red apple"."""
        files = sorted(f for f in folder.rglob("*") if f.suffix.lower() in IMAGE_SUFFIXES)
        if not files:
            raise ValueError(f"{folder} holds neither Parquet files, nor {METADATA}, nor images")
        image_column, *others = columns
        rows = tuple(dict.fromkeys(others, file.stem) for file in files)
        names = tuple(str(file.relative_to(folder)) for file in files)
        return cls(str(folder), rows, names, image_column)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.rows[index], self.image_column: {"path": self.name(index), "bytes": None}}

    def name(self, index: int) -> str:
        """The image's file."""
        return str(Path(self.folder) / self.files[index])


def _folder(path: str) -> Path:
    if Path(path).exists():
        return Path(path)
    if path.startswith((".", "/", "~")):
        raise ValueError(f"there is no data set at {path}")
    import huggingface_hub

    patterns = [*DATASET_PATTERNS, METADATA, *(f"**/*{s}" for s in IMAGE_SUFFIXES)]
    with hub_errors(path):
        return Path(
            huggingface_hub.snapshot_download(path, repo_type="dataset", allow_patterns=patterns)
        )


def _check_columns(wanted: Sequence[str], present: Any, where: Path) -> None:
    missing = [column for column in wanted if column not in present]
    if missing:
        raise ValueError(
            f"{where} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(sorted(present))}"
        )


def cache_folder() -> Path:
    """DIFFUSAX_CACHE, or ~/.cache/diffusax."""
    return Path(os.environ.get("DIFFUSAX_CACHE", Path.home() / ".cache" / "diffusax"))


def _unpack(shard: Path, columns: Sequence[str]) -> Path:
    """A Parquet file's columns as an Arrow file in the cache; it appears only when whole."""
    pyarrow = require_extra("pyarrow", "train")
    parquet = require_extra("pyarrow.parquet", "train")
    try:
        file = parquet.ParquetFile(shard)
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{shard} is not a whole Parquet file: {error}") from None
    _check_columns(columns, file.schema_arrow.names, shard)
    stat = shard.stat()
    identity = [str(shard.resolve()), stat.st_mtime_ns, stat.st_size, *columns]
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    target = cache_folder() / "arrow" / f"{digest}.arrow"
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(f".{os.getpid()}.partial")
    schema = pyarrow.schema([file.schema_arrow.field(name) for name in columns])
    with pyarrow.ipc.new_file(str(partial), schema) as writer:
        for batch in file.iter_batches(batch_size=256, columns=list(columns)):
            writer.write_batch(batch.select(list(columns)))
    os.replace(partial, target)
    return target
