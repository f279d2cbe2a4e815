"""The folder that a run writes: what it is of, who writes there, which shards are finished.

    manifest.json       what decides the pictures; a run with anything else is refused
    000000, 000001.tar  finished shards: each is renamed to its name when it is whole
    work/000002         the finished batches of a shard that is not
    errors/000000.jsonl the lines of a shard that could not be drawn
    errors.jsonl        those of all shards

A shard is what so many lines of the prompts give, whichever process draws it. So a run may be
continued with another number of processes.
"""

import contextlib
import dataclasses
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from diffusax.files import load_json, locked
from diffusax.offline.durable import sync_folder, write_durably
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
        """Writes down what the run is of, or compares it with what is there.

        Raises:
            ValueError: the folder holds another run; says in what it differs.
        """
        file = self.path / "manifest.json"
        # Processes of one run start at the same time.
        with self._lock("manifest", _SECONDS_FOR_MANIFEST):
            if not file.exists():
                write_durably(file, (json.dumps(manifest, indent=1) + "\n").encode())
                return
            before = load_json(file)
        names = [name for name in {**manifest, **before} if manifest.get(name) != before.get(name)]
        if names:
            changes = [
                f"{n} was {_short(before.get(n))}, now {_short(manifest.get(n))}" for n in names
            ]
            raise ValueError(
                f"{self.path} holds a run that differs: {'; '.join(changes)}; give the "
                "same as then to go on with it, or another output folder"
            )

    @contextlib.contextmanager
    def part(self, index: int, count: int) -> Iterator[None]:
        """Keeps others from drawing the same shards.

        Raises:
            ValueError: somebody draws this part already, or the run divided otherwise.
        """
        with self._lock(f"{index}-of-{count}"):
            for other in (self.path / "locks").glob("*-of-*.lock"):
                if not other.stem.endswith(f"-of-{count}"):
                    with self._lock(other.stem):
                        pass
            yield

    @contextlib.contextmanager
    def alone_with(self, shard: int) -> Iterator[None]:
        """Waits until nobody else draws the shard."""
        with self._lock(f"shard-{shard:06}", -1):
            yield

    @property
    def stop_file(self) -> Path:
        """Where it is, the processes that draw for another one stop after their batch."""
        return self.path / "work" / "stop"

    def is_done(self, shard: int) -> bool:
        """Whether a shard is finished."""
        return self._shard(shard).exists()

    def shard(self, number: int) -> "Shard":
        """A shard that is to be drawn."""
        work, errors = (self.path / part / f"{number:06}" for part in ("work", "errors"))
        return Shard(self._shard(number), work, errors.with_suffix(".jsonl"), self.format)

    def clean(self) -> None:
        """Removes what finished shards have left behind."""
        for work in (self.path / "work").iterdir():
            if work.name.isdigit() and self.is_done(int(work.name)):
                shutil.rmtree(work, ignore_errors=True)

    def gather_errors(self) -> int:
        """Puts the errors of all shards into errors.jsonl; how many there are."""
        files = sorted((self.path / "errors").glob("*.jsonl"))
        lines = [line for file in files for line in file.read_bytes().splitlines(keepends=True)]
        with self._lock("errors", _SECONDS_FOR_MANIFEST):
            write_durably(self.path / "errors.jsonl", lines)
        return len(lines)

    def _lock(self, name: str, seconds: float = 0) -> AbstractContextManager[None]:
        return locked(self.path / "locks" / f"{name}.lock", self.path, seconds)

    def _shard(self, number: int) -> Path:
        return self.path / f"{number:06}{self.format.suffix}"


@dataclasses.dataclass(frozen=True)
class Shard:
    """A shard that is being drawn. path: of the finished one."""

    path: Path
    work: Path
    errors: Path
    format: Format

    def begin(self) -> None:
        """Makes the working folder."""
        self.work.mkdir(exist_ok=True)

    def has_batch(self, number: int) -> bool:
        """Whether an earlier try has finished the batch."""
        return self._batch(number).exists()

    def add_batch(
        self,
        number: int,
        items: Sequence[tuple[Mapping[str, Any], bytes]],
        errors: Sequence[Mapping[str, Any]],
        pool: Any,
    ) -> None:
        """Writes the pictures of a batch; from then on it is done."""
        self.format.write_piece(self.work, number, items, pool)
        done = {"pictures": [info for info, _ in items], "errors": list(errors)}
        write_durably(self._batch(number), json.dumps(done).encode())

    def finish(self, batches: int, errors: Sequence[Mapping[str, Any]]) -> None:
        """Makes the shard of its batches. errors: of lines that are in none."""
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
