"""How much a run of the tests does: what everybody runs, or all of it (DIFFUSAX_TESTS=all)."""

import os
from collections.abc import Sequence
from pathlib import Path

ALL = os.environ.get("DIFFUSAX_TESTS") == "all"


def examples(few: int, many: int) -> int:
    """How many examples Hypothesis draws: `few`, or `many` in a run of all tests."""
    return many if ALL else few


def files_of_shard(sizes: dict[Path, int], shard: str) -> Sequence[Path]:
    """The files of shard "i/n", which get about as many tests as the other shards' files.

    Raises:
        ValueError: it is not of this form, or i is not from 1 to n.
    """
    try:
        index, count = map(int, shard.split("/"))
    except ValueError:
        raise ValueError(f"--shard must be like 1/4 (got {shard!r})") from None
    if not 1 <= index <= count:
        raise ValueError(f"--shard must be from 1/{count} to {count}/{count} (got {shard!r})")
    shards: list[list[Path]] = [[] for _ in range(count)]
    weights = [0] * count
    for file, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        lightest = weights.index(min(weights))
        shards[lightest].append(file)
        weights[lightest] += size
    return shards[index - 1]
