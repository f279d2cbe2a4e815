"""Getting the files of a data set: in parallel, resumable inside a file, with digests checked."""

import dataclasses
import functools
import hashlib
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, BinaryIO

from huggingface_hub import constants, errors, utils
from tqdm.auto import tqdm

from diffusax.checkpoints.hub import hub_errors, is_connection_problem
from diffusax.hub_data.aria2 import file_url
from diffusax.hub_data.repository import HubDataset, HubFile

log = logging.getLogger(__name__)

WAITS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)
"""Seconds before each new attempt where the Hub is not reached."""
_CHUNK = 10 * 2**20


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
    with line:
        run = _Download(dataset, folder, line.update)
        _in_threads(run, shards, threads)
    files = tuple(folder / shard.path for shard in shards)
    return Downloaded(files, run.fetched, run.transferred)


def check_room(shards: Sequence[HubFile], folder: Path) -> None:
    """Raises ValueError where the disk has no room for what is missing of the files."""
    present = (_size(folder / s.path) or _size(_partial(s, folder)) for s in shards)
    missing = sum(max(s.size - there, 0) for s, there in zip(shards, present))
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
            self._count(-_size(partial))
            partial.unlink()
            if attempt == 1:
                log.warning("%s has not the digest that the Hub gives; once more", shard.path)
        raise ValueError(
            f"{shard.path} of {self.dataset.repo!r} came twice with another digest than the Hub "
            "gives for it; a proxy in between may change it"
        )

    def _transfer(self, shard: HubFile, partial: Path) -> None:
        """Gets what is missing of the file; tries again where the Hub is not reached."""
        failures = 0
        with partial.open("ab") as file:
            if file.tell() > shard.size:
                file.truncate(0)
                file.seek(0)
            self._count(file.tell())
            while (before := file.tell()) < shard.size:
                try:
                    self._append(shard, file)
                except (errors.HTTPError, OSError) as error:
                    failures = 0 if file.tell() > before else failures + 1
                    if not is_connection_problem(error) or failures > len(WAITS):
                        raise
                    log.info("%s: %s; going on at byte %d", shard.path, error, file.tell())
                    self.stopping.wait(WAITS[max(failures - 1, 0)])

    def _append(self, shard: HubFile, file: BinaryIO) -> None:
        """Appends what the Hub sends of the file, from the byte on where it ends here.

        Raises:
            OSError: the connection ends before the file does, or the disk is full.
        """
        # Not `hf_hub_download`, which begins a file again that was not got to its end.
        present = file.tell()
        with utils.http_stream_backoff(
            "GET",
            file_url(self.dataset, shard),
            headers=utils.build_hf_headers(
                library_name="diffusax",
                headers={"Range": f"bytes={present}-"} if present else None,
            ),
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            retry_on_exceptions=(),
            retry_on_status_codes=(408, 429),
        ) as answer:
            utils.hf_raise_for_status(answer)
            if present and answer.status_code == 200:  # The server sends the file, not its rest.
                file.truncate(0)
                file.seek(0)
                self._count(-present)
            for data in answer.iter_bytes(_CHUNK):
                if self.stopping.is_set():
                    raise _Stopped
                file.write(data)
                self._count(len(data), transferred=len(data))
        if file.tell() < shard.size:
            raise OSError(f"the connection ended at byte {file.tell()} of {shard.size}")

    def _count(self, change: int, *, transferred: int = 0) -> None:
        with self._lock:
            self.transferred += transferred
            self.advance(change)


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


def _size(file: Path) -> int:
    """The bytes of a file, 0 where there is none."""
    return file.stat().st_size if file.is_file() else 0


def _partial(shard: HubFile, folder: Path) -> Path:
    # With the digest, so that what was got of an earlier commit is never gone on with.
    name = Path(shard.path)
    return folder / name.with_name(f"{name.name}.{shard.blob[:12]}.partial")


def _is_whole(file: Path, shard: HubFile) -> bool:
    """Whether the file has the size and the digest that the Hub gives."""
    if _size(file) != shard.size:
        return False
    git = functools.partial(hashlib.sha1, b"blob %d\0" % shard.size, usedforsecurity=False)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256" if shard.sha256 else git)
    return digest.hexdigest() == (shard.sha256 or shard.blob)
