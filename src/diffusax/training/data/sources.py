"""Random access to the rows of a data set: Parquet and Arrow shards, cached latents.

A row is a dict of plain values. Parquet is unpacked once into memory-mapped Arrow files, as Hugging
Face `datasets` does, so that any row is one read away and worker processes share the pages.
"""

import bisect
import contextlib
import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.hub_data.splits import Split

Kind = Literal["image", "image or none", "text", "text or none"]
"""What a column holds: images, or texts or lists of texts; and whether they may be missing."""


class Source(Protocol):
    """Random access to rows; it must be small to pickle."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> dict[str, Any]: ...

    def name(self, index: int) -> str:
        """Returns where the row comes from, for messages."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What was found while a data set was opened, for the first lines of a run."""

    place: str = ""
    """The folder or the Hub's name, and what was read in it."""
    captions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The number of rows by the kind of their caption's source."""
    split: str = ""
    """The splits that are read; empty where there are none."""
    left: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """The number of files of each split that is not read."""
    subset: str = ""
    """The subset of the data set's card, where it has several."""

    def of(self, place: str, split: Split) -> "Facts":
        """Returns the facts with a place and what was chosen of it."""
        return Facts(place, self.captions, split.name, split.left, split.subset)


class SourceFailed(ValueError):
    """A source cannot be read, which is not the fault of a row and stops a run."""


@dataclasses.dataclass(frozen=True)
class ArrowSource:
    """The rows of memory-mapped Arrow files, in order."""

    files: tuple[str, ...]
    names: tuple[str, ...]
    """The files' names in messages."""

    facts: Facts = dataclasses.field(default_factory=Facts, compare=False)

    @classmethod
    def from_shards(
        cls,
        shards: Sequence[Path],
        columns: Sequence[str],
        kinds: Mapping[str, Kind] | None = None,
        facts: Facts | None = None,
    ) -> "ArrowSource":
        """Unpacks the columns of each Parquet or Arrow file into the cache, unless they are there.

        kinds: what columns hold, which is checked; others may hold anything.

        Raises:
            ValueError: a file is not whole, lacks a column or has another kind of values in it.
        """
        files = [_unpack(shard, columns) for shard in shards]
        found = cls(tuple(map(str, files)), tuple(map(str, shards)), facts or Facts())
        for column, kind in (kinds or {}).items():
            found._check(column, kind)
        return found

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

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(self._tables[0].column_names)

    def count_cells(self, column: str) -> np.ndarray:
        """Returns how many values each row has in a column, n int; reads none of them.

        A list has as many as it is long, others one; null, and a struct of nulls, has none.
        """
        compute = require_extra("pyarrow.compute", "train")

        def counted(cells: Any) -> Any:
            if hasattr(cells.type, "value_type"):
                return compute.fill_null(compute.list_value_length(cells), 0)
            valid = compute.is_valid(cells)
            fields = getattr(cells.type, "names", None) or ()
            parts = [compute.is_valid(compute.struct_field(cells, name)) for name in fields]
            if parts:
                valid = compute.and_(valid, functools.reduce(compute.or_, parts))
            return valid

        found = [np.asarray(counted(table.column(column))) for table in self._tables]
        return np.concatenate(found).astype(int)

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

    def _check(self, column: str, kind: Kind) -> None:
        """Raises ValueError where a column holds something else than it has to."""
        types = require_extra("pyarrow", "train").types
        empty = 0
        for table, name in zip(self._tables, self.names):
            own = table.column(column)
            check_type(own.type, column, kind, name, types)
            empty += own.null_count
        if not kind.endswith("or none") and empty > MAX_BROKEN * len(self):
            raise ValueError(
                f"{self.names[0]}: {column} is null in {empty} of {len(self)} rows; remove these "
                "rows, or write what is missing"
            )

    def _locate(self, index: int) -> tuple[int, int]:
        part = bisect.bisect_right(self._ends, index)
        return part, index - (self._ends[part - 1] if part else 0)

    def __getstate__(self) -> dict[str, Any]:
        return {"files": self.files, "names": self.names, "facts": self.facts}


def path_inside(folder: Path, name: str) -> Path:
    """Returns the path of a data set's file. Links are followed, because the Hub's cache has them.

    Raises:
        ValueError: the name leads out of the folder.
    """
    path = Path(os.path.normpath(folder / name))
    if "\0" in name or not path.is_relative_to(os.path.normpath(folder)):
        raise ValueError(f"the path {name!r} leads out of the data set's folder")
    return path


def as_list(value: Any) -> list[Any]:
    """Returns a list of one for what is no list."""
    return value if isinstance(value, list) else [value]


