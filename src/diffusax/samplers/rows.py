"""One row per model evaluation: the coefficients of a linear update of the sampler's state.

The state is the latents x and five memory slots. A row evaluates

    raw = model(in_scale x, t)
    p   = threshold(clip(c_x x + c_out raw, -clip, clip))
    state' = A (x, m1 ... m5, raw, p, noise)

with A one row of coefficients for each slot. The methods write the rows of A as sums of the terms
X, M1 ... M5, RAW, P and NOISE, so that their code reads like the papers. X is x, M1 to M5
are the memory slots, zero at the start of a run, RAW is the network's guided prediction, P the same
after the conversion and the limits above, and NOISE fresh standard normal noise.

Everywhere x = signal x0 + noise eps. The variance-preserving form has signal sqrt(alpha-bar) and
noise sqrt(1 - alpha-bar), the variance-exploding form signal 1 and noise sigma, flow matching
signal 1 - sigma and noise sigma.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from diffusax.runtime.random.brownian import Motion
from diffusax.samplers.terms import NAMES, Terms, coefficients_of

SLOTS = 6
X, M1, M2, M3, M4, M5, RAW, P, NOISE = map(Terms, np.eye(SLOTS + 3))
MIN_HEIGHT = 2048
"""The least number of rows of a table; 1,000 steps of two evaluations each fit."""

CLEAN = (1.0, 0.0)
"""The level of latents without noise."""

_X, _RAW, _NOISE = (NAMES.index(name) for name in ("X", "RAW", "NOISE"))


class Table(NamedTuple):
    """The rows as arrays, padded to a fixed height: an argument of the compiled program.

    The rows of padding change nothing. All are float32; with `stack_tables` each has one more axis
    after n, that of the images.

    in_scale, timestep, clip: n.
    prediction: n 2, the coefficients of x and of the raw prediction in p.
    update: n 6 9, the matrix A.
    level: n 2, the (signal, noise) of x after the row, x = signal x0 + noise eps.
    threshold: n 2, the quantile and the highest value of dynamic thresholding (Saharia et al. 2022,
        section 2.3), a highest value of 0 for none; None if no row has it.
    """

    in_scale: np.ndarray
    timestep: np.ndarray
    clip: np.ndarray
    prediction: np.ndarray
    update: np.ndarray
    level: np.ndarray
    threshold: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Row:
    """The coefficients for one evaluation of the network.

    Coefficients are sums of X, M1 ... M5, RAW, P and NOISE of this module, times numbers, and are
    applied to the values before the row. The row keeps them as arrays, 9.
    """

    timestep: float
    """The network's time input."""
    x: Any
    """The coefficients of the next x."""
    level: tuple[float, float]
    """The (signal, noise) of the x before the row."""
    prediction: Any = dataclasses.field(default_factory=lambda: RAW)
    """The coefficients of P, in X and RAW alone."""
    memory: tuple[Any, ...] = ()
    """The coefficients of M1, M2 ... after the row, five at most; the other slots do not change."""
    in_scale: float = 1.0
    """What x is multiplied by for the network."""
    clip: float = np.inf
    """P is cut off at plus and minus this."""
    threshold: tuple[float, float] = (0.0, 0.0)
    """The quantile and highest value of dynamic thresholding of P (Saharia et al. 2022); a highest
    value of 0 for none."""

    def __post_init__(self) -> None:
        for name in ("x", "prediction"):
            object.__setattr__(self, name, coefficients_of(getattr(self, name)))
        object.__setattr__(self, "memory", tuple(map(coefficients_of, self.memory)))


