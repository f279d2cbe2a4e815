"""Trains, and writes a model for each average of each run.

python examples/ema_study/train.py --schedules constant cosine --seeds 0 1 2

The folder `models` of a run gets the last parameters (none), the averages of side_by_side.py, and
those made after the run; `averages` what these are made of, for `diffusax ema` to make others. Runs
that have all their models are left out.
"""

import argparse
import dataclasses
import itertools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from side_by_side import LENGTHS, MEANS, SideBySide, averages_in_training

from diffusax.models import Params
from diffusax.training import (
    AVERAGES,
    Batch,
    Batches,
    EMAConfig,
    InstructPix2PixConfig,
    Recipe,
    TrainConfig,
    TrainState,
    initial_state,
    instruct_pix2pix,
    make_average,
    make_optimizer,
    make_train_step,
    read_config,
    remove_snapshots_after,
    to_yaml,
    write_snapshots,
)

Program = Callable[[TrainState, Params, Batch], tuple[TrainState, dict[str, jax.Array]]]

STORED = "power"
"""The averages of the run's own options, which are stored along the way."""
LAST = f"mean-{MEANS[-1]:g}"
"""The model that is written last."""


def compile_step(recipe: Recipe, config: TrainConfig) -> Program:
    """The training step without averages, compiled when it is first called."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    return jax.jit(make_train_step(recipe.loss, optimizer), donate_argnums=0)


def train(
    recipe: Recipe,
    config: TrainConfig,
    configs: Mapping[str, EMAConfig],
    *,
    program: Program | None = None,
    watch: Callable[[int, Params], None] = lambda step, params: None,
) -> tuple[TrainState, SideBySide]:
    """The run's end, and its averages.

    configs: of averages besides those of `config.ema`, by name. program: of an earlier run with
    these options. watch: sees the parameters after each step, from 0.
    """
    folder = Path(config.output)
    program = program or compile_step(recipe, config)
    optimizer = make_optimizer(config.optimizer, config.steps)
    averages = SideBySide(
        {**configs, STORED: config.ema}, steps=config.steps, images_per_step=config.batch_size
    )
    batches = Batches(recipe.source, recipe.example, batch_size=config.batch_size, seed=config.seed)
    frozen = recipe.frozen()
    state = initial_state(recipe.trained(), optimizer, config.seed)
    watch(0, state.params)
    log = _Log(folder / "metrics.jsonl", config)
    for step in range(1, config.steps + 1):
        averages.begin(step - 1, state.params)
        state, metrics = program(state, frozen, next(batches))
        averages.update(state.params)
        watch(step, state.params)
        log.add(step, metrics)
        if step % config.ema.snapshot_every == 0 or step == config.steps:
            _store(folder, step, averages, config, recipe.name)
    batches.close()
    return state, averages


def write_models(
    recipe: Recipe,
    config: TrainConfig,
    state: TrainState,
    averages: SideBySide,
    *,
    lengths: Sequence[float] = LENGTHS,
    shares: Sequence[float] = MEANS,
) -> None:
    """A folder for each average, which pipelines open.

    lengths, shares: of the averages that are made after the run.
    """
    models = Path(config.output) / "models"
    found = {name: s.params for name, s in averages.states.items() if name != STORED}
    for name, params in {"none": state.params, **found}.items():
        recipe.save(jax.tree.map(np.asarray, params), models / name)
    for length in lengths:
        make_average(recipe, config, models / f"posthoc-{length:g}", length=length)
    for share in shares:
        make_average(recipe, config, models / f"mean-{share:g}", start=1 - share)


class _Log:
    """Losses and the time of a step, as lines of JSON."""

    def __init__(self, path: Path, config: TrainConfig):
        self.path, self.config = path, config
        self.losses: list[Any] = []
        self.time = time.perf_counter()
        path.write_text("")

    def add(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Raises ValueError where a step was skipped: averages would have to skip it too."""
        self.losses.append(metrics["loss"])
        if step % self.config.log_every and step != self.config.steps:
            return
        if int(metrics["skipped"]):
            raise ValueError(f"a step before {step} was not finite; use a lower learning rate")
        seconds = (time.perf_counter() - self.time) / len(self.losses)
        loss = float(np.mean([float(loss) for loss in self.losses]))
        line = {"step": step, "loss": loss, "seconds_per_step": seconds}
        with self.path.open("a") as file:
            print(json.dumps(line), file=file)
        print(f"step {step}, loss {loss:.4f}, {seconds:.3f} s/step", flush=True)
        self.losses, self.time = [], time.perf_counter()


def _store(folder: Path, step: int, averages: SideBySide, config: TrainConfig, recipe: str) -> None:
    state, start = averages.states.get(STORED), averages.starts[STORED]
    if state is not None and start is not None:
        write_snapshots(folder / AVERAGES, step, state, config.ema, start=start, recipe=recipe)


def study(config: TrainConfig, recipe: Recipe, program: Program) -> None:
    """One run and its models, unless it has them."""
    folder = Path(config.output)
    if (folder / "models" / LAST / "model_index.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    remove_snapshots_after(folder / AVERAGES, 0)
    (folder / "config.yaml").write_text(to_yaml(config), "utf-8")
    start = time.perf_counter()
    state, averages = train(recipe, config, averages_in_training(), program=program)
    trained = time.perf_counter()
    write_models(recipe, config, state, averages)
    print(f"{folder}: {trained - start:.0f} s, writing {time.perf_counter() - trained:.0f} s")


def main() -> None:
    """Trains and writes."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("study.yaml"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--schedules", nargs="+", default=["constant", "cosine"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    args = parser.parse_args()
    config = read_config(InstructPix2PixConfig, args.config, args.set)
    recipe = instruct_pix2pix(config)
    programs: dict[str, Program] = {}
    for seed, schedule in itertools.product(args.seeds, args.schedules):
        optimizer = dataclasses.replace(config.optimizer, schedule=schedule)
        output = str(Path(config.output) / f"{schedule}-{seed}")
        run = dataclasses.replace(config, optimizer=optimizer, seed=seed, output=output)
        programs.setdefault(schedule, compile_step(recipe, run))
        study(run, recipe, programs[schedule])


if __name__ == "__main__":
    main()
