"""The folder that a run writes: its settings, its writers and its finished shards.

    manifest.json       what decides the images; a run with anything else is refused
    000000, 000001.tar  finished shards: each is renamed to its name when it is whole
    work/000002         the finished batches of an unfinished shard
    errors/000000.jsonl the lines of a shard that could not be generated
    errors.jsonl        those of all shards

A shard holds the images of a fixed number of lines, whichever process generates it, so that a run
can continue with another number of processes.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from diffusax.boundary.files import load_json, locked, sync_folder, write_durably
from diffusax.offline.formats import Format

_SECONDS_FOR_MANIFEST = 60


class Folder:
    """The output folder of a run."""

    def __init__(self, path: Path, format: Format):
        self.path, self.format = path, format
        try:
            for part in ("work", "errors", "locks"):
                (path / part).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"the folder {path} cannot be made ({error.strerror})") from None

    def claim(self, manifest: Mapping[str, Any]) -> None:
        """Writes the run's manifest, or compares it with the one in the folder.

        Raises:
            ValueError: the folder holds another run; says in what it differs.
        """
        # The processes of a run start at the same time.
        with self._lock("manifest", _SECONDS_FOR_MANIFEST):
            claim(self.path / "manifest.json", manifest, self.path)

    @contextlib.contextmanager
    def part(self, index: int, count: int) -> Iterator[None]:
        """Locks a part, so that no other process generates its shards.

        Raises:
            ValueError: another process generates this part, or runs with another number of parts.
        """
        with self._lock(f"{index}-of-{count}"):
            for other in (self.path / "locks").glob("*-of-*.lock"):
                if not other.stem.endswith(f"-of-{count}"):
                    with self._lock(other.stem):
                        pass
            yield

    @contextlib.contextmanager
    def alone_with(self, shard: int) -> Iterator[None]:
        """Waits until no other process generates the shard."""
        with self._lock(f"shard-{shard:06}", -1):
            yield

    @property
    def stop_file(self) -> Path:
        """The file whose existence makes workers stop after their batch."""
        return self.path / "work" / "stop"

    def is_done(self, shard: int) -> bool:
        """Returns whether a shard is finished."""
        return self._shard(shard).exists()

    def shard(self, number: int) -> "Shard":
        """Returns a shard to generate."""
        work, errors = (self.path / part / f"{number:06}" for part in ("work", "errors"))
        return Shard(self._shard(number), work, errors.with_suffix(".jsonl"), self.format)

    def clean(self) -> None:
        """Removes the working files of finished shards."""
        for work in (self.path / "work").iterdir():
            if work.name.isdigit() and self.is_done(int(work.name)):
                shutil.rmtree(work, ignore_errors=True)

    def gather_errors(self) -> int:
        """Collects the errors of all shards in errors.jsonl, and returns their number."""
        files = sorted((self.path / "errors").glob("*.jsonl"))
        lines = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
        with self._lock("errors", _SECONDS_FOR_MANIFEST):
            write_durably(self.path / "errors.jsonl", lines)
        return len(lines)

    def _lock(self, name: str, seconds: float = 0) -> AbstractContextManager[None]:
        return locked(self.path / "locks" / f"{name}.lock", self.path, seconds)

    def _shard(self, number: int) -> Path:
        return self.path / f"{number:06}{self.format.suffix}"


def claim(file: Path, manifest: Mapping[str, Any], folder: Path) -> None:
    """Writes what decides a run's results to a file, or compares it with what is there.

    folder: the folder of the run, for the message.

    Raises:
        ValueError: the file is another run's; says in what it differs.
    """
    if not file.exists():
        write_durably(file, (json.dumps(manifest, indent=1) + "\n").encode())
        return
    before = load_json(file)
    names = [name for name in {**manifest, **before} if manifest.get(name) != before.get(name)]
    if names:
        changes = [f"{n} was {_short(before.get(n))}, now {_short(manifest.get(n))}" for n in names]
        raise ValueError(
            f"{folder} holds a run that differs: {'; '.join(changes)}; give the "
            "same as then to go on with it, or another output folder"
        )


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard in progress. path: the path of the finished one."""

    path: Path
    work: Path
    errors: Path
    format: Format

    def begin(self) -> None:
        """Makes the working folder."""
        self.work.mkdir(exist_ok=True)

    def has_batch(self, number: int) -> bool:
        """Returns whether an earlier attempt has finished the batch."""
        return self._batch(number).exists()

    def add_batch(
        self,
        number: int,
        items: Sequence[tuple[Mapping[str, Any], bytes]],
        errors: Sequence[Mapping[str, Any]],
        pool: Any,
    ) -> None:
        """Writes the images of a batch, which is done from then on."""
        self.format.write_piece(self.work, number, items, pool)
        done = {"pictures": [info for info, _ in items], "errors": list(errors)}
        write_durably(self._batch(number), json.dumps(done).encode())

    def finish(self, batches: int, errors: Sequence[Mapping[str, Any]]) -> None:
        """Makes the finished shard from its batches. errors: those of lines in no batch."""
        done = [json.loads(self._batch(number).read_bytes()) for number in range(batches)]
        failed = [*errors, *(error for batch in done for error in batch["errors"])]
        if failed:
            failed.sort(key=lambda error: error["line"])
            text = "".join(json.dumps(error, ensure_ascii=False) + "\n" for error in failed)
            write_durably(self.errors, text.encode("utf-8", "backslashreplace"))
        infos = [info for batch in done for info in batch["pictures"]]
        infos.sort(key=lambda info: (info["line"], info["number"]))
        self.format.join(self.work, batches, infos, self.path)
        sync_folder(self.path.parent)
        shutil.rmtree(self.work, ignore_errors=True)

    def _batch(self, number: int) -> Path:
        return self.work / f"{number:06}.json"


def _short(value: Any) -> str:
    text = "not given" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
