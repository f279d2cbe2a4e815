"""Tables of sigmas or timesteps that are traced, so that they can be learned.

The methods are formulas of numbers on the host. A traced list is given to them when the program
runs, and the derivatives of the table are differences of tables in float64, exact to some eight
digits: the sampler's own formulas, whichever it is, are the only ones that exist.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.runtime.switches import is_traced
from diffusax.samplers import noise_levels
from diffusax.samplers.rows import Schedule, Table
from diffusax.samplers.runs import Sampler, cached_schedule, compute_schedule

_STEP = 1e-5
"""The change of a number by which a derivative is taken, as a share of the number."""


@dataclasses.dataclass(frozen=True)
class _Listed:
    """A run by a list of its own: static, so that JAX can tell two runs apart.

    name: "sigmas" or "timesteps". options: the other arguments of `cached_schedule`, as pairs.
    """

    scheduler: Sampler
    name: str
    options: tuple[tuple[str, Any], ...]

    def schedule(self, values: np.ndarray) -> Schedule:
        """Returns the run, which is not cached, as each one of an optimisation is new."""
        given = {self.name: tuple(np.asarray(values, np.float64).tolist())}
        return compute_schedule.__wrapped__(self.scheduler, **dict(self.options), **given)

    def like(self, count: int) -> Schedule:
        """Returns a run of as many rows as one by a list of so many numbers."""
        hold = self.name == "sigmas" and self.scheduler.sigmas_hold_last
        return cached_schedule(self.scheduler, steps=count - hold, **dict(self.options))


def traced_run(
    scheduler: Any, options: dict[str, Any], sigmas: Any, timesteps: Any
) -> tuple[Table, Schedule]:
    """Returns the table of a run by a traced list, without padding, and a run of the same form.

    Args:
        scheduler: the sampler.
        options: the other arguments of `cached_schedule`.
        sigmas: n, descending, or None.
        timesteps: n, descending, or None.

    Raises:
        ValueError: both lists are given, the sampler does not take the list, or takes whole numbers
            in it.
    """
    name, values = ("timesteps", timesteps) if sigmas is None else ("sigmas", sigmas)
    owner = type(scheduler).__name__
    if sigmas is not None and timesteps is not None:
        raise ValueError("only one of timesteps and sigmas can be traced; leave the other out")
    if name not in scheduler.custom:
        raise ValueError(f"{owner} does not take custom {name}; leave it out")
    if name == "timesteps" and scheduler.whole_timesteps:
        raise ValueError(
            f"the timesteps of a {owner} are whole numbers, which have no gradients; give numbers, "
            "and differentiate with respect to table.timestep, which the network is told"
        )
    values = jnp.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"{name} must be a list of numbers (got shape {values.shape})")
    listed = _Listed(scheduler.without_run(), name, tuple(sorted(options.items())))
    return _table(listed, values), listed.like(len(values))


def is_traced_list(sigmas: Any, timesteps: Any) -> bool:
    """Returns whether a list of a run is traced."""
    return is_traced((sigmas, timesteps))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _table(listed: _Listed, values: jax.Array) -> Table:
    shapes = _shapes(listed, len(values), ())
    found: Table = jax.pure_callback(
        functools.partial(_rows_of, listed), shapes, values, vmap_method="sequential"
    )
    return found


@_table.defjvp
def _table_jvp(
    listed: _Listed, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[Table, Table]:
    (values,), (change,) = primals, tangents
    shapes = _shapes(listed, len(values), (len(values),))
    slopes = jax.pure_callback(
        functools.partial(_slopes, listed), shapes, values, vmap_method="sequential"
    )
    return _table(listed, values), jax.tree.map(lambda slope: slope @ change, slopes)


def _shapes(listed: _Listed, count: int, more: tuple[int, ...]) -> Table:
    """Returns the shapes of a run's table, each with `more` axes behind."""
    like = listed.like(count).exact_table()
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((*x.shape, *more), np.float32), like)


def _rows_of(listed: _Listed, values: Any) -> Table:
    """Returns the table of a list; raises ValueError if its rows are not those of `like`."""
    table, like = listed.schedule(values).exact_table(), listed.like(len(values))
    if len(table.timestep) != len(like):
        raise ValueError(
            f"{listed.name} that are traced must end as the sampler's own runs do, mostly at 0: "
            f"{len(like)} rows (got {len(table.timestep)})"
        )
    return jax.tree.map(lambda x: x.astype(np.float32), table)


def _slopes(listed: _Listed, values: Any) -> Table:
    """Returns the derivatives of the table's numbers by those of the list, in a last axis.

    A zero stays a zero: a run that ends elsewhere is another.
    """
    exact = np.asarray(values, np.float64)
    with noise_levels.unrounded():
        columns = [_slope(listed, exact, i) for i in range(len(exact))]
    return jax.tree.map(lambda *parts: np.stack(parts, -1).astype(np.float32), *columns)


def _slope(listed: _Listed, values: np.ndarray, i: int) -> Table:
    """Returns the derivative by one number: central, and one-sided at the highest that may be."""
    step = _STEP * values[i]

    def at(count: int) -> Table:
        changed = values.copy()
        changed[i] += count * step
        return listed.schedule(changed).exact_table()

    if step == 0:
        return jax.tree.map(np.zeros_like, listed.schedule(values).exact_table())
    below = at(-1)
    try:
        above, weights = at(1), (0.5, 0.0, -0.5)
        parts = above, above, below
    except ValueError:
        parts, weights = (at(0), below, at(-2)), (1.5, -2.0, 0.5)

    def slope(*columns: np.ndarray) -> np.ndarray:
        # Limits, which may be infinite, do not change.
        same = columns[0] == columns[-1]
        with np.errstate(invalid="ignore"):
            found = sum(w * column for w, column in zip(weights, columns)) / step
        return np.where(same, 0.0, found)

    return jax.tree.map(slope, *parts)
