"""Sizes of images that share batches, instead of one square for all: aspect-ratio buckets.

The rules are those of NovelAI (2022, "Improvements on Stable Diffusion") and of kohya's sd-scripts.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from diffusax.training.data.sources import Source

Size = tuple[int, int]
"""The height and width of an image in pixels."""

SIZE = "(size)"
"""The name in a row of the size that its images are to be cut to, which is no column's name."""

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

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """The number of rows of each size."""
        return np.bincount(self.of_row[self.of_row >= 0], minlength=len(self.sizes))

    def largest_row(self) -> int:
        """Returns a row that has the largest size of those in use."""
        areas = [h * w * (count > 0) for (h, w), count in zip(self.sizes, self.counts)]
        return int(np.argmax(self.of_row == int(np.argmax(areas))))

    def name(self, bucket: int) -> str:
        """Returns a size as WIDTHxHEIGHT."""
        height, width = self.sizes[bucket]
        return f"{width}x{height}"

    def repeated(self, rows: int) -> "Buckets":
        """Returns the buckets of a source that has the rows again and again, so many in all."""
        return dataclasses.replace(self, of_row=np.resize(self.of_row, rows))

    def others(self, row: int) -> list[int]:
        """Returns the next few rows of the same size, after the last the first ones again."""
        rows = np.flatnonzero(self.of_row == self.of_row[row])
        after = np.roll(rows, -1 - int(np.searchsorted(rows, row)))
        return [int(other) for other in itertools.islice(after, _REPLACEMENTS) if other != row]


@dataclasses.dataclass(frozen=True, eq=False)
class BucketedSource:
    """The rows of a data set, each with the size that its images are to be cut to."""

    source: Source
    buckets: Buckets

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.source[index], SIZE: self.buckets.sizes[self.buckets.of_row[index]]}

    def name(self, index: int) -> str:
        """Returns where the row comes from, for messages."""
        return self.source.name(index)


def buckets_of(source: Any) -> Buckets | None:
    """Returns the buckets of a source; None where all rows make examples of one shape."""
    found: Buckets | None = getattr(source, "buckets", None)
    return found


def largest_row(source: Source) -> int:
    """Returns the index of a row whose example is as large as any."""
    buckets = buckets_of(source)
    return 0 if buckets is None else buckets.largest_row()
