"""Reads and writes files: JSON with clear errors, files that appear only when whole, and locks."""

import contextlib
import json
import logging
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock

log = logging.getLogger(__name__)

# The largest known ones, tokenizers and indices of many shards, have ten million bytes.
MAX_JSON_BYTES = 2**28


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
