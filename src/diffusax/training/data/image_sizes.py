"""Reads the sizes of a data set's images, from their headers or from columns."""

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
from diffusax.training.data.batches import Broken, Tally
from diffusax.training.data.clips import ClipFacts, clip_facts
from diffusax.training.data.edits import beneath
from diffusax.training.data.examples import image_file
from diffusax.training.data.folders import FolderSource
from diffusax.training.data.sources import (
    ArrowSource,
    Source,
    as_list,
    cache_folder,
)

log = logging.getLogger(__name__)


def sizes_in_headers(source: Source, column: str, threads: int) -> np.ndarray:
    """Reads the heights and widths of a source's images from their headers: n 2 int32.

    They are kept in the cache (DIFFUSAX_CACHE), so that each data set is read once. Images that
    cannot be read have 0 and 0, and are named in the log. Of a list of images it is the first.

    Raises:
        ValueError: more than one image in a hundred cannot be read.
    """

    def read() -> np.ndarray:
        return _read(source, lambda row: upright_size(image_file(_first(row[column]))), threads)

    return _once(_kept(source, column), read)


def all_sizes_in_headers(source: Source, column: str, threads: int) -> np.ndarray:
    """Reads the heights and widths of all images in a column: n k 2 int32; see `sizes_in_headers`.

    k is the most that a row has. Behind a row's last one they are 0 and 0; in the place of an image
    that cannot be read -1 and -1.
    """

    def sizes(row: dict[str, Any]) -> list[int]:
        return [side for cell in as_list(row[column]) for side in upright_size(image_file(cell))]

    def read() -> np.ndarray:
        found = [[-1, -1] if own is None else own for own in _read_rows(source, sizes, threads)]
        most = max(2, *map(len, found))
        rows = [[*own, *[0] * (most - len(own))] for own in found]
        return np.array(rows, np.int32).reshape(len(rows), -1, 2)

    return _once(_kept(source, column, what="all"), read)


def clips_in_headers(source: Source, column: str, threads: int) -> list[ClipFacts | None]:
    """Reads the headers of a source's clips, see `sizes_in_headers`; None for broken ones."""

    def facts(row: dict[str, Any]) -> list[float]:
        found = clip_facts(row[column])
        return [found.height, found.width, found.frames, found.seconds]

    def read() -> np.ndarray:
        found = [own or [0.0] * 4 for own in _read_rows(source, facts, threads)]
        return np.array(found, np.float64).reshape(-1, 4)

    rows = _once(_kept(source, column, what="clips"), read)
    return [
        ClipFacts(int(height), int(width), int(frames), seconds) if frames else None
        for height, width, frames, seconds in rows.tolist()
    ]


def _once(kept: Path | None, read: Callable[[], np.ndarray]) -> np.ndarray:
    """Returns what a file keeps, or else reads and keeps it."""
    if kept is not None and kept.is_file():
        try:
            return np.load(kept)  # type: ignore[no-any-return]
        except (OSError, ValueError, EOFError) as error:
            log.warning("%s is made anew: %s", kept, error)
    sizes = read()
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
    found = _read_rows(source, size, threads)
    return np.array([own or (0, 0) for own in found], np.int32).reshape(-1, 2)


def _read_rows(
    source: Source, size: Callable[[dict[str, Any]], Any], threads: int
) -> list[Any | None]:
    """Returns what a function reads of each row; None of rows that cannot be read, which are named.

    Raises:
        ValueError: these are more than one in a hundred.
    """

    def read(index: int) -> Any:
        try:
            return size(source[index])
        except Exception as error:
            return Broken(source.name(index), f"{type(error).__name__}: {error}")

    tally, sizes = Tally(len(source)), list[Any | None]()
    bar = tqdm(total=len(source), desc="reading sizes", unit="image", disable=None)
    with bar, ThreadPoolExecutor(threads) as pool:
        for start, chunk in _chunks(len(source)):
            for found in pool.map(read, chunk):
                tally.count(found)
                sizes.append(None if isinstance(found, Broken) else found)
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


def _kept(source: Source, column: str, *, what: str = "") -> Path | None:
    """Returns the file that keeps the sizes; None for a source without files.

    what: "all" for those of all images in the column, instead of a row's first; "clips" for the
    headers of clips.
    """
    source, more = beneath(source), [what][: bool(what)]
    if isinstance(source, ArrowSource):
        # Their names are digests of the data set's files.
        identity: list[Any] = [column, *more, *source.files]
    elif isinstance(source, FolderSource):
        cells = [files[column] for files in source.files if column in files]
        names = [
            name for cell in cells for name in (as_list(cell) if what == "all" else [_first(cell)])
        ]
        identity = [column, *more, source.folder]
        identity += map(_stamp, (Path(source.folder) / name for name in names))
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
