"""Sizes of the images that edits look at: those that pipelines would give them, of a fixed few."""

import collections
import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from diffusax.pipelines.families.policies import References
from diffusax.training.data.buckets import (
    Buckets,
    Shape,
    Size,
    nearest_sizes,
    sizes_of_area,
)

log = logging.getLogger(__name__)

_STEPS = 16
"""The part of a square's side that is between sizes, if the model's tokens allow that."""
_LEAST = 256
"""The least side of the squares of smaller areas."""


@dataclasses.dataclass(frozen=True)
class OwnSizes:
    """How a family's images to look at are sized."""

    policy: References
    side: int
    """The side of the square whose area they have, at most."""
    factor: int
    """The pixels per latent or token, of which sides are multiples."""
    most: int
    """The most shapes, where one is the sizes of all images of a row."""

    def rungs(self) -> list[tuple[Size, ...]]:
        """Returns the sizes of each area in use, the largest first.

        Small images keep a smaller area where pipelines do not enlarge them.
        """
        if self.policy.preferred:
            return [_of_ratios(self.policy.preferred, self.side, self.factor)]
        sides = [self.side]
        while not self.policy.fixed_area and sides[-1] // 2 >= _LEAST:
            sides.append(sides[-1] // 2)
        return [self._of_side(side) for side in sides]

    def _of_side(self, side: int) -> tuple[Size, ...]:
        return sizes_of_area(side, max(1, side // _STEPS // self.factor) * self.factor)

    def shapes(self, images: np.ndarray) -> list[Shape | None]:
        """Returns the sizes that the images of each row get; None where one cannot be read.

        images: n k 2, heights and widths in pixels; behind a row's last image, and where there is
        none, 0 and 0; -1 and -1 of an image that cannot be read.
        """
        rows, most = images.shape[:2]
        flat = images.reshape(-1, 2)
        areas = flat.prod(axis=1)
        found = np.zeros((len(flat), 2), int)
        rungs = self.rungs()
        for number, sizes in enumerate(rungs):
            larger = np.sqrt(areas) < max(math.sqrt(h * w) for h, w in sizes)
            # The smallest area is for all images that are smaller yet.
            left = larger if number < len(rungs) - 1 else np.zeros(len(flat), bool)
            chosen = (found[:, 0] == 0) & ~left & (flat.min(axis=1) > 0)
            found[chosen] = np.array(sizes)[nearest_sizes(sizes, flat[chosen])]
        sized = found.reshape(rows, most, 2)

        def shape(row: int) -> Shape | None:
            if (images[row] < 0).any():
                return None
            return tuple((int(h), int(w)) for h, w in sized[row] if h)

        return _limited([shape(row) for row in range(rows)], self.most)


def _of_ratios(sizes: Sequence[Size], side: int, factor: int) -> tuple[Size, ...]:
    """Returns sizes of the area of a square in the ratios of others.

    Upstream: diffusers training_utils.py, generate_aspect_ratio_buckets.
    """

    def one(height: int, width: int) -> Size:
        high = side * math.sqrt(height / width)
        return tuple(max(1, round(n / factor)) * factor for n in (high, high * width / height))  # type: ignore[return-value]

    return tuple(dict.fromkeys(one(*size) for size in sizes))


def _limited(shapes: list[Shape | None], most: int) -> list[Shape | None]:
    """Replaces rare shapes by the nearest of the most frequent ones with as many images.

    Of each number of images one remains at least.
    """
    counts = collections.Counter(shape for shape in shapes if shape)
    ranked = [shape for shape, _ in counts.most_common()]
    first = {len(shape): shape for shape in reversed(ranked)}
    kept = dict.fromkeys([*first.values(), *ranked])
    kept = dict.fromkeys(list(kept)[: max(most, len(first))])
    nearest = {shape: min(kept, key=lambda other: _distance(shape, other)) for shape in ranked}
    if moved := sum(counts[shape] for shape in ranked if shape not in kept):
        log.info(
            "images to look at: %d of %d shapes are used, and %d rows of rarer ones have the "
            "nearest of them; data.reference_shapes allows more",
            len(kept),
            len(ranked),
            moved,
        )
    return [nearest.get(shape, shape) if shape else shape for shape in shapes]


def _distance(shape: Shape, other: Shape) -> float:
    """Returns how far shapes are from each other; infinitely far of other numbers of images."""
    if len(shape) != len(other):
        return math.inf
    pairs = [(h / w / (a / b), h * w / (a * b)) for (h, w), (a, b) in zip(shape, other)]
    return sum(abs(math.log(ratio)) + 0.1 * abs(math.log(area)) for ratio, area in pairs)


def buckets_by_shapes(buckets: Buckets, shapes: Sequence[Shape | None]) -> Buckets:
    """Returns a size for each pair of a size and a shape of images to look at that is in use.

    shapes: that of each row; None for rows that are left out.
    """
    keys = [
        None if shape is None or of_row < 0 else (int(of_row), shape)
        for of_row, shape in zip(buckets.of_row, shapes, strict=True)
    ]
    used = sorted({key for key in keys if key is not None}, key=lambda k: (k[0], len(k[1]), k[1]))
    numbers = {key: i for i, key in enumerate(used)}
    of_row = np.array([-1 if key is None else numbers[key] for key in keys], np.int16)
    return Buckets(
        tuple(buckets.sizes[size] for size, _ in used),
        of_row,
        tuple(len(shape) for _, shape in used),
        tuple(shape for _, shape in used),
    )


def fit(image: Image.Image, size: Size, *, mirrored: bool) -> np.ndarray:
    """Returns an image in a size, h w 3 uint8.

    Args:
        image: the image.
        size: height and width.
        mirrored: whether all of the image is kept, and mirrored at its borders to fill the size;
            otherwise it covers the size, and what is over is cut off all around.
    """
    high, wide = size
    if not mirrored:
        return np.asarray(ImageOps.fit(image, (wide, high), Image.Resampling.LANCZOS))
    scale = min(wide / image.width, high / image.height)
    columns, rows = (max(1, round(n * scale)) for n in image.size)
    inside = image.resize((columns, rows), Image.Resampling.LANCZOS)
    top, left = (high - rows) // 2, (wide - columns) // 2
    around: Any = ((top, high - rows - top), (left, wide - columns - left), (0, 0))
    return np.pad(
        np.asarray(inside), around, mode="symmetric" if min(inside.size) < 2 else "reflect"
    )
