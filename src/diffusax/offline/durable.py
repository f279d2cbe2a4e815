"""Writes files that are whole and on the disk once they have their name, even after a power cut."""

import os
from collections.abc import Iterable
from pathlib import Path

from diffusax.files import written_whole


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
