"""Computes averages of any length after a run (Karras et al. 2024, section 3 and appendix C).

The average of a run is a weighted sum of the parameters after each update; the weights are its
profile. A power-function average has the profile t^gamma, which grows longer with the run: its
standard deviation is always the same share of the run, sigma_rel. Profiles of averages that were
stored at many steps span a space in which others lie nearly, and the same sum of the stored
averages is then nearly the other average.
"""

import dataclasses
from collections.abc import Sequence
from typing import Annotated, ClassVar, NamedTuple

import numpy as np
from msgspec import Meta

Length = Annotated[float, Meta(ge=0.005, le=0.28)]
"""The width sigma_rel. Beyond 0.2887, the uniform average's, no power function grows."""

MAX_ERROR = 0.1
"""The largest error of a profile, relative to its norm, with which an average is made."""

# Longer runs are looked at in this many pieces, of which the shortest average spans some twenty.
_CELLS = 4096


class Stored(NamedTuple):
    """A stored power-function average: its sigma_rel, and its number of updates."""

    length: float
    updates: int


@dataclasses.dataclass(frozen=True)
class PowerFunction:
    """The power-function average of a sigma_rel."""

    length: float
    jumps: ClassVar[Sequence[int]] = ()

    def masses(self, edges: np.ndarray, updates: int) -> np.ndarray:
        """Returns the profile's weight between neighbouring edges, n -> n - 1; the sum is 1.

        They are sums over updates k of (k^(gamma + 1) - (k - 1)^(gamma + 1)) / t^(gamma + 1),
        exactly the weights that updates of (1 - 1 / t)^(gamma + 1) give (section 3.1).
        """
        return np.diff((np.clip(edges, 0, updates) / updates) ** (power_gamma(self.length) + 1))


@dataclasses.dataclass(frozen=True)
class LateAverage:
    """The average of the updates after `start`: uniform, or with weights that decay backwards."""

    start: int
    decay: float | None = None

    @property
    def jumps(self) -> Sequence[int]:
        """The updates at which the profile jumps: its start."""
        return (self.start,)

    def masses(self, edges: np.ndarray, updates: int) -> np.ndarray:
        """Returns the weights; unlike in training, the average begins without a copy."""
        inside = np.clip(edges, self.start, updates)
        if self.decay in (None, 1):
            return np.diff(inside) / (updates - self.start)
        return np.diff(self.decay ** (updates - inside)) / (
            1 - self.decay ** (updates - self.start)
        )


Wanted = PowerFunction | LateAverage


class Sum(NamedTuple):
    """The weights of the stored averages in the wanted one."""

    weights: np.ndarray
    """The weight of each stored average; the sum is 1."""
    error: float
    """The norm of the difference between the wanted profile and the sum's, relative to the
    former's. Were the parameters of all steps independent, it would be that share of what noise the
    wanted average still has."""


def power_gamma(length: float) -> float:
    """Returns gamma of a sigma_rel: sigma_rel^2 = (gamma + 1) / ((gamma + 2)^2 (gamma + 3))."""
    t = length**-2
    return float(np.roots([1, 7, 16 - t, 12 - t]).real.max())


def solve(stored: Sequence[Stored], wanted: Wanted, updates: int) -> Sum:
    """Finds the sum of stored averages that is nearest to the wanted one at an update.

    It is a least-squares fit of the profiles (algorithm 3) among weights whose sum is 1: others
    would make all parameters larger or smaller. The profiles are those of the updates themselves,
    or of pieces of the run, instead of the paper's functions of continuous time.
    """
    edges = _edges([*(s.updates for s in stored), *wanted.jumps], updates)
    density = 1 / np.sqrt(np.diff(edges))
    columns = [PowerFunction(s.length).masses(edges, s.updates) * density for s in stored]
    profiles = np.stack(columns, axis=1)
    target = wanted.masses(edges, updates) * density
    # The average most like the wanted one gets what the others leave of 1.
    first = int(np.argmax(target @ profiles / np.linalg.norm(profiles, axis=0)))
    others = np.delete(profiles, first, axis=1) - profiles[:, [first]]
    rest = target - profiles[:, first]
    found = np.linalg.lstsq(others, rest, rcond=1e-10)[0]
    weights = np.insert(found, first, 1 - found.sum())
    error = np.linalg.norm(profiles @ weights - target) / np.linalg.norm(target)
    return Sum(weights, float(error))


def _edges(points: Sequence[int], updates: int) -> np.ndarray:
    """Returns where the pieces of the run begin and end."""
    if updates <= _CELLS:
        return np.arange(updates + 1.0)
    even = np.linspace(0, updates, _CELLS + 1)
    return np.unique([*even, *(point for point in points if point <= updates)])