@dataclasses.dataclass(frozen=True, eq=False)
class Schedule:
    """A sampler's run, computed on the host, which the compiled program takes as data.

    rows: those from begin to end of the run. init_noise_sigma: the standard deviation of the
    initial latents of a whole run. order: rows per step, 2 for Heun and KDPM2. last_level: the
    (signal, noise) of x after the last row: that of the row that would follow, or at the end of the
    run, where some options leave noise. motion: the Brownian motion from which diffusers takes the
    rows' noise, for samplers that have one there.
    """

    rows: tuple[Row, ...]
    init_noise_sigma: float
    order: int = 1
    last_level: tuple[float, float] = CLEAN
    motion: Motion | None = None

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def timesteps(self) -> np.ndarray:
        """diffusers' `scheduler.timesteps`, one per row: n, float32."""
        return _frozen(self.exact_timesteps.astype(np.float32))

    @functools.cached_property
    def exact_timesteps(self) -> np.ndarray:
        """The timesteps before they are rounded for the network: n, float64."""
        return _frozen(np.array([row.timestep for row in self.rows], np.float64))

    @functools.cached_property
    def draws_noise(self) -> np.ndarray:
        """Whether each row draws noise: n."""
        return _frozen(np.any(self._matrices()[:, :, _NOISE], axis=1))

    @functools.cached_property
    def levels(self) -> np.ndarray:
        """The (signal, noise) of the x given to each row, then of the result: n+1 2, float64.

        x = signal x0 + noise eps is what diffusers' `add_noise` gives there.
        """
        return _frozen(np.array([row.level for row in self.rows] + [self.last_level], np.float64))

    @functools.cached_property
    def ending_clean(self) -> "Schedule":
        """Returns the same run with a last level of (1, 0), whatever noise its options leave."""
        if self.last_level == CLEAN:
            return self
        return dataclasses.replace(self, last_level=CLEAN)

    def table(self) -> Table:
        """Returns the rows padded to MIN_HEIGHT or a higher power of two; it is computed once."""
        return self._table

    @functools.cached_property
    def _table(self) -> Table:
        n, exact = len(self.rows), self.exact_table()
        # At least one row of padding, which `stack_tables` can repeat.
        height = max(MIN_HEIGHT, 1 << n.bit_length())
        update = np.zeros((height, SLOTS, SLOTS + 3), np.float32)
        update[n:, range(SLOTS), range(SLOTS)] = 1
        update[:n] = exact.update
        return Table(
            in_scale=_padded(exact.in_scale, height, 1.0),
            timestep=_padded(exact.timestep, height, 0.0),
            clip=_padded(exact.clip, height, np.inf),
            prediction=_padded(exact.prediction, height, 0.0),
            update=_frozen(update),
            level=_padded(exact.level, height, self.last_level),
            threshold=None if exact.threshold is None else _padded(exact.threshold, height, 0.0),
        )

    def exact_table(self) -> Table:
        """Returns the rows in float64, without padding."""
        rows = self.rows
        threshold = np.array([row.threshold for row in rows])
        return Table(
            in_scale=np.array([row.in_scale for row in rows], np.float64),
            timestep=self.exact_timesteps,
            clip=np.array([row.clip for row in rows], np.float64),
            prediction=np.array([row.prediction for row in rows])[:, [_X, _RAW]],
            update=self._matrices(),
            level=self.levels[1:],
            threshold=threshold if threshold.any() else None,
        )

    def _matrices(self) -> np.ndarray:
        """Returns the matrices A of the rows: n 6 9."""
        coefficients = [c for row in self.rows for c in (row.x, *row.memory)]
        counts = np.array([1 + len(row.memory) for row in self.rows])
        update = np.zeros((len(self.rows), SLOTS, SLOTS + 3))
        update[:, range(SLOTS), range(SLOTS)] = 1
        update[np.arange(SLOTS) < counts[:, None]] = coefficients
        return update


def x0_from(kind: str, signal: float, noise: float) -> Terms:
    """Returns the predicted sample as coefficients of X and RAW (Salimans and Ho 2022, section 4).

    kind: "epsilon" (RAW is the noise), "v_prediction" (RAW is the velocity of x scaled to unit
    variance), "flow_prediction" (RAW is the noise less the sample, where signal and noise sum to
    one) or "sample" (RAW is the sample).
    """
    if kind == "epsilon":
        return (X - noise * RAW) / signal
    if kind == "v_prediction":
        scale = np.hypot(signal, noise)
        return signal / scale**2 * X - noise / scale * RAW
    if kind == "flow_prediction":
        return X - noise * RAW
    return RAW


def epsilon_from(kind: str, signal: float, noise: float) -> Terms:
    """Returns the predicted noise as coefficients of X and RAW; kind: see `x0_from`."""
    if kind == "epsilon":
        return RAW
    if kind == "v_prediction":
        scale = np.hypot(signal, noise)
        return noise / scale**2 * X + signal / scale * RAW
    if kind == "flow_prediction":
        return X + signal * RAW
    return (X - signal * RAW) / noise


def stack_tables(tables: Sequence[Table]) -> Table:
    """Stacks the tables of several runs, for a batch with one image of each: n b ....

    In the rows after the end of its own run, an image does not change.

    Raises:
        ValueError: there are no tables.
    """
    if not tables:
        raise ValueError("stack_tables needs at least one table (got none)")
    height = max(len(table.timestep) for table in tables)
    tables = [_heightened(table, height) for table in tables]
    threshold = None
    if any(table.threshold is not None for table in tables):
        none = np.zeros((height, 2), np.float32)
        threshold = np.stack([none if t.threshold is None else t.threshold for t in tables], 1)
    names = [name for name in Table._fields if name != "threshold"]
    columns = {name: np.stack([getattr(t, name) for t in tables], 1) for name in names}
    return Table(**columns, threshold=threshold)


def _heightened(table: Table, height: int) -> Table:
    """Repeats the last row of the table, which is padding, up to `height` rows."""
    more = height - len(table.timestep)
    if not more:
        return table
    columns = {
        name: np.concatenate([column, column[-1:].repeat(more, 0)])
        for name, column in table._asdict().items()
        if column is not None
    }
    return Table(**columns)


def _padded(values: Sequence[float] | np.ndarray, height: int, fill: object) -> np.ndarray:
    values = np.asarray(values, np.float32)
    column = np.empty((height, *values.shape[1:]), np.float32)
    column[: len(values)] = values
    column[len(values) :] = fill
    return _frozen(column)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.flags.writeable = False
    return array
