"""One row per model evaluation: the coefficients of a linear update of the sampler's state.

The state is the latents x and five memory slots. A row evaluates

    raw = model(in_scale x, t)
    p   = clip(c_x x + c_out raw, -clip, clip)
    state' = A (x, m1 ... m5, raw, p, noise)

with A one row of coefficients for each slot. The methods write the rows of A as sums of the unit
vectors X, M1 ... M5, RAW, P and NOISE, so that their code reads like the papers.
"""

import dataclasses
from typing import NamedTuple

import numpy as np

SLOTS = 6
X, M1, M2, M3, M4, M5, RAW, P, NOISE = np.eye(SLOTS + 3)
MIN_HEIGHT = 1024


class Table(NamedTuple):
    """The rows as arrays, padded to a fixed height: an argument of the compiled program.

    in_scale, timestep, clip: n. prediction: n 2. update: n 6 9. All float32.
    """

    in_scale: np.ndarray
    timestep: np.ndarray
    clip: np.ndarray
    prediction: np.ndarray
    update: np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """One model evaluation. `memory` gives m1, m2 ... after it; the other slots keep theirs."""

    timestep: float
    x: np.ndarray
    prediction: np.ndarray = dataclasses.field(default_factory=lambda: RAW)
    memory: tuple[np.ndarray, ...] = ()
    in_scale: float = 1.0
    clip: float = np.inf


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A sampler's run, computed on the host: what the compiled program is given as data.

    timesteps: diffusers' `scheduler.timesteps`, one per row. init_noise_sigma: the standard
    deviation of the initial latents.
    """

    rows: tuple[Row, ...]
    init_noise_sigma: float

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def timesteps(self) -> np.ndarray:
        return np.array([row.timestep for row in self.rows], np.float32)

    @property
    def draws_noise(self) -> np.ndarray:
        """Whether each row adds noise."""
        return np.array([row.x @ NOISE != 0 for row in self.rows])

    def table(self) -> Table:
        """The rows padded to 1024, or to the next power of two beyond."""
        n = len(self.rows)
        height = max(MIN_HEIGHT, 1 << (n - 1).bit_length())
        update = np.zeros((height, SLOTS, SLOTS + 3), np.float32)
        update[:, :, :SLOTS] = np.eye(SLOTS)
        for i, row in enumerate(self.rows):
            update[i, 0] = row.x
            for slot, form in enumerate(row.memory, 1):
                update[i, slot] = form

        def column(name: str, fill: float) -> np.ndarray:
            values = np.full(height, fill, np.float32)
            values[:n] = [getattr(row, name) for row in self.rows]
            return values

        prediction = np.zeros((height, 2), np.float32)
        prediction[:n] = [(row.prediction @ X, row.prediction @ RAW) for row in self.rows]
        return Table(
            column("in_scale", 1), column("timestep", 0), column("clip", np.inf), prediction, update
        )
