"""Getting the files of a data set: in parallel, resumable inside a file, with digests checked."""

import contextlib
import dataclasses
import hashlib
import io
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import errors, utils
from huggingface_hub.file_download import http_get
from tqdm.auto import tqdm

from diffusax.boundary.files import written_whole
from diffusax.checkpoints.hub import hub_errors, is_connection_problem
from diffusax.hub_data.repository import HubDataset, HubFile

log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each new attempt where the Hub is not reached, on top of huggingface_hub's own."""
_PROGRESS_OF_HUB = "huggingface_hub.http_get"


@dataclasses.dataclass(frozen=True)
class Downloaded:
    """What came of a download."""

    files: tuple[Path, ...]
    fetched: int
    """How many of the files were not there before."""
    transferred: int
    """The bytes that came over the network."""


def download(
    dataset: HubDataset,
    shards: Sequence[HubFile],
    folder: Path,
    *,
    threads: int = 8,
    progress: bool = True,
) -> Downloaded:
    """Gets the files into the folder, under their paths in the repository.

    A file appears under its name only when it is whole and has the digest that the Hub gives: the
    SHA-256 of large files, git's SHA-1 of others. Until then it is called *.partial, from where
    another call goes on. Files that are there are checked, and fetched again where they differ.

    Args:
        dataset: whose files they are.
        shards: the files to get.
        folder: made where it is missing.
        threads: how many files to get at a time.
        progress: show a line with the bytes of all files on a terminal.

    Raises:
        ValueError: the Hub does not answer, the disk is too small, or a file is wrong twice.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    check_room(shards, folder)
    total = sum(shard.size for shard in shards)
    line = tqdm(
        total=total,
        unit="B",
        unit_scale=True,
        desc=dataset.repo,
        disable=None if progress else True,
    )
    with line, _quiet_hub():
        run = _Download(dataset, folder, line.update)
        _in_threads(run, shards, threads)
    files = tuple(folder / shard.path for shard in shards)
    return Downloaded(files, run.fetched, run.transferred)


def check_room(shards: Sequence[HubFile], folder: Path) -> None:
    """Raises ValueError where the disk has no room for what is missing of the files."""
    missing = sum(max(shard.size - _present(shard, folder), 0) for shard in shards)
    free = shutil.disk_usage(folder).free
    if missing > free:
        raise ValueError(
            f"the files need {in_bytes(missing)} more and {folder} has {in_bytes(free)} free; "
            "choose another folder, or a part of the files"
        )


def in_bytes(count: int) -> str:
    """A number of bytes in words, such as 1.23GB."""
    return str(tqdm.format_sizeof(count, "B"))


class _Stopped(Exception):
    """Another thread has failed."""


class _Download:
    """Fetches single files; counts for all of them."""

    def __init__(self, dataset: HubDataset, folder: Path, advance: Callable[[int], Any]):
        self.dataset, self.folder, self.advance = dataset, folder, advance
        self.fetched = self.transferred = 0
        self.stopping = threading.Event()
        self._lock = threading.Lock()

    def fetch(self, shard: HubFile) -> None:
        target, partial = self.folder / shard.path, _partial(shard, self.folder)
        if target.is_file() and _is_whole(target, shard):
            self._count(shard.size)
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        for attempt in (1, 2):
            with hub_errors(self.dataset.repo, self.dataset.commit):
                self._transfer(shard, partial)
            if _is_whole(partial, shard):
                partial.replace(target)
                with self._lock:
                    self.fetched += 1
                return
            self._count(-partial.stat().st_size)
            partial.unlink()
            if attempt == 1:
                log.warning("%s has not the digest that the Hub gives; once more", shard.path)
        raise ValueError(
            f"{shard.path} of {self.dataset.repo!r} came twice with another digest than the Hub "
            "gives for it; a proxy in between may change it"
        )

    def _transfer(self, shard: HubFile, partial: Path) -> None:
        """Gets what is missing of the file; tries again where the Hub is not reached."""
        present = partial.stat().st_size if partial.is_file() else 0
        if present > shard.size:
            partial.unlink()
            present = 0
        self._count(present)
        failures = 0
        while True:
            try:
                self._append(shard, partial)
                return
            except (errors.HTTPError, OSError) as error:
                now = partial.stat().st_size if partial.is_file() else 0
                failures = 0 if now > present else failures + 1
                present = now
                if not is_connection_problem(error) or failures > len(WAITS):
                    raise
                log.info("%s: %s; going on at byte %d", shard.path, error, present)
                self.stopping.wait(WAITS[max(failures - 1, 0)])

    def _append(self, shard: HubFile, partial: Path) -> None:
        with _CountedFile(partial, self._write) as file:
            present = file.tell()
            if present < shard.size:
                http_get(
                    file_url(self.dataset, shard),
                    file,
                    resume_size=present,
                    headers=utils.build_hf_headers(library_name="diffusax"),
                    expected_size=shard.size,
                )

    def _write(self, change: int) -> None:
        if self.stopping.is_set():
            raise _Stopped
        with self._lock:
            self.transferred += max(change, 0)
        self._count(change)

    def _count(self, change: int) -> None:
        with self._lock:
            self.advance(change)


class _CountedFile(io.BufferedWriter):
    """A file to append to, which says how many bytes it gains and loses."""

    def __init__(self, path: Path, changed: Callable[[int], None]):
        super().__init__(io.FileIO(path, "ab"))
        self._changed = changed

    def write(self, data: Any) -> int:
        self._changed(len(data))
        return super().write(data)

    def truncate(self, size: int | None = None) -> int:
        # The Hub's client does so where a server sends the whole file instead of its rest.
        self.flush()
        before = os.fstat(self.fileno()).st_size
        after = super().truncate(size)
        self._changed(after - before)
        return after


def _in_threads(run: _Download, shards: Sequence[HubFile], threads: int) -> None:
    """All files, or the first error; an interrupt ends the transfers of all threads."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(run.fetch, shard) for shard in shards]
        try:
            done, _ = wait(futures, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
        except BaseException:
            run.stopping.set()
            pool.shutdown(cancel_futures=True)
            raise


def _present(shard: HubFile, folder: Path) -> int:
    """The bytes of a file that are there."""
    for path in (folder / shard.path, _partial(shard, folder)):
        if path.is_file():
            return path.stat().st_size
    return 0


def _partial(shard: HubFile, folder: Path) -> Path:
    # With the digest, so that what was got of an earlier commit is never gone on with.
    name = Path(shard.path)
    return folder / name.with_name(f"{name.name}.{shard.blob[:12]}.partial")


def _is_whole(file: Path, shard: HubFile) -> bool:
    """Whether the file has the size and the digest that the Hub gives."""
    if file.stat().st_size != shard.size:
        return False
    with file.open("rb") as opened:
        if shard.sha256 is not None:
            return hashlib.file_digest(opened, "sha256").hexdigest() == shard.sha256
        digest = hashlib.sha1(b"blob %d\0" % shard.size, usedforsecurity=False)
        while chunk := opened.read(2**20):
            digest.update(chunk)
        return digest.hexdigest() == shard.blob


@contextlib.contextmanager
def _quiet_hub() -> Iterator[None]:
    """Without huggingface_hub's bar for each file: one line is shown for all."""
    if utils.are_progress_bars_disabled(_PROGRESS_OF_HUB):
        yield
        return
    utils.disable_progress_bars(_PROGRESS_OF_HUB)
    try:
        yield
    finally:
        utils.enable_progress_bars(_PROGRESS_OF_HUB)


def write_urls(file: Path, dataset: HubDataset, shards: Sequence[HubFile]) -> None:
    """Writes aria2's input file: a line for each address, then its options on lines of their own.

    `aria2c --input-file FILE --dir DIR` gets the files and checks their digests. The file holds no
    token.

    Raises:
        OSError: the file cannot be written; names it and says why.
    """
    lines = []
    for shard in shards:
        lines.append(file_url(dataset, shard))
        lines.append(f"  out={shard.path}")
        if shard.sha256:
            lines.append(f"  checksum=sha-256={shard.sha256}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(file) as partial:
        partial.write_text("\n".join([*lines, ""]), "utf-8")


def file_url(dataset: HubDataset, shard: HubFile) -> str:
    """Returns the address of a file at the data set's commit, at HF_ENDPOINT if that is set."""
    return huggingface_hub.hf_hub_url(
        dataset.repo, shard.path, repo_type="dataset", revision=dataset.commit
    )
