"""How much a run of the tests does: what everybody runs, or all of it (DIFFUSAX_TESTS=all)."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

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


def few(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Cases of a test, of which everybody runs those kept; the others are slow.

    Raises:
        ValueError: one to keep is none of the cases.
    """
    cases = list(cases)
    if missing := [case for case in kept if case not in cases]:
        raise ValueError(f"{missing} are none of the cases {cases}")
    return [case if case in kept else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return case if hasattr(case, "marks") else pytest.param(*values, marks=pytest.mark.slow)


def first(cases: Iterable[Any], kept: int = 1) -> list[Any]:
    """Cases of a test, of which everybody runs the first; the others are slow."""
    cases = list(cases)
    return [*cases[:kept], *map(_slow, cases[kept:])]
