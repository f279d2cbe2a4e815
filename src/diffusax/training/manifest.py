"""Digests of a folder's files, which reveal a change such as a flipped bit or a truncated file."""

import hashlib
import json
import os
from pathlib import Path

_NAME = "sha256.json"


def write_manifest(folder: Path) -> None:
    """Writes the SHA-256 of each file below the folder into it; the list appears only when whole.

    Raises:
        OSError: a file has disappeared, or the disk is full.
    """
    digests = {
        file.relative_to(folder).as_posix(): _digest(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and not file.name.startswith(_NAME)
    }
    partial = folder / f"{_NAME}.partial"
    partial.write_text(json.dumps(digests, indent=1), "utf-8")
    os.replace(partial, folder / _NAME)


def damage(folder: Path) -> str | None:
    """Describes what is wrong with the folder's files; returns None where nothing is known to be.

    A run that was killed just after a checkpoint leaves it without digests.
    """
    try:
        text = (folder / _NAME).read_text("utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return f"{_NAME} cannot be read ({error})"
    try:
        digests = {folder / name: digest for name, digest in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError):
        return f"{_NAME} is not whole"
    for file, digest in digests.items():
        try:
            actual = _digest(file)
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as error:
            return f"{file} cannot be read ({error.strerror})"
        if actual != digest:
            return f"{file} is not what was written"
    return None


def _digest(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()
