"""Tables and plots of what evaluate.py measured.

python examples/ema_study/report.py [--plots docs]
"""

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

MEASURES = {"loss": "validation loss", "right": "right", "kept": "kept error", "error": "error"}
SCHEDULES = {"constant": "constant learning rate", "cosine": "cosine learning rate"}
T_95 = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57}
"""Student's t, by degrees of freedom: 95% of a mean lie within so many standard errors."""

Row = dict[str, Any]


class Spread(NamedTuple):
    """A mean over seeds, with how far the values or the mean itself may be off."""

    mean: float
    deviation: float
    """The standard deviation over the seeds."""
    interval: float
    """Half the width of the mean's 95% confidence interval."""

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of one value for each seed."""
        if len(values) < 2:
            return cls(*(values or (float("nan"),)), float("nan"), float("nan"))
        deviation = float(np.std(values, ddof=1))
        t = T_95.get(len(values) - 1, 2.0)
        interval = float(t * deviation / np.sqrt(len(values)))
        return cls(float(np.mean(values)), deviation, interval)


class Results:
    """Lines of evaluate.py."""

    def __init__(self, path: Path):
        """path: of the lines."""
        merged: dict[Any, Row] = {}
        for line in path.read_text().splitlines():
            row = json.loads(line)
            merged.setdefault((row["schedule"], row["seed"], row["average"]), {}).update(row)
        self.rows = list(merged.values())
        self.start = next((row for row in self.rows if row["average"] == "start"), None)

    def values(self, schedule: str, average: str, measure: str) -> dict[int, float]:
        """By seed."""
        return {
            row["seed"]: row[measure]
            for row in self.rows
            if (row["schedule"], row["average"]) == (schedule, average) and measure in row
        }

    def averages(self, schedule: str) -> list[str]:
        """Names, in an order for reading."""
        names = {row["average"] for row in self.rows if row["schedule"] == schedule}
        return sorted(names, key=_order)

    def spread(self, schedule: str, average: str, measure: str) -> Spread:
        """Over seeds."""
        return Spread.of(list(self.values(schedule, average, measure).values()))

    def gain(self, schedule: str, average: str, measure: str, other: str = "none") -> Spread:
        """The difference to another average of the same runs, over seeds."""
        values = self.values(schedule, average, measure)
        others = self.values(schedule, other, measure)
        return Spread.of([values[seed] - others[seed] for seed in values if seed in others])


def title(average: str) -> str:
    """An average's name for readers."""
    kind, *numbers = average.split("-")
    if kind in ("late", "mean"):
        share = f"last {100 * float(numbers[0]):g}%"
        return f"{share}, decay {numbers[1]}" if kind == "late" else f"{share}, plain mean"
    if kind == "full":
        return f"all steps, decay {numbers[0]}"
    return f"post-hoc, length {numbers[0]}" if kind == "posthoc" else average


def table(results: Results, schedule: str) -> list[str]:
    """Rows of Markdown: means and standard deviations over seeds."""
    lines = ["| average | validation loss | right | kept error | error |", "|---|---|---|---|---|"]
    for average in results.averages(schedule):
        cells = [_cell(results.spread(schedule, average, name), name) for name in MEASURES]
        lines.append(f"| {title(average)} | {' | '.join(cells)} |")
    return lines


def table_of_gains(results: Results, schedule: str) -> list[str]:
    """Rows of Markdown: differences to no average, with their 95% confidence intervals."""
    lines = ["| average | validation loss | right | kept error | error |", "|---|---|---|---|---|"]
    for average in results.averages(schedule):
        if average != "none":
            gains = [(results.gain(schedule, average, name), name) for name in MEASURES]
            cells = [_gain_cell(gain, name) for gain, name in gains]
            lines.append(f"| {title(average)} | {' | '.join(cells)} |")
    return lines


def table_of_kinds(results: Results, averages: Sequence[str]) -> list[str]:
    """Rows of Markdown: how many edits of each kind are right, over all seeds."""
    measured = [row for row in results.rows if "rights" in row]
    kinds = list(measured[0]["rights"])
    lines = [f"| schedule | average | {' | '.join(kinds)} |", "|---" * (len(kinds) + 2) + "|"]
    for schedule in SCHEDULES:
        for average in averages:
            rows = [r for r in measured if (r["schedule"], r["average"]) == (schedule, average)]
            if not rows:
                continue
            means = [np.mean([row["rights"][kind] for row in rows]) for kind in kinds]
            cells = " | ".join(f"{mean:.1f}" for mean in means)
            lines.append(f"| {schedule} | {title(average)} | {cells} |")
    return lines


