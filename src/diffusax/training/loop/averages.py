"""Makes other averages of a run's parameters from those that it stored."""

from collections.abc import Sequence
from pathlib import Path

from diffusax.training.config import TrainConfig
from diffusax.training.ema.posthoc import (
    MAX_ERROR,
    LateAverage,
    PowerFunction,
    Stored,
    Wanted,
    solve,
)
from diffusax.training.ema.snapshots import AVERAGES, Snapshot, combine, read_snapshots
from diffusax.training.loop.export import write_model_card
from diffusax.training.recipes.recipe import Recipe


def make_average(
    recipe: Recipe,
    config: TrainConfig,
    folder: Path,
    *,
    length: float | None = None,
    start: int | float | None = None,
    decay: float | None = None,
    step: int | None = None,
) -> float:
    """Writes the model with another average of the parameters of the run in config.output.

    Give either `length` or `start`.

    Args:
        recipe: the recipe of the run.
        config: the options of the run.
        folder: the folder to write to.
        length: the sigma_rel of a power-function average.
        start: where a late average starts: the step, or a fraction of the steps up to its end.
        decay: the decay of the late average's weights into the past, by update; by default all
            weights are equal.
        step: the last step of the average, at which the run stored its averages; by default the
            last of those.

    Returns:
        The error of the profile, see `diffusax.training.ema.posthoc.Sum`.

    Raises:
        ValueError: the run stored no averages, or none at this step; or the error of the average
            would be more than a tenth.
    """
    snapshots = read_snapshots(Path(config.output) / AVERAGES)
    step = _last_step(snapshots, step)
    snapshots = [snapshot for snapshot in snapshots if snapshot.step <= step]
    last = snapshots[-1]
    wanted: Wanted
    if length is not None:
        wanted, what = PowerFunction(length), f"length {length:g}"
    elif start is not None:
        wanted, what = _late(last, start, decay), f"late from {start:g}"
    else:
        raise ValueError("either length or start must be given")
    stored = [Stored(snapshot.length, snapshot.updates) for snapshot in snapshots]
    weights, error = solve(stored, wanted, last.updates)
    if error > MAX_ERROR:
        raise ValueError(
            f"the average ({what}, up to step {step}) cannot be made of those stored: the nearest "
            f"differs by {error:.0%}, and {MAX_ERROR:.0%} is the most; start it at one of the "
            f"steps {_steps(snapshots)}, or train with a smaller ema.snapshot_every"
        )
    recipe.save(combine(snapshots, weights, recipe.shapes()), folder)
    write_model_card(folder, recipe, config, steps=step, average=f"{what}, made after the run")
    return error


def _last_step(snapshots: Sequence[Snapshot], step: int | None) -> int:
    if step is None:
        return snapshots[-1].step
    if all(snapshot.step != step for snapshot in snapshots):
        raise ValueError(f"step={step} has no stored averages; use one of {_steps(snapshots)}")
    return step


def _late(last: Snapshot, start: int | float, decay: float | None) -> LateAverage:
    """Returns the late average in updates; steps that were skipped are spread evenly."""
    step = start if isinstance(start, int) else round(start * last.step)
    if not last.start <= step < last.step:
        raise ValueError(
            f"start={start} must be from {last.start}, where averaging began, to before "
            f"{last.step}, where it ends; a whole number is a step, a number with a point a "
            "fraction"
        )
    share = (step - last.start) / (last.step - last.start)
    return LateAverage(min(round(share * last.updates), last.updates - 1), decay)


def _steps(snapshots: Sequence[Snapshot]) -> str:
    """Lists the steps of snapshots, or the last few of them, as text."""
    steps = sorted({snapshot.step for snapshot in snapshots})
    few = ", ".join(map(str, steps[-10:]))
    return few if len(steps) <= 10 else f"..., {few}"
