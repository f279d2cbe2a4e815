"""The stages of a batch: its lines are read, its images are generated, its files are written."""

import collections
import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from diffusax.images.pictures import png_parameters, to_pil
from diffusax.offline.batches import draw_batch, plan_batch
from diffusax.offline.folder import Folder, Shard
from diffusax.offline.formats import Item, open_format
from diffusax.offline.overlap import ahead
from diffusax.offline.prompts import Line, Part
from diffusax.offline.requests import Request, Requests, Settings, unknown_columns
from diffusax.parameters import parameters_text
from diffusax.runtime.signals import StopRequest

log = logging.getLogger(__name__)

Advance = Callable[[int], object]

_ENCODERS = 8
"""The most PNG files that are encoded at the same time."""


@dataclasses.dataclass(frozen=True)
class Order:
    """What every process that generates images needs to know.

    name: the name of the prompts, for messages. read: reads a line, see `Prompts.row`. model: the
    model's name for the PNG files. lookahead: the batches by which the device may be ahead.
    """

    out: Path
    settings: Settings
    name: str
    read: Callable[[Line], Mapping[str, Any] | None]
    model: str | None
    lookahead: int

    @property
    def folder(self) -> Folder:
        """The output folder."""
        return Folder(self.out, open_format(self.settings.format))


@dataclasses.dataclass(frozen=True)
class Task:
    """A batch to generate; a task without requests follows the last one and finishes the shard."""

    opened: "OpenShard"
    number: int
    batch: list[Request]


@dataclasses.dataclass(frozen=True)
class OpenShard:
    """A shard whose lines have been read. left_out: the number of images that will be missing."""

    shard: Shard
    batches: list[list[Request]]
    errors: list[dict[str, Any]]
    left_out: int


class Drawing:
    """Generates the images of lines with one pipeline.

    Other threads read and write while the device generates other batches. Only the caller's thread
    gives work to the device.
    """

    def __init__(self, pipe: Any, order: Order, stop: StopRequest):
        """Prepares a run. stop: the request to stop, checked after each batch.

        Raises:
            ValueError: the pipeline needs more than prompts, or the settings do not suit it.
        """
        self._pipe, self._order, self._stop = pipe, order, stop
        self._requests = Requests(pipe, order.settings)
        self._folder = order.folder
        self._unknown: set[str] = set()

    def run(self, parts: Iterable[Part], advance: Advance) -> Iterator[int]:
        """Generates the shards of these parts; yields the number of images that each batch adds.

        advance: called with the number of requested images that are settled, generated or not.
        """
        encoders = min(_ENCODERS, os.cpu_count() or 1)
        with contextlib.ExitStack() as stack:
            reader, writer, pool = (
                stack.enter_context(ThreadPoolExecutor(n, name))
                for n, name in ((1, "read"), (1, "write"), (encoders, "png"))
            )
            opened = ahead(reader, self._open, parts, min(self._order.lookahead, 1))
            drawn = map(self._draw, self._tasks(opened, advance))

            def write(result: tuple[Task, Any, Any]) -> tuple[int, int]:
                return self._write(*result, pool)

            for settled, added in ahead(writer, write, drawn, self._order.lookahead):
                advance(settled)
                yield added

    def _open(self, part: Part) -> OpenShard:
        number, lines = part
        requests, errors, left_out = self._read(lines)
        batches = list(make_batches(requests, self._order.settings.batch_size))
        shard = self._folder.shard(number)
        shard.begin()
        return OpenShard(shard, batches, errors, left_out)

    def _read(self, lines: list[Line]) -> tuple[list[Request], list[dict[str, Any]], int]:
        """Returns the requests of the lines, the errors, and the number of missing images."""
        found: dict[str, list[Request]] = {}
        errors, left_out = [], 0
        for line in lines:
            try:
                row = self._order.read(line)
                if row is not None:
                    self._name_unknown(row)
                    requests = self._requests.of_row(row, line.number)
                    if requests[0].key in found:
                        raise ValueError(f"the id {row.get('id')!r} is that of a line before")
                    found[requests[0].key] = requests
                    continue
            except ValueError as error:
                errors.append(self._error(line.number, str(error)))
            left_out += self._order.settings.num_images
        return [request for requests in found.values() for request in requests], errors, left_out

    def _name_unknown(self, row: Mapping[str, Any]) -> None:
        for name in unknown_columns(row):
            if name not in self._unknown:
                self._unknown.add(name)
                log.warning("%s: the column %r is not read", self._order.name, name)

    def _tasks(self, opened: Iterator[OpenShard], advance: Advance) -> Iterator[Task]:
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
        # One program serves all batches; the images of padding are dropped.
        pictures += pictures[-1:] * (self._order.settings.batch_size - len(pictures))
        return task, *draw_batch(c, plan_batch(c, pictures), tiled=self._pipe.vae.tiling)

    def _write(self, task: Task, images: Any, finite: Any, pool: Executor) -> tuple[int, int]:
        """Writes a batch, or the shard; returns how many images that settles, and generates."""
        opened, batch = task.opened, task.batch
        if not batch:
            opened.shard.finish(task.number, opened.errors)
            return 0, 0
        whole = np.asarray(finite)[: len(batch)]
        pictures = to_pil(np.asarray(images)[: len(batch)][whole])
        good = [request for request, ok in zip(batch, whole) if ok]
        items: list[Item] = list(pool.map(self._encode, good, pictures))
        errors = [
            self._error(request.info["line"], self._not_finite(), key=request.key)
            for request, ok in zip(batch, whole)
            if not ok
        ]
        opened.shard.add_batch(task.number, items, errors, pool)
        return len(batch), len(items)

    def _encode(self, request: Request, picture: Image.Image) -> Item:
        file = io.BytesIO()
        text = png_text(request.info, self._order)
        picture.save(file, "png", pnginfo=png_parameters(text))
        return request.info, file.getvalue()

    def _error(self, line: int, reason: str, **more: Any) -> dict[str, Any]:
        log.warning("%s line %d is left out: %s", self._order.name, line, reason)
        return {"file": self._order.name, "line": line, "error": reason, **more}

    def _not_finite(self) -> str:
        vae = self._pipe.vae.dtype
        return (
            f"the picture is not finite in {self._pipe.dtype} (autoencoder {vae}); use bfloat16 or "
            "float32"
        )


def make_batches(requests: Sequence[Request], size: int) -> Iterator[list[Request]]:
    """Yields batches of requests of one kind; those with as many rows are beside each other."""
    kinds = collections.defaultdict(list)
    for request in requests:
        kinds[request.picture.kind].append(request)
    for alike in kinds.values():
        # All images of a batch wait for the one with the most rows.
        alike.sort(key=lambda request: len(request.picture.schedule))
        yield from (alike[i : i + size] for i in range(0, len(alike), size))


def png_text(info: Mapping[str, Any], order: Order) -> str:
    """Returns the settings of an image for its PNG file."""
    shown = {
        "Steps": info["num_inference_steps"],
        "Sampler": info["sampler"],
        "CFG scale": info["guidance_scale"],
        "Seed": info["seed"],
        "Size": f"{info['width']}x{info['height']}",
        "Model": order.model,
        "RNG": "jax",
        "Clip skip": order.settings.clip_skip,
        "Image number": info["number"] or None,
    }
    return parameters_text(info["prompt"], info["negative_prompt"], shown)
