"""Sizes of images that share batches, instead of one square for all: aspect-ratio buckets.

The rules are those of NovelAI (2022, "Improvements on Stable Diffusion") and of kohya's sd-scripts.
"""

import dataclasses
import functools
import itertools
import math
import re
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.training.data.sources import Source

Size = tuple[int, int]
"""The height and width of an image in pixels."""

SIZE = "(size)"
"""The name in a row of the size that its images are to be cut to, which is no column's name."""

Shape = tuple[Size, ...]
"""The sizes of the images that a row looks at."""

SHAPE = "(shape)"
"""The name in a row of the sizes of the images that it looks at, where they are their own."""

FRAMES = "(frames)"
"""The name in a row of the number of frames that are taken of its clip, where there are several."""

_REPLACEMENTS = 10
"""The number of rows that are tried in the place of a broken one."""


def parse_sizes(texts: Sequence[str]) -> tuple[Size, ...]:
    """Reads sizes that are written as WIDTHxHEIGHT, each a text or several with commas between.

    Raises:
        ValueError: a text is none.
    """
    sizes: list[Size] = []
    for text in (part.strip() for texts_ in texts for part in texts_.split(",")):
        match = re.fullmatch(r"(\d{1,5})x(\d{1,5})", text)
        if match is None or "0" in match.groups():
            raise ValueError(
                f"data.buckets must be sizes as WIDTHxHEIGHT, such as 448x576 (got {text!r})"
            )
        width, height = map(int, match.groups())
        sizes.append((height, width))
    return tuple(dict.fromkeys(sizes))


def sizes_of_area(side: int, step: int) -> tuple[Size, ...]:
    """Returns the sizes with at most side x side pixels whose sides are multiples of a step.

    For each width from half of `side` to twice `side` it is the largest such height in that range,
    and the same with the sides exchanged; kohya's `make_bucket_resolutions` at its defaults for
    512 pixels.

    Raises:
        ValueError: there is no such size, because the step is larger than the side.
    """
    if step > side:
        raise ValueError(
            f"data.bucket_step={step} must not be above data.resolution={side}; 64 is usual"
        )
    square = side // step * step
    least, most = math.ceil(side / 2 / step) * step, 2 * side
    found = {(square, square)}
    for width in range(least, most + 1, step):
        height = side * side // width // step * step
        if height >= least:
            found |= {(height, width), (width, height)}
    return tuple(sorted(found))


def nearest_sizes(sizes: Sequence[Size], images: np.ndarray) -> np.ndarray:
    """Returns the index of the size with the nearest aspect ratio for each image, n int16.

    Near is measured in the logarithm of the ratio; of equally near ones it is the size whose area
    is nearest.

    images: n 2, heights and widths in pixels; the index of images of 0x0 is -1.
    """
    known = np.maximum(images, 1).astype(np.float64)
    own = np.array(sizes, np.float64)

    def differences(of: Any) -> np.ndarray:
        return np.abs(np.log(of(known))[:, None] - np.log(of(own)))

    ratio = np.round(differences(lambda x: x[:, 0] / x[:, 1]), 9)
    area = differences(lambda x: x[:, 0] * x[:, 1])
    nearest = (ratio + 1e-12 * area).argmin(1)
    return np.where(images.min(1) > 0, nearest, -1).astype(np.int16)


