"""Fetches row groups of Parquet files from the Hub when they are needed, and caches them."""

import collections
import hashlib
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import filelock
import huggingface_hub

from diffusax.boundary.files import written_whole
from diffusax.boundary.messages import require_extra
from diffusax.checkpoints.hub import hub_errors
from diffusax.hub_data import HubFile
from diffusax.hub_data.transfer import WAITS
from diffusax.training.data.sources import SourceFailed, cache_folder

log = logging.getLogger(__name__)

OPEN_TABLES = 32
"""The number of row groups that stay mapped into memory."""
PREFETCH_THREADS = 4
MAX_GAP = 2**16
"""The largest number of bytes between two ranges for which one request fetches both."""
_LOCKS = 64


class RowGroups:
    """The row groups of a data set's files, from the cache's folder or from the Hub.

    All processes of the machine share the folder; one of them fetches a group that several want.
    """

    def __init__(self, repo: str, commit: str, columns: Sequence[str], limit: int):
        """Opens the cache of a data set.

        Args:
            repo: the Hub repository.
            commit: its commit.
            columns: the names of the columns to read.
            limit: the bytes of the cache, beyond which the groups unused for longest are removed.
        """
        self.repo, self.commit, self.columns, self.limit = repo, commit, tuple(columns), limit
        self.folder = cache_folder() / "row-groups"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._files = huggingface_hub.HfFileSystem(skip_instance_cache=True)
        self._tables: collections.OrderedDict[Path, Any] = collections.OrderedDict()
        self._lock = threading.Lock()
        self._gave_up = threading.Event()
        self._wanted: queue.SimpleQueue[tuple[HubFile, int]] = queue.SimpleQueue()
        self._prefetching = False

    def footer(self, file: HubFile) -> Any:
        """Returns the metadata of a Parquet file, with the sizes of its row groups."""
        parquet = require_extra("pyarrow.parquet", "train")
        cached = self._path([file.blob], ".footer")

        def fetch() -> None:
            with hub_errors(self.repo, self.commit), self._open(file) as opened:
                metadata = parquet.read_metadata(opened)
            with written_whole(cached) as partial:
                metadata.write_metadata_file(str(partial))

        self._once(cached, fetch, file.path)
        return parquet.read_metadata(cached)

    def table(self, file: HubFile, group: int) -> Any:
        """Returns the columns of a row group as an Arrow table mapped into memory.

        Raises:
            SourceFailed: the Hub cannot be reached, even after waiting.
        """
        path = self._group_path(file, group)
        with self._lock:
            if path in self._tables:
                self._tables.move_to_end(path)
                return self._tables[path]
        table = self._mapped(path, file, group)
        with self._lock:
            self._tables[path] = table
            while len(self._tables) > OPEN_TABLES:
                self._tables.popitem(last=False)
        return table

    def prefetch(self, groups: Iterable[tuple[HubFile, int]]) -> None:
        """Fetches those of the groups that are not in the cache, in the background."""
        with self._lock:
            # Daemon threads do not hold up the end of the process.
            for _ in range(0 if self._prefetching else PREFETCH_THREADS):
                threading.Thread(target=self._prefetch, daemon=True).start()
            self._prefetching = True
        for wanted in groups:
            self._wanted.put(wanted)

    def _prefetch(self) -> None:
        while True:
            file, group = self._wanted.get()
            try:
                self._ensure(self._group_path(file, group), file, group)
            except Exception as error:
                # The thread that needs the group tries again, and reports the error.
                log.info("row group %d of %s was not fetched ahead: %s", group, file.path, error)

    def _mapped(self, path: Path, file: HubFile, group: int) -> Any:
        pyarrow = require_extra("pyarrow", "train")
        while True:
            self._ensure(path, file, group)
            try:
                os.utime(path)
                return pyarrow.ipc.open_file(pyarrow.memory_map(str(path))).read_all()
            except FileNotFoundError:
                continue  # Another process has made room in between.

    def _ensure(self, path: Path, file: HubFile, group: int) -> None:
        """Fetches the group unless it is in the cache."""
        if not path.is_file():
            # Read before the group is locked, because both may have the same lock.
            footer = self.footer(file)
            self._once(path, lambda: self._fetch(path, file, group, footer), file.path)

    def _once(self, path: Path, fetch: Callable[[], None], name: str) -> None:
        """Fetches a missing file, unless another thread or process is fetching it."""
        if path.is_file():
            return
        lock = self.folder / f"{int(path.name[:8], 16) % _LOCKS}.lock"
        with filelock.FileLock(lock, is_singleton=False):
            if not path.is_file():
                self._patiently(fetch, name)

    def _fetch(self, path: Path, file: HubFile, group: int, footer: Any) -> None:
        pyarrow = require_extra("pyarrow", "train")
        parquet = require_extra("pyarrow.parquet", "train")
        parts = {}
        with hub_errors(self.repo, self.commit), self._open(file) as opened:
            for start, end in _ranges(footer, group, self.columns):
                opened.seek(start)
                parts[start, end] = opened.read(end - start)
            known = self._open(file, cache_type="parts", cache_options={"data": parts})
        try:
            source = parquet.ParquetFile(
                known, metadata=footer, pre_buffer=False, page_checksum_verification=True
            )
            table = source.read_row_group(group, columns=list(self.columns)).select(self.columns)
        except (pyarrow.ArrowException, OSError) as error:
            reason = " ".join(str(error).split())
            raise ValueError(f"row group {group} is damaged ({reason})") from None
        with written_whole(path) as partial, pyarrow.ipc.new_file(str(partial), table.schema) as f:
            f.write_table(table)
        self._make_room(path)

    def _open(self, file: HubFile, cache_type: str = "none", **options: Any) -> Any:
        path = f"datasets/{self.repo}@{self.commit}/{file.path}"
        return self._files.open(path, "rb", cache_type=cache_type, **options)

    def _patiently(self, fetch: Callable[[], None], name: str) -> None:
        """Retries with pauses where the Hub is not reached or the bytes are wrong.

        When one thread has used up all its attempts, all threads stop waiting, so that the run
        ends.
        """
        pyarrow = require_extra("pyarrow", "train")
        for wait in (*WAITS, None):
            try:
                fetch()
                return
            except OSError as error:
                raise SourceFailed(str(error)) from None
            except (ValueError, pyarrow.ArrowException) as error:
                if wait is None or self._gave_up.is_set():
                    self._gave_up.set()
                    raise SourceFailed(f"{name} cannot be read: {error}") from None
                log.warning("%s: %s; once more in %g s", name, error, wait)
                self._gave_up.wait(wait)

    def _make_room(self, newest: Path) -> None:
        """Removes the groups unused for longest while the cache is larger than the limit."""
        found = []
        for path in self.folder.glob("*.arrow"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            found.append((stat.st_mtime_ns, stat.st_size, path))
        total = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if total <= self.limit:
                return
            if path != newest:
                path.unlink(missing_ok=True)
                total -= size

    def _group_path(self, file: HubFile, group: int) -> Path:
        return self._path([file.blob, group, *self.columns], ".arrow")

    def _path(self, identity: list[Any], suffix: str) -> Path:
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        return self.folder / f"{digest[:24]}{suffix}"


def column_chunks(footer: Any, group: int, columns: Sequence[str]) -> list[Any]:
    """Returns what a file's metadata says of the columns in a row group."""
    chunks = [footer.row_group(group).column(i) for i in range(footer.num_columns)]
    return [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in columns]


def _ranges(footer: Any, group: int, columns: Sequence[str]) -> list[tuple[int, int]]:
    """Returns the byte ranges of the columns in the file; ranges that almost touch are joined."""
    spans = []
    for chunk in column_chunks(footer, group, columns):
        start = min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset)))
        spans.append((start, start + chunk.total_compressed_size))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start - merged[-1][1] <= MAX_GAP:
            start = merged.pop()[0]
        merged.append((start, end))
    return merged
