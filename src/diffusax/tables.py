"""Reads the rows of CSV files and the objects of JSON, wholly or with an error that says where."""

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
