"""Checks the arguments of `Scheduler.schedule`, and caches the schedules."""

import functools
import operator
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from diffusax.runtime.random.brownian import Motion
from diffusax.runtime.switches import check_untraced
from diffusax.samplers.rows import CLEAN, Row, Schedule


class RunOptions(NamedTuple):
    """The checked arguments of a run.

    steps: the number of steps of the whole run. begin: the first row. timesteps: n, sigmas: n+1,
    the caller's own (sigmas: n where the scheduler's lists lack the last). eta: DDIM's eta or TCD's
    gamma. original_inference_steps, strength: options of LCM and TCD. mu: flow matching's shift.
    use_clipped_model_output: an option of DDIM.
    """

    steps: int
    begin: int = 0
    timesteps: np.ndarray | None = None
    sigmas: np.ndarray | None = None
    eta: float = 0.0
    original_inference_steps: int | None = None
    strength: float = 1.0
    mu: float | None = None
    use_clipped_model_output: bool = False


class Run(NamedTuple):
    """All rows of a run, those before its `begin` included, and the initial standard deviation.

    last_level: the (signal, noise) of x after all rows. motion: see `Schedule`, of all rows.
    """

    rows: list[Row]
    init_noise_sigma: float = 1.0
    last_level: tuple[float, float] = CLEAN
    motion: Motion | None = None


class Sampler(Protocol):
    """What `cached_schedule` uses of a scheduler; `Scheduler` explains each."""

    class_name: ClassVar[str]
    custom: ClassVar[tuple[str, ...]]
    paired: ClassVar[bool]
    sigmas_hold_last: ClassVar[bool]
    needs_mu: ClassVar[bool]
    order: ClassVar[int]

    @property
    def num_train_timesteps(self) -> int: ...

    @property
    def prediction_type(self) -> str: ...

    def __hash__(self) -> int: ...

    def without_run(self) -> Self: ...

    def _check_custom(self, name: str, values: np.ndarray) -> None: ...

    def _run(self, wanted: RunOptions) -> Run: ...


def cached_schedule(scheduler: Sampler, **options: Any) -> Schedule:
    """Returns what `compute_schedule` does, for any scheduler, also one with a run by hand.

    This is `Scheduler.schedule` from arguments that `checked_options` returned, and others.

    Args:
        scheduler: the sampler.
        **options: also begin and end, integers, and uncut: whether to allow rows without a finite
            step, because the caller will use a part of the run that may not contain them.

    Raises:
        ValueError: for the reasons of `Scheduler.schedule`.
    """
    return compute_schedule(scheduler.without_run(), **options)


@functools.lru_cache(maxsize=64)
def compute_schedule(
    scheduler: Sampler,
    *,
    steps: int | None = None,
    begin: int = 0,
    end: int | None = None,
    timesteps: tuple[float, ...] | None = None,
    sigmas: tuple[float, ...] | None = None,
    eta: float = 0.0,
    original_inference_steps: int | None = None,
    strength: float = 1.0,
    mu: float | None = None,
    use_clipped_model_output: bool = False,
    uncut: bool = False,
) -> Schedule:
    """Checks the arguments of a run and computes its schedule, which is cached.

    Calls use it with `Components.fitting_scheduler`. The arguments must have exactly these types
    and are explained at `cached_schedule`. The cache keeps the scheduler, which must have no run by
    hand, see `Stepped.without_run`.
    """
    custom = {"timesteps": timesteps, "sigmas": sigmas}
    given = [name for name, value in custom.items() if value is not None]
    if not 0 <= strength <= 1:
        raise ValueError(f"strength must be between 0 and 1 (got {strength:g})")
    _check_mu(scheduler, mu)
    together = scheduler.paired and steps is None and len(given) == 2
    if len(given) + (steps is not None) != 1 and not together:
        names = [*(["the number of steps"] if steps is not None else []), *given]
        raise ValueError(
            "exactly one of the number of steps (num_inference_steps), timesteps and sigmas "
            f"must be given (got {' and '.join(names) or 'none'})"
        )
    if original_inference_steps is not None:
        given.append("original_inference_steps")
        if original_inference_steps < 1:
            raise ValueError(
                f"original_inference_steps must be at least 1 (got {original_inference_steps})"
            )
    if strength != 1:
        given.append("strength")
    if use_clipped_model_output:
        given.append("use_clipped_model_output")
    for name in given:
        if name not in scheduler.custom:
            raise ValueError(f"{scheduler.class_name} does not take custom {name}; leave it out")
    arrays = {name: np.array(value) for name, value in custom.items() if value is not None}
    if together and len(arrays["timesteps"]) != len(arrays["sigmas"]):
        raise ValueError(
            "timesteps and sigmas must be of the same length (got "
            f"{len(arrays['timesteps'])} and {len(arrays['sigmas'])})"
        )
    for name, values in arrays.items():
        _check_custom(scheduler, name, values)
        steps = len(values) - (name == "sigmas" and scheduler.sigmas_hold_last)
    assert steps is not None
    _check_steps(scheduler, steps)
    wanted = RunOptions(
        steps,
        begin,
        arrays.get("timesteps"),
        arrays.get("sigmas"),
        eta,
        original_inference_steps,
        strength,
        mu,
        use_clipped_model_output,
    )
    try:
        with np.errstate(all="ignore"):
            run = scheduler._run(wanted)
    except (np.linalg.LinAlgError, ZeroDivisionError):
        raise ValueError(_no_step(scheduler)) from None
    rows, stop = run.rows, len(run.rows) if end is None else end
    if not 0 <= begin < stop <= len(rows):
        raise ValueError(
            f"a run of {steps} steps has {len(rows)} rows: begin and end must be from 0 to "
            f"{len(rows)}, begin below end (got begin={begin}, end={end})"
        )
    if begin % scheduler.order:
        raise ValueError(
            f"begin must be a multiple of {scheduler.order}, the rows of one step of "
            f"{scheduler.class_name} (got {begin})"
        )
    last_level = rows[stop].level if stop < len(rows) else run.last_level
    motion = run.motion and run.motion._replace(steps=run.motion.steps[begin:stop])
    schedule = Schedule(
        tuple(rows[begin:stop]), float(run.init_noise_sigma), scheduler.order, last_level, motion
    )
    if not uncut:
        _check_finite(scheduler, schedule)
    return schedule


