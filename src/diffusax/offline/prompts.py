"""Reads prompts part by part from .txt, .jsonl, .csv and .parquet files, or a list in memory.

A file is read twice: once for its digest and the number of its lines, once during the run. It is
never in memory as a whole.
"""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol, runtime_checkable

from diffusax.boundary.files import csv_rows, unique_keys
from diffusax.boundary.messages import require_extra

MAX_LINE_BYTES = 2**20
"""The longest line in bytes; longer ones are reported and skipped."""

COLUMNS = {
    "prompt": "prompt",
    "negative_prompt": "negative_prompt",
    "seed": "seed",
    "height": "height",
    "width": "width",
    "sampler": "sampler",
    "num_inference_steps": "num_inference_steps",
    "steps": "num_inference_steps",
    "guidance_scale": "guidance_scale",
    "guidance": "guidance_scale",
    "adapters": "adapters",
    "id": "id",
}
"""The columns that are read, and the argument that each stands for."""
VIDEO_COLUMNS = {
    "num_frames": "num_frames",
    "frames": "num_frames",
    "guidance_scale_2": "guidance_scale_2",
    "guidance_2": "guidance_scale_2",
    "fps": "fps",
}
"""Those that are read for models that generate videos, too."""
_ALL_COLUMNS = {**COLUMNS, **VIDEO_COLUMNS}
_WHOLE = ("seed", "height", "width", "num_inference_steps", "num_frames")
_REAL = ("guidance_scale", "guidance_scale_2", "fps")
"""The arguments that are numbers."""


@dataclasses.dataclass(frozen=True)
class Line:
    """A line of a file or a row of a table. number: counted from 1. value: unchecked."""

    number: int
    value: Any


Part = tuple[int, list[Line]]
Wanted = Callable[[int], bool]


@runtime_checkable
class Prompts(Protocol):
    """A source of prompts. name: for messages. count: the lines. digest: that of all they say."""

    name: str
    count: int
    digest: str

    def parts(self, size: int, wanted: Wanted) -> Iterator[Part]:
        """Yields the wanted parts of `size` lines, in order, each with its number."""

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        """Returns the values of a line by column; None for an empty line.

        Raises:
            ValueError: the line cannot be read; says why.
        """


Source = str | Path | Sequence[str | Mapping[str, Any]] | Prompts
"""A source of prompts: a file, a list, or the result of `open_prompts` for one of them."""


def open_prompts(source: Source) -> Prompts:
    """Opens the prompts of a file or of a list of texts and dictionaries.

    Raises:
        ValueError: there is no such file, it is of another kind, or it cannot be read.
    """
    if not isinstance(source, str | Path):
        return source if isinstance(source, Prompts) else Listed(list(source))
    path = Path(source)
    kinds: dict[str, Callable[[Path], Prompts]]
    kinds = {".txt": TextFile, ".jsonl": JsonFile, ".csv": CsvFile, ".parquet": ParquetFile}
    if path.suffix.lower() not in kinds:
        raise ValueError(f"the prompts must be a {', '.join(kinds)} file (got {path})")
    if not path.is_file():
        raise ValueError(f"the file of prompts {path} is missing")
    try:
        return kinds[path.suffix.lower()](path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror or error})") from None