def check_columns(wanted: Sequence[str], present: Any, where: str | Path) -> None:
    """Raises ValueError where a column is missing; lists those that exist."""
    missing = [column for column in wanted if column not in present]
    if missing:
        raise ValueError(
            f"{where} has no column {', '.join(map(repr, missing))}; it has "
            f"{', '.join(sorted(present))}; options such as caption_column name those to read"
        )


def check_type(own: Any, column: str, kind: Kind, where: str, types: Any) -> None:
    """Raises ValueError where a column of Arrow's type `own` cannot hold what it has to."""

    def is_kind(t: Any) -> bool:
        if types.is_null(t):
            return kind.endswith("or none")
        if types.is_list(t) or types.is_large_list(t) or types.is_fixed_size_list(t):
            return is_kind(t.value_type)
        if types.is_dictionary(t):
            return is_kind(t.value_type)
        if kind.startswith("image"):
            return types.is_binary(t) or types.is_large_binary(t) or types.is_struct(t)
        return types.is_string(t) or types.is_large_string(t) or types.is_string_view(t)

    if not is_kind(own):
        what = "images (bytes, or bytes and path)" if kind.startswith("image") else "texts"
        raise ValueError(
            f"{where}: the column {column!r} holds {own}, not {what}; name another by an option "
            "such as image_column or caption_column"
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


def column_names(shard: Path) -> list[str]:
    """Returns the names of a Parquet or Arrow file's columns.

    Raises:
        ValueError: the file is not whole.
    """
    with _opened(shard) as (schema, _):
        return list(schema.names)


def columns_of_paths(shard: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a Parquet file's columns, and of those that hold texts, which may be
    paths, or lists of records with some.

    Raises:
        ValueError: the file is not whole.
    """
    types = require_extra("pyarrow", "train").types

    def holds_paths(t: Any) -> bool:
        if types.is_list(t) or types.is_large_list(t):
            return holds_paths(t.value_type)
        if types.is_struct(t):
            return t.get_field_index("bytes") < 0
        return types.is_string(t) or types.is_large_string(t)

    with _opened(shard) as (schema, _):
        return list(schema.names), [field.name for field in schema if holds_paths(field.type)]


def _unpack(shard: Path, columns: Sequence[str]) -> Path:
    """Writes a file's columns to an Arrow file in the cache, which appears only when whole.

    It takes as much room as the columns unpacked, which may be many times the size of the shard.
    """
    pyarrow = require_extra("pyarrow", "train")
    with _opened(shard) as (schema, batches):
        check_columns(columns, schema.names, shard)
        stat = shard.stat()
        identity = [str(shard.resolve()), stat.st_mtime_ns, stat.st_size, *columns]
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
        target = cache_folder() / "arrow" / f"{digest}.arrow"
        if target.is_file():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(f".{os.getpid()}.partial")
        own = pyarrow.schema([schema.field(name) for name in columns])
        try:
            with pyarrow.ipc.new_file(str(partial), own) as writer:
                for batch in batches(list(columns)):
                    writer.write_batch(batch.select(list(columns)))
            os.replace(partial, target)
        except (pyarrow.ArrowException, OSError) as error:
            raise ValueError(f"{shard} cannot be unpacked to {target.parent}: {error}") from None
        finally:
            partial.unlink(missing_ok=True)
    return target


@contextlib.contextmanager
def _opened(shard: Path) -> Iterator[tuple[Any, Callable[[list[str]], Any]]]:
    """Opens a Parquet file, or an Arrow file as `datasets` writes it; gives schema and batches."""
    pyarrow = require_extra("pyarrow", "train")
    parquet = require_extra("pyarrow.parquet", "train")
    arrow = shard.suffix.lower() == ".arrow"
    try:
        file = _open_arrow(shard) if arrow else parquet.ParquetFile(shard)
    except (pyarrow.ArrowException, OSError) as error:
        kind = "Arrow" if arrow else "Parquet"
        raise ValueError(f"{shard} is not a whole {kind} file: {error}") from None
    if arrow:
        yield file.schema, lambda columns: _batches(file)
        return
    with file:
        # Few rows at a time, because a small file may repeat a large value many times.
        yield file.schema_arrow, lambda columns: file.iter_batches(batch_size=32, columns=columns)


def _open_arrow(shard: Path) -> Any:
    """Opens a stream of batches, which is what `datasets` writes, or a file of them."""
    pyarrow = require_extra("pyarrow", "train")
    mapped = pyarrow.memory_map(str(shard))
    try:
        return pyarrow.ipc.open_stream(mapped)
    except pyarrow.ArrowInvalid:
        return pyarrow.ipc.open_file(mapped)


def _batches(reader: Any) -> Iterator[Any]:
    if hasattr(reader, "num_record_batches"):
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


MAX_BROKEN = 0.01
"""The share of broken rows above which a run stops."""
