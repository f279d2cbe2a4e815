"""Drawing the pictures of many prompts, batch after batch, and writing them as they are done."""

import collections
import contextlib
import dataclasses
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from PIL import Image
from tqdm.auto import tqdm

from diffusax._version import __version__
from diffusax.offline.folder import Folder, Shard
from diffusax.offline.formats import Item, open_format
from diffusax.offline.overlap import ahead
from diffusax.offline.prompts import Line, Part, Prompts, open_prompts
from diffusax.offline.requests import Request, Requests, Settings, unknown_columns
from diffusax.parameters import parameters_text
from diffusax.pictures import png_parameters, to_pil
from diffusax.pipelines.batches import draw_batch, plan_batch
from diffusax.runtime.signals import StopRequest, receiving, signal_name

log = logging.getLogger(__name__)

_ENCODERS = 8
"""At most so many PNG files are made at the same time."""


class Stopped(Exception):
    """A signal asked the run to stop; the batches that were begun are written."""

    def __init__(self, number: int, out: Path):
        """number: of the signal. out: the folder."""
        self.exit_code = 128 + number
        """As of a process that the signal ended."""
        super().__init__(
            f"stopped by {signal_name(number)}; what was begun is in {out}: start the same again "
            "to go on"
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run has done. drawn: pictures in this call. errors: in all shards that are finished.

    finished: whether all shards are, also those of other processes.
    """

    drawn: int
    errors: int
    finished: bool


@dataclasses.dataclass(frozen=True)
class Task:
    """A batch to draw, and the last of a shard: none, for the shard to be finished."""

    opened: "OpenShard"
    number: int
    batch: list[Request]


@dataclasses.dataclass(frozen=True)
class OpenShard:
    """A shard whose lines have been read. left_out: how many pictures they do not give."""

    shard: Shard
    batches: list[list[Request]]
    errors: list[dict[str, Any]]
    left_out: int


def generate(
    pipe: Any,
    prompts: str | Path | Sequence[str | Mapping[str, Any]],
    out: str | Path,
    settings: Settings | None = None,
    *,
    shard: tuple[int, int] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: bool = True,
    lookahead: int = 2,
) -> Summary:
    """Draws the pictures of many prompts into a folder; called again, goes on where it stopped.

    However often it is killed, each picture is in the folder once, and it is the same picture.

    Args:
        pipe: of a text-to-image class; its scheduler draws where no sampler is named.
        prompts: a .txt, .jsonl or .parquet file, or a list of texts and dictionaries.
        out: the folder.
        settings: what decides the pictures besides pipeline and prompts.
        shard: (i, n), to draw each n-th shard from i on, which starts at 0; by default the number
            of this JAX process and how many there are.
        source: what the pipeline was loaded from, such as {"model": ..., "revision": ...}: noted
            in the folder, compared when a run goes on, and named in the PNG files.
        progress: show a bar.
        lookahead: how many batches the device may be ahead of the PNG files; with 0 nothing is done
            at the same time.

    Raises:
        ValueError: the prompts, the settings or the folder cannot be used; says why.
        OSError: the disk is full.
        Stopped: after SIGTERM or Ctrl-C, when what was begun is written; the second one ends the
            process.
    """
    settings = settings or Settings()
    rows, requests = open_prompts(prompts), Requests(pipe, settings)
    index, count = checked_shard(shard or (jax.process_index(), jax.process_count()))
    folder = Folder(Path(out), open_format(settings.format))
    folder.claim(manifest(pipe, rows, settings, source))
    stop = StopRequest("the batches that were begun are finished")
    with folder.part(index, count), receiving(stop):
        folder.clean()
        total = -(-rows.count // settings.lines_per_shard)
        todo = {k for k in range(index, total, count) if not folder.is_done(k)}
        parts = rows.parts(settings.lines_per_shard, todo.__contains__)
        name = str((source or {}).get("model", type(pipe).__name__))
        drawing = Drawing(pipe, requests, folder, rows, stop, lookahead, Path(name).name)
        bar = _bar(rows, settings, range(index, total, count), todo, progress)
        with bar:
            drawn = sum(drawing.run(parts, bar.update))
        errors = folder.gather_errors()
    if stop.number is not None:
        raise Stopped(stop.number, folder.path)
    return Summary(drawn, errors, all(map(folder.is_done, range(total))))


class Drawing:
    """The stages that a batch passes: its lines are read, it is drawn, its files are written.

    Reading and writing are done in threads of their own, while the device draws other batches. Only
    the caller's thread hands work to the device.
    """

    def __init__(
        self,
        pipe: Any,
        requests: Requests,
        folder: Folder,
        rows: Prompts,
        stop: StopRequest,
        lookahead: int,
        model: str,
    ):
        self._pipe, self._requests, self._folder, self._rows = pipe, requests, folder, rows
        self._stop, self._lookahead, self._model = stop, lookahead, model
        self._size = requests.settings.batch_size
        self._unknown: set[str] = set()

    def run(self, parts: Iterator[Part], advance: Any) -> Iterator[int]:
        """Draws the shards of these parts; the number of pictures that each batch has added.

        advance: told how many of the pictures asked for are settled, drawn or not.
        """
        encoders = min(_ENCODERS, os.cpu_count() or 1)
        with contextlib.ExitStack() as stack:
            reader, writer, pool = (
                stack.enter_context(ThreadPoolExecutor(n, name))
                for n, name in ((1, "read"), (1, "write"), (encoders, "png"))
            )
            opened = ahead(reader, self._open, parts, min(self._lookahead, 1))
            drawn = map(self._draw, self._tasks(opened, advance))

            def write(result: tuple[Task, Any, Any]) -> tuple[int, int]:
                return self._write(*result, pool)

            for settled, added in ahead(writer, write, drawn, self._lookahead):
                advance(settled)
                yield added

    def _open(self, part: Part) -> OpenShard:
        number, lines = part
        requests, errors, left_out = self._read(lines)
        batches = list(make_batches(requests, self._size))
        shard = self._folder.shard(number)
        shard.begin()
        return OpenShard(shard, batches, errors, left_out)

    def _read(self, lines: list[Line]) -> tuple[list[Request], list[dict[str, Any]], int]:
        """The requests of the lines, the errors, and how many pictures there will not be."""
        found: dict[str, list[Request]] = {}
        errors, left_out = [], 0
        for line in lines:
            try:
                row = self._rows.row(line)
                if row is not None:
                    self._name_unknown(row)
                    requests = self._requests.of_row(row, line.number)
                    if requests[0].key in found:
                        raise ValueError(f"the id {row.get('id')!r} is that of a line before")
                    found[requests[0].key] = requests
                    continue
            except ValueError as error:
                errors.append(self._error(line.number, str(error)))
            left_out += self._requests.settings.num_images
        return [request for requests in found.values() for request in requests], errors, left_out

    def _name_unknown(self, row: Mapping[str, Any]) -> None:
        for name in unknown_columns(row):
            if name not in self._unknown:
                self._unknown.add(name)
                log.warning("%s: the column %r is not read", self._rows.name, name)

    def _tasks(self, opened: Iterator[OpenShard], advance: Any) -> Iterator[Task]:
        for one in opened:
            advance(one.left_out)
            for number, batch in enumerate(one.batches):
                if one.shard.has_batch(number):
                    advance(len(batch))
                    continue
                yield Task(one, number, batch)
                if self._stop.number is not None:
                    return
            yield Task(one, len(one.batches), [])

    def _draw(self, task: Task) -> tuple[Task, Any, Any]:
        if not task.batch:
            return task, None, None
        c, pictures = self._pipe.parts, [request.picture for request in task.batch]
        # One program serves all batches; the pictures of padding are dropped.
        pictures += pictures[-1:] * (self._size - len(pictures))
        return task, *draw_batch(c, plan_batch(c, pictures), tiled=self._pipe.vae.tiling)

    def _write(self, task: Task, images: Any, finite: Any, pool: Executor) -> tuple[int, int]:
        """Writes a batch, or the shard; how many pictures are settled by that, and drawn."""
        opened, batch = task.opened, task.batch
        if not batch:
            opened.shard.finish(task.number, opened.errors)
            return 0, 0
        pictures = to_pil(np.asarray(images)[: len(batch)])
        whole = np.asarray(finite)[: len(batch)]
        good = [(request, picture) for request, picture, ok in zip(batch, pictures, whole) if ok]
        items: list[Item] = list(pool.map(self._encode, good))
        errors = [
            self._error(request.info["line"], self._not_finite(), key=request.key)
            for request, ok in zip(batch, whole)
            if not ok
        ]
        opened.shard.add_batch(task.number, items, errors, pool)
        return len(batch), len(items)

    def _encode(self, drawn: tuple[Request, Image.Image]) -> Item:
        request, picture = drawn
        file = io.BytesIO()
        text = png_text(request.info, self._model, self._requests.settings)
        picture.save(file, "png", pnginfo=png_parameters(text))
        return request.info, file.getvalue()

    def _error(self, line: int, reason: str, **more: Any) -> dict[str, Any]:
        log.warning("%s line %d is left out: %s", self._rows.name, line, reason)
        return {"file": self._rows.name, "line": line, "error": reason, **more}

    def _not_finite(self) -> str:
        vae = self._pipe.vae.dtype
        return (
            f"the picture is not finite in {self._pipe.dtype} (autoencoder {vae}); use bfloat16 or "
            "float32"
        )


def make_batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Requests of one kind together, those of as many rows beside each other."""
    kinds = collections.defaultdict(list)
    for request in requests:
        kinds[request.picture.kind].append(request)
    for alike in kinds.values():
        # All pictures of a batch wait for the one with the most rows.
        alike.sort(key=lambda request: len(request.picture.schedule))
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


def png_text(info: Mapping[str, Any], model: str, settings: Settings) -> str:
    """What a PNG file says of how it was drawn."""
    shown = {
        "Steps": info["num_inference_steps"],
        "Sampler": info["sampler"],
        "CFG scale": info["guidance_scale"],
        "Seed": info["seed"],
        "Size": f"{info['width']}x{info['height']}",
        "Model": model,
        "RNG": "jax",
        "Clip skip": settings.clip_skip,
        "Image number": info["number"] or None,
    }
    return parameters_text(info["prompt"], info["negative_prompt"], shown)


def manifest(
    pipe: Any, prompts: Prompts, settings: Settings, source: Mapping[str, Any] | None
) -> dict[str, Any]:
    """What decides the pictures of a run."""
    found = {
        "diffusax": __version__,
        "pipeline": type(pipe).__name__,
        **(source or {}),
        "dtypes": {name: str(jax.tree.leaves(p)[0].dtype) for name, p in pipe.params.items()},
        "scheduler": dict(pipe.scheduler.config),
        "lines of prompts": prompts.count,
        "sha256 of prompts": prompts.digest,
        **vars(settings),
    }
    return json.loads(json.dumps(found, default=str))


def checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """The part (i, n) of a run.

    Raises:
        ValueError: there is no such part.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(
            f"shard must be i/n with i from 0 to n - 1, such as 0/4 for the first of four "
            f"(got {index}/{count})"
        )
    return index, count


def _bar(
    prompts: Prompts, settings: Settings, shards: Sequence[int], todo: set[int], progress: bool
) -> Any:
    """A progress bar over the pictures of these shards; those not to do are done."""
    size = settings.lines_per_shard

    def pictures(numbers: Any) -> int:
        lines = sum(min((k + 1) * size, prompts.count) - k * size for k in numbers)
        return lines * settings.num_images

    done = pictures(k for k in shards if k not in todo)
    return tqdm(
        total=pictures(shards), initial=done, unit="image", desc="pictures", disable=not progress
    )
