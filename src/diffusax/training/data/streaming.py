"""Reads a Hub data set group by group, without downloading it as a whole."""

import bisect
import dataclasses
import functools
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.hub_data import HubFile, Reference, in_bytes, open_dataset
from diffusax.training.data.edits import EditColumns
from diffusax.training.data.row_groups import RowGroups, column_chunks
from diffusax.training.data.sources import Facts, Kind, check_columns, check_type

log = logging.getLogger(__name__)

_FOOTER_THREADS = 16


@dataclasses.dataclass(frozen=True)
class StreamedSource:
    """The rows of a data set's Parquet files on the Hub, in the order in which they are stored."""

    repo: str
    commit: str
    columns: tuple[str, ...]
    files: tuple[HubFile, ...]
    groups: tuple[tuple[int, int], ...]
    """The numbers of the file and of the row group in it, for each group."""
    ends: tuple[int, ...]
    """The number of rows up to the end of each group."""
    limit: int
    """The number of bytes of row groups to keep on disk."""
    window: int = 0
    """The number of row groups that are mixed at a time; 0 mixes all rows."""
    facts: Facts = dataclasses.field(default_factory=Facts, compare=False)

    @classmethod
    def open(
        cls,
        path: str,
        columns: Sequence[str],
        *,
        limit: int,
        window: int = 0,
        split: str | None = None,
        subset: str | None = None,
        kinds: Mapping[str, Kind] | None = None,
        edits: EditColumns | None = None,
    ) -> "StreamedSource":
        """Opens the data set; reads only the files' footers.

        Args:
            path: owner/name, owner/name@revision, or hf://datasets/owner/name@revision/folder.
            columns: the names of the columns to read.
            limit: the number of bytes of row groups to keep on disk.
            window: the number of row groups that are mixed at a time; 0 mixes all rows.
            split: the splits to read; by default train, if there are splits.
            subset: a config of the data set's card; by default the only one, or the default.
            kinds: what columns hold, which is checked; others may hold anything.
            edits: which of the columns are those of edits; other names are tried for them, too.

        Raises:
            ValueError: the data set is not on the Hub, has no Parquet files, no such split or lacks
                a column, or the Hub does not answer.
        """
        reference = Reference.parse(path)
        if reference is None or (Path(path).exists() and not path.startswith("hf://")):
            where = "is on this machine" if Path(path).exists() else "is none"
            raise ValueError(f"streaming needs a Hub data set, and {path!r} {where}")
        dataset = open_dataset(reference.repo, reference.revision)
        files = dataset.shards(below=reference.path, suffixes=(".parquet",))
        files, chosen = dataset.split_of(files, below=reference.path, split=split, subset=subset)
        if edits is not None:
            first = RowGroups(dataset.repo, dataset.commit, columns, limit).footer(files[0])
            present = first.schema.to_arrow_schema().names
            columns, kinds = edits.in_table(present, columns, kinds or {})
        reader = RowGroups(dataset.repo, dataset.commit, columns, limit)
        with ThreadPoolExecutor(_FOOTER_THREADS) as pool:
            footers = list(pool.map(reader.footer, files))
        types = require_extra("pyarrow", "train").types
        groups, counts, nbytes = [], [], 0
        for number, (file, footer) in enumerate(zip(files, footers, strict=True)):
            schema = footer.schema.to_arrow_schema()
            check_columns(columns, schema.names, file.path)
            for column, kind in (kinds or {}).items():
                check_type(schema.field(column).type, column, kind, file.path, types)
            groups += [(number, i) for i in range(footer.num_row_groups)]
            counts += [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
            nbytes += _size(footer, columns)
        if not sum(counts):
            raise ValueError(f"{path!r} has no rows")
        log.info("streaming %s of %s at %s", in_bytes(nbytes), dataset.repo, dataset.commit)
        # The cache holds a window and the next one, which is fetched meanwhile.
        share = min(2 * window / len(groups), 1) if window else 1
        if nbytes * share > limit:
            log.warning(
                "%s has %s in use at a time and data.streaming_cache is %s, so row groups will "
                "come again and again; set a larger data.streaming_cache, or a "
                "data.streaming_window of a few",
                path,
                in_bytes(int(nbytes * share)),
                in_bytes(limit),
            )
        ends = tuple(int(end) for end in np.cumsum(counts))
        return cls(
            dataset.repo,
            dataset.commit,
            tuple(columns),
            tuple(files),
            tuple(groups),
            ends,
            limit,
            window,
            Facts().of(f"{path}, streamed", chosen),
        )

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> dict[str, Any]:
        position, row = self._locate(index)
        number, group = self.groups[position]
        table = self._row_groups.table(self.files[number], group)
        values = {name: table.column(name)[row].as_py() for name in self.columns}
        for name, value in values.items():
            if isinstance(value, dict) and not value.get("bytes") and value.get("path"):
                raise ValueError(
                    f"{name} is in a file of its own, {value['path']!r}, which is not streamed; "
                    "leave streaming out"
                )
        return values

    def name(self, index: int) -> str:
        """Returns the file and the row in it, for messages."""
        position, row = self._locate(index)
        number, group = self.groups[position]
        row += sum(self.rows_of(position - back) for back in range(1, group + 1))
        return f"{self.repo}/{self.files[number].path} row {row}"

    def order(self, seed: int, process_index: int, process_count: int) -> "WindowOrder | None":
        """Returns the order in which to read; None where all rows are to be mixed."""
        if not self.window:
            return None
        return WindowOrder(self, seed, process_index, process_count)

    def rows_of(self, position: int) -> int:
        """Returns the number of rows of a group."""
        return self.ends[position] - (self.ends[position - 1] if position else 0)

    def prefetch(self, positions: Sequence[int]) -> None:
        """Fetches groups in the background."""
        found = (self.groups[position] for position in positions)
        self._row_groups.prefetch((self.files[number], group) for number, group in found)

    @functools.cached_property
    def _row_groups(self) -> RowGroups:
        return RowGroups(self.repo, self.commit, self.columns, self.limit)

    def _locate(self, index: int) -> tuple[int, int]:
        position = bisect.bisect_right(self.ends, index)
        return position, index - (self.ends[position - 1] if position else 0)

    def __getstate__(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}


class _Epoch(NamedTuple):
    windows: list[list[int]]
    """The row groups that are mixed with each other."""
    starts: list[int]
    """The place of each window's first row."""
    rows: np.ndarray
    """The numbers of the rows in order."""


class WindowOrder:
    """An endless order of rows: the process's groups are shuffled, and the rows of a few are mixed.

    Each process has the same groups in every epoch, every process_count-th of all, so that it
    fetches only these. The order depends on the seed, the window and the number of processes.
    """

    _epochs: dict[int, "_Epoch"]
    _reached: tuple[int, int] | None
    _lock: threading.Lock

    def __init__(self, source: StreamedSource, seed: int, process_index: int, process_count: int):
        """Computes the order. Raises ValueError where there are fewer row groups than processes."""
        self.source, self.seed = source, seed
        self.own = range(len(source.groups))[process_index::process_count]
        if len(source.groups) < process_count:
            raise ValueError(
                f"{len(source.groups)} row groups are not enough for {process_count} processes; "
                "leave streaming_window out"
            )
        self.rows = sum(map(source.rows_of, self.own))
        self._start()

    def __len__(self) -> int:
        # Grain asks for a length; nobody trains for a million epochs.
        return self.rows * 2**20

    def __getitem__(self, position: int) -> int:
        epoch, place = divmod(position, self.rows)
        with self._lock:
            if epoch not in self._epochs:
                self._epochs = {epoch: self._shuffled(epoch), **dict([*self._epochs.items()][:1])}
            windows, starts, rows = self._epochs[epoch]
            number = bisect.bisect_right(starts, place) - 1
            is_new = (epoch, number) != self._reached
            self._reached = (epoch, number)
        if is_new and number + 1 < len(windows):
            self.source.prefetch(windows[number + 1])
        return int(rows[place])

    def _shuffled(self, epoch: int) -> "_Epoch":
        rng = np.random.default_rng((self.seed, epoch))
        groups = [self.own[i] for i in rng.permutation(len(self.own))]
        size = self.source.window
        windows = [groups[i : i + size] for i in range(0, len(groups), size)]
        parts, starts, count = [], [], 0
        for window in windows:
            ends = self.source.ends
            spans = [np.arange(ends[g] - self.source.rows_of(g), ends[g]) for g in window]
            parts.append(rng.permutation(np.concatenate(spans)))
            starts.append(count)
            count += len(parts[-1])
        return _Epoch(windows, starts, np.concatenate(parts))

    def _start(self) -> None:
        self._epochs, self._reached = {}, None
        self._lock = threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: vars(self)[name] for name in ("source", "seed", "own", "rows")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


def _size(footer: Any, columns: Sequence[str]) -> int:
    """Returns the number of bytes of the columns in a file."""
    groups = range(footer.num_row_groups)
    chunks = (chunk for i in groups for chunk in column_chunks(footer, i, columns))
    return sum(chunk.total_compressed_size for chunk in chunks)
