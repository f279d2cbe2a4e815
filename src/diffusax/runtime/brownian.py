"""torchsde's Brownian tree, in NumPy: the numbers of diffusers' DPMSolverSDEScheduler.

A Brownian motion over an interval is drawn as a whole, then half by half as far down as is asked
for, each half with a seed of its own from NumPy's SeedSequence and torch.Generator's numbers. What
it does between two times thus depends on the seed and the interval alone. Reproduces
`torchsde.BrownianInterval(..., tol=1e-6, pool_size=24, halfway_tree=True)`, which
`BatchedBrownianTree` of diffusers' scheduling_dpmsolver_sde.py makes. Checked against torchsde
0.2.6.
"""

import math
from typing import NamedTuple

import numpy as np

from diffusax.runtime.torch_random import TorchGenerator

_DIGITS = 6
_POOL_SIZE = 24
_KEPT = 64
"""Halves that are kept for the next question, which goes down nearly the same way."""
_f32 = np.float32


class Motion(NamedTuple):
    """A Brownian motion over noise levels, and what a run's rows take of it.

    seed: of one motion of all images, a tuple for one motion each, None where nobody has said.
    low, high: its ends. steps: per row from which level to which, None for a row without noise.
    """

    seed: int | tuple[int, ...] | None
    low: float
    high: float
    steps: tuple[tuple[float, float] | None, ...]


class BrownianNoise:
    """The noise of the rows of a run.

    Raises:
        ValueError: there are several seeds, and not as many as images.
    """

    def __init__(self, motion: Motion, shape: tuple[int, int, int, int]):
        """shape: b h w c."""
        b, h, w, c = shape
        seeds = motion.seed
        assert seeds is not None
        if isinstance(seeds, tuple) and len(seeds) != b:
            raise ValueError(
                f"noise_sampler_seed has {len(seeds)} entries for {b} images; give one or {b}"
            )
        # One motion is drawn for all images at once, several each for its image.
        each = (b, c, h, w) if isinstance(seeds, int) else (c, h, w)
        several = seeds if isinstance(seeds, tuple) else (seeds,)
        self._trees = [BrownianTree(seed, motion.low, motion.high, each) for seed in several]
        self._steps, self._shape = motion.steps, shape

    def row(self, row: int) -> np.ndarray:
        """Standard normal numbers, b h w c; zeros for a row without noise."""
        step = self._steps[row]
        if step is None:
            return np.zeros(self._shape, np.float32)
        b, h, w, c = self._shape
        high, low = step
        drawn = np.stack([tree.increment(low, high) for tree in self._trees]).reshape(b, c, h, w)
        noise = -drawn / np.sqrt(_f32(high) - _f32(low))
        return np.ascontiguousarray(noise.transpose(0, 2, 3, 1))


class _Node(NamedTuple):
    """An interval of the tree; key: its place among those of its depth, from the left."""

    start: float
    end: float
    key: int = 0
    depth: int = 0


class BrownianTree:
    """A Brownian motion from `low` to `high`, the same for the same seed, in steps of 1e-6."""

    def __init__(self, seed: int, low: float, high: float, shape: tuple[int, ...]):
        """shape: of the motion's value, as PyTorch has it."""
        self._seed, self._shape = seed, shape
        self._root = _Node(_rounded(low), _rounded(high))
        self._whole = self._randn(()) * _f32(math.sqrt(high - low))
        self._kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def increment(self, low: float, high: float) -> np.ndarray:
        """What the motion adds from `low` to `high`, float32; beyond its ends nothing."""
        first, last = self._root.start, self._root.end
        low, high = (_rounded(min(max(float(t), first), last)) for t in (low, high))
        if low >= high:
            return np.zeros(self._shape, np.float32)
        return self._between(self._root, self._whole, low, high)

    def _between(self, node: _Node, whole: np.ndarray, low: float, high: float) -> np.ndarray:
        """The same inside a node; `whole` is what the motion adds over it."""
        total: np.ndarray | None = None
        # From left to right, as torchsde adds the parts up.
        stack = [(node, whole, low, high)]
        while stack:
            node, whole, low, high = stack.pop()
            if (low, high) == (node.start, node.end):
                total = whole if total is None else total + whole
                continue
            middle = _rounded(0.5 * (node.end + node.start))
            left, right = self._halves(node, middle, whole)
            below = node.depth + 1
            if high > middle:
                upper = _Node(middle, node.end, 2 * node.key + 1, below)
                stack.append((upper, right, max(low, middle), high))
            if low < middle:
                lower = _Node(node.start, middle, 2 * node.key, below)
                stack.append((lower, left, low, min(high, middle)))
        assert total is not None
        return total

    def _halves(
        self, node: _Node, middle: float, whole: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """What the motion adds over the two halves of a node: a Brownian bridge."""
        key = node.key, node.depth
        halves = self._kept.pop(key, None)
        if halves is None:
            left, right = middle - node.start, node.end - middle
            inverse = 1 / (node.end - node.start)
            mean = whole * _f32(left) * _f32(inverse)
            first = mean + self._randn(key) * _f32(math.sqrt(left * right * inverse))
            halves = first, whole - first
        self._kept[key] = halves
        if len(self._kept) > _KEPT:
            del self._kept[next(iter(self._kept))]
        return halves

    def _randn(self, key: tuple[int, ...]) -> np.ndarray:
        sequence = np.random.SeedSequence(self._seed, spawn_key=key, pool_size=_POOL_SIZE)
        seed = int(sequence.generate_state(1)[0])
        return TorchGenerator(seed).randn(self._shape)


def _rounded(time: float) -> float:
    return round(float(time), _DIGITS)
