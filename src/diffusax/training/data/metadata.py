"""Reads metadata.jsonl, metadata.csv and metadata.parquet line by line, and nothing by halves."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from diffusax.extras import require_extra

_DELIMITERS = (",", ";", "\t")
"""What stands between the values of a .csv; spreadsheets in Europe write semicolons."""


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
    with file.open(encoding="utf-8-sig", newline="") as lines:
        first = lines.readline()
        lines.seek(0)
        delimiter = _delimiter(first)
        # Strict, so that a quote that is never closed does not swallow the rest of the file.
        reader = csv.reader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
        began = 1
        header: list[str] | None = None
        try:
            for values in reader:
                where, began = f"{file} line {began}", reader.line_num + 1
                if not any(value.strip() for value in values):
                    continue
                if header is None:
                    header = [value.strip() for value in values]
                    _check_header(where, header)
                    continue
                if len(values) != len(header):
                    raise ValueError(_wrong_count(where, values, header, delimiter))
                yield where, dict(zip(header, values))
        except csv.Error as error:
            raise ValueError(
                f"{file} line {began}: {error}; put a value with quotes in it between quotes, and "
                'write each of its own twice, as in "a ""red"" apple"'
            ) from None


def _delimiter(header: str) -> str:
    """Returns what stands between the names of columns, one of which is or ends in file_name."""
    for delimiter in _DELIMITERS:
        names = [name.strip().strip('"') for name in header.split(delimiter)]
        if any(name.endswith(("file_name", "file_names")) for name in names):
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
