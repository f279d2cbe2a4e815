"""Reads the sizes of a data set's images, which buckets need before the first step."""

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from tqdm.auto import tqdm

from diffusax.boundary.files import written_whole
from diffusax.images.reading import upright_size
from diffusax.training.data.broken import Broken, Tally
from diffusax.training.data.examples import image_file
from diffusax.training.data.folders import FolderSource
from diffusax.training.data.sources import ArrowSource, Source, cache_folder

log = logging.getLogger(__name__)


def sizes_in_headers(source: Source, column: str, threads: int) -> np.ndarray:
    """Reads the heights and widths of a source's images from their headers: n 2 int32.

    They are kept in the cache (DIFFUSAX_CACHE), so that each data set is read once. Images that
    cannot be read have 0 and 0, and are named in the log. Of a list of images it is the first.

    Raises:
        ValueError: more than one image in a hundred cannot be read.
    """
    kept = _kept(source, column)
    if kept is not None and kept.is_file():
        try:
            return np.load(kept)
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s is made anew: %s", kept, error)
    sizes = _read(source, lambda row: upright_size(image_file(_first(row[column]))), threads)
    if kept is not None:
        try:
            kept.parent.mkdir(parents=True, exist_ok=True)
            with written_whole(kept) as partial, partial.open("wb") as file:
                np.save(file, sizes)
        except OSError as error:
            log.warning("the sizes are not kept for the next run: %s", error)
    return sizes


def sizes_in_columns(source: Source, columns: tuple[str, str], threads: int) -> np.ndarray:
    """Reads the heights and widths of a source's images from two columns: n 2 int32.

    Raises:
        ValueError: more than one row in a hundred has no such numbers.
    """
    return _read(source, lambda row: _whole_numbers(row, columns), threads)


def _read(
    source: Source, size: Callable[[dict[str, Any]], tuple[int, int]], threads: int
) -> np.ndarray:
    def read(index: int) -> tuple[int, int] | Broken:
        try:
            return size(source[index])
        except Exception as error:
            return Broken(source.name(index), f"{type(error).__name__}: {error}")

    tally = Tally(len(source))
    sizes = np.zeros((len(source), 2), np.int32)
    bar = tqdm(total=len(source), desc="reading sizes", unit="image", disable=None)
    with bar, ThreadPoolExecutor(threads) as pool:
        for start, chunk in _chunks(len(source)):
            for index, found in zip(chunk, pool.map(read, chunk), strict=True):
                tally.count(found)
                if not isinstance(found, Broken):
                    sizes[index] = found
            bar.update(start + len(chunk) - bar.n)
    return sizes


def _chunks(count: int, length: int = 1024) -> Iterator[tuple[int, range]]:
    for start in range(0, count, length):
        yield start, range(start, min(start + length, count))


def _first(cell: Any) -> Any:
    return cell[0] if isinstance(cell, list) and cell else cell


def _whole_numbers(row: dict[str, Any], columns: tuple[str, str]) -> tuple[int, int]:
    height, width = (int(row[column]) for column in columns)
    if min(height, width) < 1:
        raise ValueError(f"an image of {width}x{height} pixels cannot be")
    return height, width


def _kept(source: Source, column: str) -> Path | None:
    """Returns the file that the sizes are kept in; None for a source that is of no files."""
    if isinstance(source, ArrowSource):
        # Their names are digests of the data set's files.
        identity: list[Any] = [column, *source.files]
    elif isinstance(source, FolderSource):
        stats = [_first(files[column]) for files in source.files if column in files]
        identity = [column, source.folder, *map(_stamp, (Path(source.folder) / f for f in stats))]
    else:
        return None
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:24]
    return cache_folder() / "sizes" / f"{digest}.npy"


def _stamp(file: Path) -> list[Any]:
    try:
        stat = file.stat()
    except OSError:
        return [str(file)]
    return [str(file), stat.st_mtime_ns, stat.st_size]