def _check_steps(scheduler: Sampler, steps: int) -> None:
    most = scheduler.num_train_timesteps
    if steps < 1:
        raise ValueError(
            f"the number of steps (num_inference_steps) must be at least 1 (got {steps})"
        )
    if steps > most:
        raise ValueError(
            "the number of steps (num_inference_steps) must be at most "
            f"num_train_timesteps={most} (got {steps})"
        )


def _check_custom(scheduler: Sampler, name: str, values: np.ndarray) -> None:
    # The last two sigmas of a run that ends at sigma_min are equal up to rounding.
    least = 1e-5 * values[:-1] if name == "sigmas" else -1e-9
    rising = np.diff(values) > least
    if len(values) == 0 or rising.any() or values[-1] < 0:
        raise ValueError(f"{name} must be a descending list of numbers from 0 up (got {values})")
    scheduler._check_custom(name, values)


def check_highest(name: str, values: np.ndarray, highest: float) -> None:
    """Raises an error where descending custom values start above `highest`.

    Raises:
        ValueError: the first value is higher.
    """
    if values[0] > highest:
        raise ValueError(f"{name} must start at {highest} or below (got {values[0]:g})")


def _check_mu(scheduler: Sampler, mu: float | None) -> None:
    dynamic = getattr(scheduler, "use_dynamic_shifting", False)
    if mu is not None and not dynamic:
        raise ValueError(
            f"{scheduler.class_name} takes mu only with use_dynamic_shifting=True; leave it out"
        )
    if mu is None and dynamic and scheduler.needs_mu:
        raise ValueError(
            f"mu must be given to a {scheduler.class_name} with use_dynamic_shifting=True"
        )
    if mu is not None and not abs(mu) <= 100:
        raise ValueError(f"mu must be from -100 to 100 (got {mu:g})")


def _check_finite(scheduler: Sampler, schedule: Schedule) -> None:
    known = all(np.isfinite(row.prediction).all() for row in schedule.rows)
    if not known and scheduler.prediction_type == "epsilon":
        raise ValueError(
            "prediction_type='epsilon' says nothing of the sample at a timestep without signal "
            "(alpha-bar 0, as with rescale_betas_zero_snr=True or a high beta_end); use "
            "'v_prediction' or another timestep_spacing"
        )
    table = schedule.table()
    if all(np.isfinite(c).all() for c in (table.update, table.prediction, table.in_scale)):
        return
    raise ValueError(_no_step(scheduler))


def _no_step(scheduler: Sampler) -> str:
    return (
        f"{scheduler.class_name} has no finite step between two of this run's noise levels; use "
        "fewer steps, another timestep_spacing, lower_order_final=True, betas that leave some "
        "signal and some noise, or with shift_terminal more than one step"
    )


def checked_options(
    *,
    steps: Any = None,
    timesteps: Any = None,
    sigmas: Any = None,
    eta: Any = 0.0,
    original_inference_steps: Any = None,
    strength: Any = 1.0,
    mu: Any = None,
    use_clipped_model_output: Any = False,
) -> dict[str, Any]:
    """Returns arguments of `Scheduler.schedule` as those of `cached_schedule`.

    Raises:
        ValueError: one is not a number, or not numbers.
    """
    given = {"num_inference_steps": steps, "timesteps": timesteps, "sigmas": sigmas, "eta": eta}
    given |= {"strength": strength, "mu": mu}
    check_untraced(given | {"original_inference_steps": original_inference_steps}, _TRACED)
    counts = {
        "the number of steps (num_inference_steps)": steps,
        "original_inference_steps": original_inference_steps,
    }
    steps, original = (
        None if value is None else whole_number(name, value) for name, value in counts.items()
    )
    return {
        "steps": steps,
        "timesteps": None if timesteps is None else numbers("timesteps", timesteps),
        "sigmas": None if sigmas is None else numbers("sigmas", sigmas),
        "eta": number("eta", eta),
        "original_inference_steps": original,
        "strength": number("strength", strength),
        "mu": None if mu is None else number("mu", mu),
        "use_clipped_model_output": bool(use_clipped_model_output),
    }


_TRACED = (
    "the table of a run is computed from numbers before, and its arrays, which "
    "scheduler.functional and pipe.prepare_inputs return, may be changed in traced functions"
)


def whole_number(name: str, value: Any) -> int:
    """Returns an argument as an integer; raises ValueError if it is not one."""
    check_untraced({name: value}, _TRACED)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise ValueError(f"{name} must be a whole number (got {value!r})")
    return operator.index(value)


def number(name: str, value: Any) -> float:
    """Returns an argument as a finite number; raises ValueError if it is not one."""
    return numbers(name, [value])[0]


def numbers(name: str, values: Any) -> tuple[float, ...]:
    """Returns an argument as finite numbers; raises ValueError if it holds anything else."""
    try:
        array = np.asarray(values)
        if array.ndim != 1 or array.dtype.kind not in "iuf" or not np.isfinite(array).all():
            raise ValueError
    except (ValueError, TypeError):
        raise ValueError(f"{name} must be finite numbers (got {values!r})") from None
    return tuple(array.astype(float).tolist())
