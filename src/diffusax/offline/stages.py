"""The stages of a shard: its lines are read, its images are generated, its files are written."""

import collections
import contextlib
import dataclasses
import io
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.images.conversion import png_parameters, to_pil
from diffusax.infotext import text as infotext
from diffusax.offline.batches import Batches, new_lanes
from diffusax.offline.clips import encode_clip
from diffusax.offline.folder import Folder, Shard
from diffusax.offline.formats import Item, open_format
from diffusax.offline.prompts import Line, Part
from diffusax.offline.requests import Request, Requests, Settings
from diffusax.offline.seating import Seated, seat_requests
from diffusax.pipelines.run.images import decode
from diffusax.runtime.signals import StopRequest
from diffusax.samplers import sampler_name

log = logging.getLogger(__name__)

Advance = Callable[[int], object]

_SHARDS = 2
"""The shards of which some images may be unfinished."""
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
        """The output folder, to look into."""
        return self.folder_of("png")

    def folder_of(self, ending: str) -> Folder:
        """Returns the output folder for files with this ending."""
        return Folder(self.out, open_format(self.settings.format, ending))


@dataclasses.dataclass(eq=False)
class Piece:
    """Images of a shard whose files are written together.

    A piece without images follows a shard's last one, and finishes the shard.
    """

    opened: "OpenShard"
    number: int
    images: list[Seated]
    decoded: dict[Seated, tuple[Any, Any]] = dataclasses.field(default_factory=dict)
    """For each image that has ended, its pixels 1 H W 3 and whether they are finite, 1; of videos
    1 F H W 3, uint8."""


@dataclasses.dataclass(eq=False)
class OpenShard:
    """A shard whose lines have been read. left_out: the number of images that will be missing."""

    shard: Shard
    pieces: list[list[Seated]]
    errors: list[dict[str, Any]]
    left_out: int
    unfinished: int = 0
    """The pieces that are not generated yet."""