def plot_averages(results: Results, path: Path) -> None:
    """Differences to no average, with their intervals, for both schedules."""
    import matplotlib.pyplot as plt

    names = [n for n in results.averages("constant") if n != "none"]
    figure, axes = plt.subplots(1, 3, figsize=(11, 5), sharey=True)
    for axis, name in zip(axes, ("loss", "right", "kept")):
        for offset, (schedule, label) in zip((-0.15, 0.15), SCHEDULES.items()):
            gains = [results.gain(schedule, average, name) for average in names]
            axis.errorbar(
                [gain.mean for gain in gains],
                np.arange(len(names)) + offset,
                xerr=[gain.interval for gain in gains],
                fmt="o",
                markersize=4,
                capsize=2,
                label=label,
            )
        axis.axvline(0, color="gray", linewidth=0.8)
        axis.set_xlabel(f"{MEASURES[name]}: difference to no average")
    axes[0].set_yticks(range(len(names)), [title(name) for name in names])
    axes[0].invert_yaxis()
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncols=2)
    figure.savefig(path, dpi=90)


def plot_lengths(results: Results, path: Path) -> None:
    """Measures over the length of averages that were made after the runs."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4))
    for axis, name in zip(axes, ("loss", "right", "kept")):
        for schedule, label in SCHEDULES.items():
            names = [n for n in results.averages(schedule) if n.startswith(("none", "posthoc"))]
            names = [n for n in names if results.values(schedule, n, name)]
            spreads = [results.spread(schedule, n, name) for n in names]
            axis.errorbar(
                [float(n.removeprefix("posthoc-").replace("none", "0")) for n in names],
                [spread.mean for spread in spreads],
                yerr=[spread.deviation for spread in spreads],
                fmt="o-",
                markersize=4,
                capsize=2,
                label=label,
            )
        low, high = axis.get_ylim()
        # Far away it would leave no room for what is compared.
        if results.start is not None and low - (high - low) < results.start[name] < 2 * high - low:
            axis.axhline(results.start[name], color="gray", linestyle=":", label="before")
        axis.set_xlabel("length of the average (0: none)")
        axis.set_ylabel(MEASURES[name])
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _order(average: str) -> tuple[Any, ...]:
    kind, *numbers = average.split("-")
    kinds = ("none", "full", "late", "mean", "posthoc", "start")
    return (kinds.index(kind), *(float(number) for number in reversed(numbers)))


def _cell(spread: Spread, measure: str) -> str:
    if np.isnan(spread.mean):
        return ""
    if measure == "right":
        return f"{spread.mean:.1%} ± {100 * spread.deviation:.1f}"
    return f"{spread.mean:.4f} ± {spread.deviation:.4f}"


def _gain_cell(gain: Spread, measure: str) -> str:
    """In bold where the interval leaves 0 out."""
    if np.isnan(gain.mean):
        return ""
    if measure == "right":
        text = f"{100 * gain.mean:+.1f} ± {100 * gain.interval:.1f}"
    else:
        text = f"{gain.mean:+.4f} ± {gain.interval:.4f}"
    return f"**{text}**" if abs(gain.mean) > gain.interval else text


def main() -> None:
    """Prints the tables and draws the plots."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, default=Path(__file__).with_name("results.jsonl"))
    parser.add_argument("--plots", type=Path, help="the folder to draw to")
    parser.add_argument("--prefix", default="ema_study", help="what the plots' names begin with")
    args = parser.parse_args()
    results = Results(args.results)
    tables: dict[str, Callable[[Results, str], list[str]]] = {
        "means and standard deviations over seeds": table,
        "differences to no average, with 95% confidence intervals": table_of_gains,
    }
    for schedule, label in SCHEDULES.items():
        for what, make in tables.items():
            print(f"\n{label}: {what}\n", *make(results, schedule), sep="\n")
    best = ("none", "full-0.98", "late-0.2-0.98", "posthoc-0.1")
    print("\nright, of each kind\n", *table_of_kinds(results, best), sep="\n")
    if args.plots:
        plot_averages(results, args.plots / f"{args.prefix}_averages.png")
        plot_lengths(results, args.plots / f"{args.prefix}_lengths.png")


if __name__ == "__main__":
    main()