class Listed:
    """Prompts in memory."""

    name = "rows"

    def __init__(self, rows: list[Any]):
        self._rows = rows
        self.count = len(rows)
        digest = hashlib.sha256()
        for row in rows:
            digest.update(json.dumps(row, sort_keys=True, default=repr).encode() + b"\n")
        self.digest = digest.hexdigest()

    def parts(self, size: int, wanted: Wanted) -> Iterator[Part]:
        for start in range(0, self.count, size):
            if wanted(start // size):
                rows = enumerate(self._rows[start : start + size], start + 1)
                yield start // size, [Line(number, value) for number, value in rows]

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        if isinstance(line.value, str):
            return {"prompt": line.value}
        if not isinstance(line.value, Mapping):
            kind = type(line.value).__name__
            raise ValueError(f"a row must be a text or a dictionary (got {kind})")
        return line.value


class TextFile:
    """A file with one prompt a line, UTF-8."""

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path
        self.count, self.digest = _count_lines(path)

    def parts(self, size: int, wanted: Wanted) -> Iterator[Part]:
        with self._path.open("rb") as file:
            for part in range(-(-self.count // size)):
                numbers = range(part * size + 1, min((part + 1) * size, self.count) + 1)
                lines = [Line(number, _read_line(file)) for number in numbers]
                if wanted(part):
                    yield part, lines

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        text = _text(line)
        if text.startswith("--prompt"):
            raise ValueError(
                "it looks like a line of A1111's script for prompts from a file; write its options "
                "as a JSON object in a .jsonl file"
            )
        if "\r" in text:
            raise ValueError("it has ends of line of old Macs in it; save the file with others")
        return {"prompt": text} if text else None


class JsonFile(TextFile):
    """A file with one JSON object a line."""

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        text = _text(line)
        if not text:
            return None
        try:
            row = json.loads(text, object_pairs_hook=unique_keys)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"it is not valid JSON ({error})") from None
        if not isinstance(row, dict):
            raise ValueError(f"it must be a JSON object (got {type(row).__name__})")
        return row


class CsvFile:
    """A table with one prompt a row, UTF-8, whose first line names the columns."""

    def __init__(self, path: Path):
        self.name = str(path)
        self._path = path
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        # A row that is not whole says so now, and not after a thousand images.
        first = next(self._rows(), None)
        self.count = sum(1 for _ in self._rows())
        if first is not None and "prompt" not in first[1]:
            raise ValueError(f"{path} has no column prompt; it has {', '.join(first[1])}")

    def parts(self, size: int, wanted: Wanted) -> Iterator[Part]:
        rows = enumerate(self._rows(), 1)
        for part in range(-(-self.count // size)):
            lines = [Line(number, row) for number, (_, row) in itertools.islice(rows, size)]
            if wanted(part):
                yield part, lines

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        """Returns the values; those of numbers are numbers, and empty ones are left out."""
        return {name: _number(name, value) for name, value in line.value.items() if value}

    def _rows(self) -> Iterator[tuple[int, dict[str, str]]]:
        try:
            yield from csv_rows(self._path, ("prompt",))
        except UnicodeDecodeError:
            raise ValueError(f"{self._path} is not text in UTF-8; save it as such") from None


class ParquetFile:
    """A table with one prompt a row; only the known columns are read."""

    def __init__(self, path: Path):
        self._arrow = require_extra("pyarrow", "offline")
        self._parquet = require_extra("pyarrow.parquet", "offline")
        self.name = str(path)
        self._path = path
        with path.open("rb") as file:
            self.digest = hashlib.file_digest(file, "sha256").hexdigest()
        with self._opened() as file:
            self.count = file.metadata.num_rows
            names = file.schema_arrow.names
        self._columns = [name for name in names if name in _ALL_COLUMNS]
        if "prompt" not in self._columns:
            raise ValueError(f"{path} has no column prompt; it has {', '.join(names)}")

    def parts(self, size: int, wanted: Wanted) -> Iterator[Part]:
        """Yields the wanted parts; skips row groups without one."""
        held: list[Line] = []
        for line in self._lines(size, wanted):
            held.append(line)
            if line.number % size == 0 or line.number == self.count:
                yield (line.number - 1) // size, held
                held = []

    @staticmethod
    def row(line: Line) -> Mapping[str, Any] | None:
        return line.value

    def _lines(self, size: int, wanted: Wanted) -> Iterator[Line]:
        with self._opened() as file:
            number = 0
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                parts = range(number // size, (number + rows - 1) // size + 1)
                if not any(map(wanted, parts)):
                    number += rows
                    continue
                for row in self._rows(file, group):
                    if wanted(number // size):
                        yield Line(number + 1, _whole_numbers(row))
                    number += 1

    def _rows(self, file: Any, group: int) -> Iterator[dict[str, Any]]:
        options = {"row_groups": [group], "columns": self._columns, "batch_size": 1024}
        try:
            for batch in file.iter_batches(**options):
                yield from batch.to_pylist()
        except (self._arrow.ArrowException, OSError) as error:
            raise ValueError(f"{self._path} cannot be read ({_first_line(error)})") from None

    def _opened(self) -> Any:
        try:
            return self._parquet.ParquetFile(self._path)
        except self._arrow.ArrowException as error:
            raise ValueError(
                f"{self._path} is not a whole Parquet file ({_first_line(error)})"
            ) from None


def _text(line: Line) -> str:
    if len(line.value) > MAX_LINE_BYTES:
        raise ValueError(f"it is longer than {MAX_LINE_BYTES} bytes")
    try:
        text = line.value.decode("utf-8-sig" if line.number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason})") from None
    return text.strip()


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def _read_line(file: IO[bytes]) -> bytes:
    """Reads the next line; returns only the beginning of one that is too long."""
    line = file.readline(MAX_LINE_BYTES + 2)
    rest = line
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(MAX_LINE_BYTES)
    return line


def _count_lines(path: Path) -> tuple[int, str]:
    digest, count, last = hashlib.sha256(), 0, b"\n"
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n"), digest.hexdigest()


def _number(name: str, value: str) -> Any:
    """Returns the number of a column with numbers; other texts stay, and are refused later."""
    argument = _ALL_COLUMNS.get(name, name)
    try:
        return float(value) if argument in _REAL else int(value) if argument in _WHOLE else value
    except ValueError:
        return value


def _whole_numbers(row: dict[str, Any]) -> dict[str, Any]:
    """Undoes pandas' floats for integers in columns with gaps, and leaves out NaN."""

    def mended(name: str, value: Any) -> Any:
        if isinstance(value, float):
            if value != value:
                return None
            if name != "guidance_scale" and value.is_integer():
                return int(value)
        return value

    return {name: mended(name, value) for name, value in row.items()}