@dataclasses.dataclass(frozen=True, eq=False)
class Buckets:
    """The sizes of a data set's images, and which of them each row has."""

    sizes: tuple[Size, ...]
    of_row: np.ndarray
    """The index of each row's size, n int16; -1 for rows whose image cannot be read."""
    references: tuple[int, ...] = ()
    """The number of images to look at of each size's rows; none where all rows have as many."""
    shapes: tuple[Shape, ...] = ()
    """The sizes of these images; none where they are cut like the others."""
    frames: tuple[int, ...] = ()
    """The number of frames of each size's clips; none where all have as many."""

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each size."""
        return np.bincount(self.of_row[self.of_row >= 0], minlength=len(self.sizes))

    def largest_row(self) -> int:
        """Returns a row that has the largest size of those in use."""
        areas = [self._area(i) * (count > 0) for i, count in enumerate(self.counts)]
        return int(np.argmax(self.of_row == int(np.argmax(areas))))

    def _area(self, bucket: int) -> int:
        """Returns the pixels of all images of a row of this size."""
        height, width = self.sizes[bucket]
        if self.frames:
            return height * width * self.frames[bucket]
        if self.shapes:
            return height * width + sum(h * w for h, w in self.shapes[bucket])
        return height * width * (1 + (self.references[bucket] if self.references else 0))

    def name(self, bucket: int) -> str:
        """Returns a size as WIDTHxHEIGHT, with the number of images to look at if rows differ, or
        with their sizes if these are their own: 512x512+1, 512x512+768x512; with the frames of
        clips that differ in their number: 832x480x81.
        """
        height, width = self.sizes[bucket]
        if self.frames:
            return f"{width}x{height}x{self.frames[bucket]}"
        if self.shapes:
            own = [f"{w}x{h}" for h, w in self.shapes[bucket]] or ["0"]
            return "+".join([f"{width}x{height}", *own])
        count = f"+{self.references[bucket]}" if self.references else ""
        return f"{width}x{height}{count}"

    def by_references(self, counts: np.ndarray) -> "Buckets":
        """Returns a size for each size and number of images to look at, which come in turn.

        counts: that number for each row, n int; rows with -1 are left out.
        """
        numbers = [int(number) for number in np.unique(counts[counts >= 0])]
        place = np.searchsorted(numbers, counts)
        of_row = np.where((self.of_row < 0) | (counts < 0), -1, self.of_row * len(numbers) + place)
        sizes = tuple(size for size in self.sizes for _ in numbers)
        return Buckets(sizes, of_row.astype(np.int16), tuple(numbers) * len(self.sizes))

    def by_frames(self, available: np.ndarray, wanted: Sequence[int]) -> "Buckets":
        """Returns a size for each size and number of frames, which come in turn.

        Args:
            available: the number of frames that each row's clip has, n int.
            wanted: the numbers of frames that are taken, ascending. Each row has the largest that
                its clip fills; rows that fill none are left out.
        """
        place = np.searchsorted(np.asarray(wanted), available, side="right") - 1
        of_row = np.where((self.of_row < 0) | (place < 0), -1, self.of_row * len(wanted) + place)
        sizes = tuple(size for size in self.sizes for _ in wanted)
        return Buckets(sizes, of_row.astype(np.int16), frames=tuple(wanted) * len(self.sizes))

    def repeated(self, rows: int) -> "Buckets":
        """Returns the buckets of a source that repeats the rows up to this number."""
        return dataclasses.replace(self, of_row=np.resize(self.of_row, rows))

    def others(self, row: int) -> list[int]:
        """Returns the next few rows of the same size; after the last it starts again."""
        rows = np.flatnonzero(self.of_row == self.of_row[row])
        after = np.roll(rows, -1 - int(np.searchsorted(rows, row)))
        return [int(other) for other in itertools.islice(after, _REPLACEMENTS) if other != row]


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedSource:
    """The rows of a data set, each with the size to cut its images to."""

    source: Source
    buckets: Buckets

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        bucket, buckets = self.buckets.of_row[index], self.buckets
        own: dict[str, Any] = {SHAPE: buckets.shapes[bucket]} if buckets.shapes else {}
        if buckets.frames:
            own[FRAMES] = buckets.frames[bucket]
        return {**self.source[index], SIZE: buckets.sizes[bucket], **own}

    def name(self, index: int) -> str:
        return self.source.name(index)


def buckets_of(source: Any) -> Buckets | None:
    """Returns the buckets of a source; None where all rows make examples of one shape."""
    found: Buckets | None = getattr(source, "buckets", None)
    return found


def largest_row(source: Source) -> int:
    """Returns the index of a row whose example is as large as any."""
    buckets = buckets_of(source)
    return 0 if buckets is None else buckets.largest_row()


class BucketOrder:
    """An endless order of batches, each of one size, made of an endless order of rows.

    The rows are gone through in their order. Each waits with the others of its size until there are
    as many as make a batch, which then is the next one. Rows that still wait at the end of an epoch
    are carried to the next, ahead of its rows, so that none is left out. With one size the order of
    the examples is that of the rows.

    Everything follows from the order of the rows and the size of a batch: there is no state, and
    any batch is found without those before it.
    """

    _batches: dict[int, np.ndarray]
    _waiting: dict[int, list[np.ndarray]]
    _lock: Any

    def __init__(self, buckets: Buckets, order: Sequence[int], batch_size: int):
        """Takes an order of rows.

        Args:
            buckets: the rows' sizes.
            order: the row at each place of an endless order; each epoch of as many places as there
                are rows has each of them once.
            batch_size: the number of examples in a batch of all processes together.

        Raises:
            ValueError: no row's image can be read.
        """
        self.buckets, self.order, self.batch_size = buckets, order, batch_size
        self.rows, self.counts = len(buckets.of_row), buckets.counts
        if not self.counts.sum():
            raise ValueError(f"none of the {self.rows} images can be read")
        self._start()

    def batch(self, number: int) -> tuple[int, np.ndarray]:
        """Returns a batch: the index of its size, and the places of its rows in the order."""
        with self._lock:
            epoch = self._epoch_of(number)
            if epoch not in self._batches:
                batches, waiting = self._epoch(epoch)
                # Threads that read ahead are in the next epoch already, others still in this one.
                self._batches = {**dict([*self._batches.items()][-1:]), epoch: batches}
                self._waiting = {epoch + 1: waiting}
            places = self._batches[epoch][number - self._before(epoch)]
        return int(self.buckets.of_row[self.order[int(places[0])]]), places

    def _before(self, epoch: int) -> int:
        """Returns the number of batches before an epoch."""
        return int((epoch * self.counts // self.batch_size).sum())

    def _epoch_of(self, number: int) -> int:
        epoch = number * self.batch_size // int(self.counts.sum())
        while self._before(epoch + 1) <= number:
            epoch += 1
        return epoch

    def _epoch(self, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
        """Returns an epoch's batches, m x batch_size places, and the places left over, by size."""
        waiting = self._waiting.get(epoch) or self._waiting_before(epoch)
        ready, left = [], []
        for before, new in zip(waiting, self._places(epoch), strict=True):
            places = np.concatenate([before, new])
            whole = len(places) - len(places) % self.batch_size
            ready.append(places[:whole].reshape(-1, self.batch_size))
            left.append(places[whole:])
        batches = np.concatenate(ready)
        return batches[np.argsort(batches[:, -1])], left

    def _waiting_before(self, epoch: int) -> list[np.ndarray]:
        """Returns the places that the epochs before this one left over, by size."""
        missing = epoch * self.counts % self.batch_size
        found: list[list[np.ndarray]] = [[] for _ in self.counts]
        while missing.any():
            epoch -= 1
            for bucket, places in enumerate(self._places(epoch)):
                last = places[len(places) - min(missing[bucket], len(places)) :]
                found[bucket].insert(0, last)
                missing[bucket] -= len(last)
        return [np.concatenate([np.zeros(0, np.int64), *parts]) for parts in found]

    def _places(self, epoch: int) -> list[np.ndarray]:
        """Returns the places of an epoch by size."""
        start = epoch * self.rows
        rows = np.fromiter((self.order[start + i] for i in range(self.rows)), np.int64, self.rows)
        buckets = self.buckets.of_row[rows]
        return [start + np.flatnonzero(buckets == bucket) for bucket in range(len(self.counts))]

    def _start(self) -> None:
        self._batches, self._waiting, self._lock = {}, {}, threading.Lock()

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k not in ("_batches", "_waiting", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()