class ShardGenerator:
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
        self._folder = order.folder_of(self._requests.ending)
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
            generated = self._generate(opened, advance)

            def write(piece: Piece) -> tuple[int, int]:
                return self._write(piece, pool)

            for settled, added in ahead(writer, write, generated, self._order.lookahead):
                advance(settled)
                yield added

    def _open(self, part: Part) -> OpenShard:
        number, lines = part
        requests, errors, left_out = self._read(lines)
        size = self._order.settings.batch_size
        pieces = seat_requests(requests, size, lambda: new_lanes(self._pipe.parts, size))
        shard = self._folder.shard(number)
        shard.begin()
        return OpenShard(shard, pieces, errors, left_out)

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
        for name in self._requests.unknown_columns(row):
            if name not in self._unknown:
                self._unknown.add(name)
                log.warning("%s: the column %r is not read", self._order.name, name)

    def _generate(self, opened: Iterator[OpenShard], advance: Advance) -> Iterator[Piece]:
        """Yields the pieces of the shards as they are generated.

        A shard is opened when no image of those before waits to begin, so that the batch stays
        full; there are at most two, so that none stays unfinished for long.
        """
        batches = Batches(self._pipe.parts, self._order.settings.batch_size)
        pieces: dict[Seated, Piece] = {}
        shards: set[OpenShard] = set()
        while True:
            stopping = self._stop.number is not None
            if stopping:
                self._keep_begun(batches, pieces)
            while not stopping and not batches.waiting and len(shards) < _SHARDS:
                one = next(opened, None)
                if one is None:
                    break
                advance(one.left_out)
                pieces |= self._begin(one, batches, advance)
                if one.unfinished:
                    shards.add(one)
                else:
                    yield Piece(one, len(one.pieces), [])
            if not batches.waiting and not batches.running:
                batches.log_use()
                return
            for image, latents in batches.step():
                piece = pieces.pop(image)
                piece.decoded[image] = self._decode(latents)
                if len(piece.decoded) < len(piece.images):
                    continue
                yield piece
                one = piece.opened
                one.unfinished -= 1
                if not one.unfinished:
                    shards.remove(one)
                    yield Piece(one, len(one.pieces), [])

    @staticmethod
    def _begin(one: OpenShard, batches: Batches, advance: Advance) -> dict[Seated, Piece]:
        """Adds the images of a shard that are not written, and returns the piece of each."""
        found: dict[Seated, Piece] = {}
        for number, images in enumerate(one.pieces):
            if one.shard.has_batch(number):
                advance(len(images))
                continue
            one.unfinished += 1
            found |= dict.fromkeys(images, Piece(one, number, images))
        batches.add(list(found))
        return found

    @staticmethod
    def _keep_begun(batches: Batches, pieces: Mapping[Seated, Piece]) -> None:
        """Drops the images of pieces of which none has begun."""
        begun = {pieces[image] for image in batches.running}
        begun |= {piece for piece in pieces.values() if piece.decoded}
        batches.keep({image for piece in begun for image in piece.images})

    def _decode(self, latents: jax.Array) -> tuple[Any, Any]:
        c = self._pipe.parts
        pixels, finite = decode(c, latents, c.decoding, tiled=self._pipe.vae.tiling)
        return _as_bytes(pixels) if self._requests.videos else pixels, finite

    def _write(self, piece: Piece, pool: Executor) -> tuple[int, int]:
        """Writes a piece, or the shard; returns how many images that settles, and generates."""
        opened, images = piece.opened, piece.images
        if not images:
            opened.shard.finish(piece.number, opened.errors)
            return 0, 0
        decoded = [tuple(map(np.asarray, piece.decoded[image])) for image in images]
        requests = [image.request for image in images]
        whole = [bool(finite.all()) for _, finite in decoded]
        found = [pixels[0] for (pixels, _), ok in zip(decoded, whole) if ok]
        good = [request for request, ok in zip(requests, whole) if ok]
        items: list[Item] = list(pool.map(self._encode, good, found))
        errors = [
            self._error(request.info["line"], self._not_finite(), key=request.key)
            for request, ok in zip(requests, whole)
            if not ok
        ]
        opened.shard.add_batch(piece.number, items, errors, pool)
        return len(images), len(items)

    def _encode(self, request: Request, pixels: np.ndarray) -> Item:
        text = png_text(request, self._order)
        if self._requests.videos:
            kind = self._order.settings.clip_format or "mp4"
            return request.info, encode_clip(pixels, request.info["fps"], text, kind)
        (image,), file = to_pil(pixels[None]), io.BytesIO()
        image.save(file, "png", pnginfo=png_parameters(text))
        return request.info, file.getvalue()

    def _error(self, line: int, reason: str, **more: Any) -> dict[str, Any]:
        log.warning("%s line %d is left out: %s", self._order.name, line, reason)
        return {"file": self._order.name, "line": line, "error": reason, **more}

    def _not_finite(self) -> str:
        what, vae = "video" if self._requests.videos else "image", self._pipe.vae.dtype
        return (
            f"the {what} is not finite in {self._pipe.dtype} (autoencoder {vae}); use bfloat16 or "
            "float32"
        )


@jax.jit
def _as_bytes(pixels: jax.Array) -> jax.Array:
    """Returns pixels in [0, 1] as bytes, of which videos have many."""
    return jnp.rint(pixels * 255).astype(jnp.uint8)


def png_text(request: Request, order: Order) -> str:
    """Returns the settings of an image or a video for its file."""
    info, call = request.info, request.image.call
    names = ("prompt", "negative_prompt", "num_inference_steps", "guidance_scale", "seed")
    fields = {name: info[name] for name in (*names, "width", "height", "number")}
    fields |= {
        "sampler": sampler_name(request.image.scheduler),
        "model": order.model,
        "guidance_rescale": call.guidance_rescale,
        "clip_skip": order.settings.clip_skip,
        "prompt_weighting": order.settings.prompt_weighting,
        "long_prompt": order.settings.long_prompt,
        "adapters": call.adapters or {},
    }
    return infotext.write(fields)


T = TypeVar("T")
R = TypeVar("R")


def ahead(pool: Executor, work: Callable[[T], R], items: Iterable[T], depth: int) -> Iterator[R]:
    """Yields the results of `work` in order, begun up to `depth` items before they are asked for.

    With a depth of 0 the work is done in the caller's thread when it asks for a result.
    """
    if depth == 0:
        yield from map(work, items)
        return
    futures: collections.deque[Future[R]] = collections.deque()
    try:
        for item in items:
            futures.append(pool.submit(work, item))
            if len(futures) > depth:
                yield futures.popleft().result()
        while futures:
            yield futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
