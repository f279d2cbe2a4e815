"""The scales of IP-Adapters: numbers, numbers by block, and numbers for each image."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from diffusax.boundary.convert import shortened

_PATH = re.compile(r"(down|up)_blocks\.(\d+)\.attentions\.(\d+)\.|mid_block\.attentions\.0\.")

Place = tuple[str, int, int]
"""The transformer of a cross-attention: down, mid or up, the block's and its own number."""


def read_scale(scale: Any, paths: Sequence[str]) -> np.ndarray:
    """Returns the scale of one IP-Adapter in each cross-attention, l n.

    n is 1 where all images have the same scale.

    Args:
        scale: a number; a list of numbers, one for each image with a mask; or a dictionary such as
            {"down": {"block_2": [0.0, 1.0]}, "mid": 0.5, "up": {"block_0": 1.0}}, as in diffusers'
            `set_ip_adapter_scale`: of down and up either one number, or for each block one, or one
            for each of its transformers. What a dictionary leaves out is zero.
        paths: the paths of the l cross-attentions in the UNet.

    Raises:
        ValueError: it is nothing of this kind, or names a block that the UNet lacks.
    """
    places = [_place(path) for path in paths]
    if isinstance(scale, Mapping):
        by_place = _by_place(scale, places)
        rows = [by_place[place] for place in places]
    else:
        rows = [_numbers(scale)] * len(places)
    lengths = {len(row) for row in rows} - {1}
    if len(lengths) > 1:
        raise ValueError(
            f"an IP-Adapter's scale must have as many numbers in each block (got {_shown(scale)})"
        )
    n = max(lengths, default=1)
    return np.array([row * n if len(row) == 1 else row for row in rows], np.float32)


def _place(path: str) -> Place:
    match = _PATH.match(path)
    assert match is not None
    direction, block, number = match.groups()
    return ("mid", 0, 0) if direction is None else (direction, int(block), int(number))


def _by_place(scale: Mapping[str, Any], places: Sequence[Place]) -> dict[Place, list[float]]:
    """Returns the numbers of each transformer."""
    if unknown := set(scale) - {"down", "mid", "up"}:
        raise ValueError(
            "an IP-Adapter's scale by block may have the keys 'down', 'mid' and 'up' (got "
            f"{', '.join(map(_shown, unknown))})"
        )
    found = {}
    for place in dict.fromkeys(places):
        direction, block, number = place
        own = scale.get(direction, 0.0)
        if direction == "mid":
            found[place] = _numbers(own)
            continue
        count = len({p for p in places if p[:2] == (direction, block)})
        blocks = {f"block_{p[1]}" for p in places if p[0] == direction}
        if isinstance(own, Mapping):
            if unknown := set(own) - blocks:
                raise ValueError(
                    f"an IP-Adapter's scale for {direction!r} may have the keys "
                    f"{', '.join(map(repr, sorted(blocks)))} "
                    f"(got {', '.join(map(_shown, unknown))})"
                )
            own = own.get(f"block_{block}", 0.0)
        own = list(own) if isinstance(own, list | tuple) else [own]
        if len(own) not in (1, count):
            raise ValueError(
                f"an IP-Adapter's scale for {direction}.block_{block} must have {count} entries, "
                f"one for each transformer (got {len(own)})"
            )
        found[place] = _numbers(own[number if len(own) > 1 else 0])
    return found


def _numbers(value: Any) -> list[float]:
    """Returns a number, or a list of numbers for each image, as a list."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    for number in values:
        real = isinstance(number, int | float | np.number) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise ValueError(
                f"an IP-Adapter's scale must be a finite number (got {_shown(number)})"
            )
    if not values:
        raise ValueError("an IP-Adapter's scale must not be an empty list")
    return [float(number) for number in values]


def _shown(value: Any) -> str:
    """Writes a value for an error, in one line."""
    return " ".join(shortened(value).split())
