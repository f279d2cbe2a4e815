"""Averages of any length after a run (Karras et al. 2024, section 3 and appendix C).

The average of a run is a weighted sum of the parameters after each update; the weights are its
profile. A power-function average has the profile t^gamma, which grows longer with the run: its
standard deviation is always the same share of the run, sigma_rel. Profiles of averages that were
stored at many steps span a space in which others lie nearly, and the same sum of the stored
averages is then nearly the other average.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, NamedTuple, Protocol

import numpy as np
from msgspec import Meta

Length = Annotated[float, Meta(ge=0.005, le=0.28)]
"""sigma_rel; beyond 0.2887, the uniform average's, there is no power function that grows."""

MAX_ERROR = 0.1
"""The largest error of a profile, relative to its norm, that an average is made with."""

# Longer runs are looked at in this many pieces, of which the shortest average spans some twenty.
_CELLS = 4096


class Stored(NamedTuple):
    """A power-function average that was kept: its sigma_rel, and updates when it was written."""

    length: float
    updates: int


class Wanted(Protocol):
    """A profile that ends at an update."""

    def points(self, updates: int) -> Sequence[int]:
        """Updates at which it jumps."""

    def masses(self, edges: np.ndarray, updates: int) -> np.ndarray:
        """What it weighs between neighbouring edges, n -> n - 1; 1 in all."""


@dataclasses.dataclass(frozen=True)
class PowerFunction:
    """The average of a sigma_rel."""

    length: float

    def points(self, updates: int) -> Sequence[int]:
        """It has no jumps."""
        return ()

    def masses(self, edges: np.ndarray, updates: int) -> np.ndarray:
        """The sum over whole updates k of (k^(gamma + 1) - (k - 1)^(gamma + 1)) / t^(gamma + 1).

        So it is with updates of (1 - 1 / t)^(gamma + 1) (section 3.1), exactly.
        """
        return np.diff((np.clip(edges, 0, updates) / updates) ** (power_gamma(self.length) + 1))


@dataclasses.dataclass(frozen=True)
class LateAverage:
    """The average of the updates after `start`: uniform, or of weights that decay into the past."""

    start: int
    decay: float | None = None

    def points(self, updates: int) -> Sequence[int]:
        """Its start."""
        return (self.start,)

    def masses(self, edges: np.ndarray, updates: int) -> np.ndarray:
        """Unlike in training, there is no copy of the weights at its start that only decays."""
        inside = np.clip(edges, self.start, updates)
        if self.decay in (None, 1):
            return np.diff(inside) / (updates - self.start)
        return np.diff(self.decay ** (updates - inside)) / (
            1 - self.decay ** (updates - self.start)
        )


class Sum(NamedTuple):
    """What to make of the stored averages."""

    weights: np.ndarray
    """One for each, 1 in all."""
    error: float
    """The norm of the difference between the wanted profile and the sum's, relative to the
    former's. Were the parameters of all steps independent, it would be that share of what noise the
    wanted average still has."""


def power_gamma(length: float) -> float:
    """gamma of a sigma_rel: sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))."""
    t = length**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def solve(stored: Sequence[Stored], wanted: Wanted, updates: int) -> Sum:
    """The sum of stored averages that is nearest to the wanted one after some updates.

    Least squares over the profiles (algorithm 3), among sums whose weights are 1 in all: others
    would make all parameters larger or smaller. The profiles are of the updates themselves, or of
    as many pieces of the run, instead of the paper's functions of continuous time.
    """
    edges = _edges([*(s.updates for s in stored), *wanted.points(updates)], updates)
    density = 1 / np.sqrt(np.diff(edges))
    columns = [PowerFunction(s.length).masses(edges, s.updates) * density for s in stored]
    profiles = np.stack(columns, axis=1)
    target = wanted.masses(edges, updates) * density
    # The one most alike takes what the others leave of 1.
    first = int(np.argmax(target @ profiles / np.linalg.norm(profiles, axis=0)))
    others = np.delete(profiles, first, axis=1) - profiles[:, [first]]
    rest = target - profiles[:, first]
    found = np.linalg.lstsq(others, rest, rcond=1e-10)[0]
    weights = np.insert(found, first, 1 - found.sum())
    error = np.linalg.norm(profiles @ weights - target) / np.linalg.norm(target)
    return Sum(weights, float(error))


def _edges(points: Sequence[int], updates: int) -> np.ndarray:
    """Where pieces begin and end."""
    if updates <= _CELLS:
        return np.arange(updates + 1.0)
    even = np.linspace(0, updates, _CELLS + 1)
    return np.unique([*even, *(point for point in points if point <= updates)])
