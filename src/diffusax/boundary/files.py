"""Reads and writes files: JSON with clear errors, files that appear only when whole, and locks."""

import contextlib
import csv
import json
import logging
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import filelock

log = logging.getLogger(__name__)

# The largest known ones, tokenizers and indices of many shards, have ten million bytes.
MAX_JSON_BYTES = 2**28


class FromPretrained:
    """A class whose `from_pretrained` the room of checkpoints gives it, as this room has no Hub."""

    if TYPE_CHECKING:

        @classmethod
        def from_pretrained(
            cls, path_or_repo: str | Path, *, subfolder: str | None = None, **hub: Any
        ) -> Self:
            """See `checkpoints.processors`."""
            ...


def load_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file.

    Raises:
        ValueError: the file is missing, cannot be read, or is not a JSON object; names the file.
    """
    text = read_text(path, MAX_JSON_BYTES)
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError(f"{path} is nested too deep; download it again") from None
    except ValueError as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path} is not valid JSON ({reason}); download it again") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path} must hold a JSON object, not {type(data).__name__}")
    return data


def read_text(path: Path, limit: int) -> str:
    """Reads a UTF-8 file of at most `limit` bytes.

    Raises:
        ValueError: the file is missing, larger, not UTF-8, or cannot be read; names the file.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise ValueError(f"{path} is not a file")
        if found.st_size > limit:
            raise ValueError(f"{path} has {found.st_size} bytes; at most {limit} are read")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing; is this a diffusers checkpoint?") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error.reason}); download it again") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None


def write_json(path: Path, data: dict[str, Any], *, ensure_ascii: bool = True) -> None:
    """Writes a JSON file, which appears only when whole.

    Raises:
        OSError: it cannot be written; names the file.
    """
    text = json.dumps(data, indent=2, ensure_ascii=ensure_ascii) + "\n"
    with written_whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which is renamed to `path` at the end, or removed after an error.

    Raises:
        OSError: the file cannot be written (no room, no right); names it and says why.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        yield partial
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if not isinstance(error, OSError):
            raise
        raise OSError(f"{path} could not be written ({error.strerror or error})") from None


@contextlib.contextmanager
def locked(lock: Path, folder: Path, seconds: float = 0) -> Iterator[None]:
    """Holds a lock on a folder, which the system releases when the process ends, however it ends.

    Args:
        lock: the file to lock.
        folder: the folder that the error names.
        seconds: how long to wait for another holder; a negative number waits for ever.

    Raises:
        ValueError: another process still holds the lock after that time.
    """
    holder = filelock.FileLock(lock, timeout=seconds)
    try:
        holder.acquire()
    except filelock.Timeout:
        message = f"another run is writing to {folder} ({lock.name}); wait for its end or stop it"
        raise ValueError(message) from None
    except (OSError, NotImplementedError) as error:
        log.warning("%s cannot be locked (%s); start no second run there", folder, error)
    try:
        yield
    finally:
        holder.release()


_DELIMITERS = (",", ";", "\t")
"""What stands between the values of a .csv; spreadsheets in Europe write semicolons."""


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns a JSON object as a dict, for `object_pairs_hook`.

    Raises:
        ValueError: a name stands twice in it.
    """
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next(k for i, (k, _) in enumerate(pairs) if k in dict(pairs[:i]))
        raise ValueError(f"{twice!r} stands there twice, with two values; leave one of them out")
    return found


def csv_rows(file: Path, wanted: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yields the rows of a CSV file in UTF-8, each with the number of its first line.

    wanted: names of columns, or their ends, one of which the header has; they tell the delimiter.

    Raises:
        ValueError: a row has another number of values than the header, or a quote is not closed;
            names the line and says what to do.
        UnicodeDecodeError: the file is in another encoding.
    """
    with file.open(encoding="utf-8-sig", newline="") as lines:
        delimiter = _delimiter(lines.readline(), wanted)
        lines.seek(0)
        # Strict, so that a quote that is never closed does not swallow the rest of the file.
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        number, header = 1, list[str]()
        try:
            for values in reader:
                began, number = number, reader.line_num + 1
                if not any(value.strip() for value in values):
                    continue
                where = f"{file} line {began}"
                if not header:
                    header = [value.strip() for value in values]
                    _check_header(where, header)
                    continue
                if len(values) != len(header):
                    raise ValueError(_wrong_count(where, values, header, delimiter))
                yield began, dict(zip(header, values))
        except csv.Error as error:
            raise ValueError(
                f"{file} line {number}: {error}; put a value with quotes in it between quotes, and "
                'write each of its own twice, as in "a ""red"" apple"'
            ) from None


def _delimiter(header: str, wanted: tuple[str, ...]) -> str:
    """Returns what stands between the names of columns, one of which ends in a wanted one."""
    for delimiter in _DELIMITERS:
        names = [name.strip().strip('"') for name in header.split(delimiter)]
        if any(name.endswith(wanted) for name in names):
            return delimiter
    return _DELIMITERS[0]


def _check_header(where: str, header: list[str]) -> None:
    twice = [name for i, name in enumerate(header) if name in header[:i]]
    if twice:
        raise ValueError(f"{where} has two columns {twice[0]!r}; rename one of them")


def _wrong_count(where: str, values: list[str], header: list[str], delimiter: str) -> str:
    n, m = len(values), len(header)
    counts = f"{where} has {n} value{'s' * (n != 1)}, and the header has {m}"
    names = f"{counts} ({', '.join(header)})"
    if len(values) < len(header):
        return f"{names}; write all of them, an empty one as nothing between two {delimiter!r}"
    rest = f"{delimiter} ".join(values[len(header) - 1 :])
    return f'{names}; put a text with {delimiter!r} in it between quotes, such as "{rest[:60]}"'


def write_durably(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Writes a file, which gets its name only when it is whole and on the disk.

    Raises:
        OSError: the file cannot be written; names it.
    """
    with written_whole(path) as partial, partial.open("wb") as file:
        for block in [data] if isinstance(data, bytes) else data:
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
