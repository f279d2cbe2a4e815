"""Computes torchsde's Brownian tree in NumPy: the noise of diffusers' DPMSolverSDEScheduler.

A Brownian motion over an interval is drawn as a whole, then half by half as far down as needed.
Each half has a seed of its own from NumPy's SeedSequence, and torch.Generator's numbers. The motion
between two times thus depends only on the seed and the interval. It reproduces
`torchsde.BrownianInterval(..., tol=1e-6, pool_size=24, halfway_tree=True)`, which
`BatchedBrownianTree` of diffusers' scheduling_dpmsolver_sde.py makes, and was checked against
torchsde 0.2.6.
"""

import math
from typing import NamedTuple

import numpy as np

from diffusax.runtime.random.torch_random import TorchGenerator

_DIGITS = 6
_POOL_SIZE = 24
_KEPT = 64
"""The number of halves that are kept, because the next request needs nearly the same ones."""
_f32 = np.float32


class Motion(NamedTuple):
    """A Brownian motion over noise levels, and the parts of it that a run's rows use.

    seed: the seed of one motion for all images, a tuple for one motion each, or None for no choice.
    low, high: its ends. steps: for each row the two levels, or None for a row without noise.
    """

    seed: int | tuple[int, ...] | None
    low: float
    high: float
    steps: tuple[tuple[float, float] | None, ...]


class BrownianNoise:
    """The noise of the rows of a run.

    Raises:
        ValueError: the number of seeds is neither one nor that of the images.
    """

    def __init__(self, motion: Motion, shape: tuple[int, int, int, int]):
        """Draws the motion or motions. shape: b h w c."""
        b, h, w, c = shape
        seeds = motion.seed
        assert seeds is not None
        if isinstance(seeds, tuple) and len(seeds) != b:
            raise ValueError(
                f"noise_sampler_seed has {len(seeds)} entries for {b} images; give one or {b}"
            )
        # One motion is drawn for all images at once; of several, each is for one image.
        each = (b, c, h, w) if isinstance(seeds, int) else (c, h, w)
        several = seeds if isinstance(seeds, tuple) else (seeds,)
        self._trees = [BrownianTree(seed, motion.low, motion.high, each) for seed in several]
        self._steps, self._shape = motion.steps, shape

    def row(self, row: int) -> np.ndarray:
        """Returns standard normal numbers, b h w c; zeros for a row without noise."""
        step = self._steps[row]
        if step is None:
            return np.zeros(self._shape, np.float32)
        b, h, w, c = self._shape
        high, low = step
        drawn = np.stack([tree.increment(low, high) for tree in self._trees]).reshape(b, c, h, w)
        noise = -drawn / np.sqrt(_f32(high) - _f32(low))
        return np.ascontiguousarray(noise.transpose(0, 2, 3, 1))


class _Node(NamedTuple):
    """An interval of the tree; key: its position among those of its depth, from the left."""

    start: float
    end: float
    key: int = 0
    depth: int = 0


class BrownianTree:
    """A Brownian motion from `low` to `high` that depends only on the seed, in steps of 1e-6."""

    def __init__(self, seed: int, low: float, high: float, shape: tuple[int, ...]):
        """Draws the motion as a whole. shape: the shape of its value, in PyTorch's layout."""
        self._seed, self._shape = seed, shape
        self._root = _Node(_rounded(low), _rounded(high))
        self._whole = self._randn(()) * _f32(math.sqrt(high - low))
        self._kept: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}

    def increment(self, low: float, high: float) -> np.ndarray:
        """Returns what the motion adds from `low` to `high`, float32; it adds nothing outside its
        ends.
        """
        first, last = self._root.start, self._root.end
        low, high = (_rounded(min(max(float(t), first), last)) for t in (low, high))
        if low >= high:
            return np.zeros(self._shape, np.float32)
        return self._between(self._root, self._whole, low, high)

    def _between(self, node: _Node, whole: np.ndarray, low: float, high: float) -> np.ndarray:
        """Returns the increment inside a node; `whole` is the increment over the node."""
        total: np.ndarray | None = None
        # torchsde adds the parts up from left to right.
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
        """Returns the increments over the two halves of a node, by a Brownian bridge."""
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
