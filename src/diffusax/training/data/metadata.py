"""Reads metadata.jsonl, metadata.csv and metadata.parquet line by line, and nothing by halves."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusax.boundary.files import csv_rows, unique_keys
from diffusax.boundary.messages import require_extra


def metadata_rows(file: Path) -> Iterator[tuple[str, Any]]:
    """Yields the places and the rows of a metadata file, without blank lines.

    Raises:
        ValueError: a line cannot be read, or not wholly; names it and says what to do.
    """
    readers = {".csv": _csv_rows, ".jsonl": _json_rows, ".parquet": _parquet_rows}
    try:
        yield from readers[file.suffix.lower()](file)
    except UnicodeDecodeError:
        raise not_utf8(file) from None


def not_utf8(file: Path) -> ValueError:
    """Returns the error of a text file in another encoding."""
    return ValueError(f"{file} is not text in UTF-8; save it as such")


def _json_rows(file: Path) -> Iterator[tuple[str, Any]]:
    # Unlike splitlines, files split only at line ends, not at other separators inside a text.
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{file} line {number}"
            try:
                yield where, json.loads(line, object_pairs_hook=unique_keys)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where}: {error}; each line must be one JSON object") from None
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where}: {error}") from None


def _csv_rows(file: Path) -> Iterator[tuple[str, Any]]:
    for number, row in csv_rows(file, ("file_name", "file_names")):
        yield f"{file} line {number}", row


def _parquet_rows(file: Path) -> Iterator[tuple[str, Any]]:
    pyarrow = require_extra("pyarrow", "train")
    parquet = require_extra("pyarrow.parquet", "train")
    number = 0
    try:
        with parquet.ParquetFile(file) as opened:
            for batch in opened.iter_batches(batch_size=1024):
                for row in batch.to_pylist():
                    yield f"{file} row {number}", row
                    number += 1
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{file} is not a whole Parquet file: {error}") from None
