"""What a step costs with averages and without: time, and bytes of its state.

python examples/ema_study/cost.py [--repeats 15]

The training step of study.yaml, as `diffusax train` compiles it, on one batch, in turns.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from diffusax.training import (
    Batches,
    EMAConfig,
    InstructPix2PixConfig,
    copy_as_average,
    initial_state,
    instruct_pix2pix,
    make_optimizer,
    make_train_step,
    read_config,
)

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from machine import describe, interleaved_medians

CASES = {
    "none": EMAConfig(),
    "one average": EMAConfig(rule="constant"),
    "power, two averages": EMAConfig(rule="power"),
}


def prepare(
    recipe: Any, config: InstructPix2PixConfig, batch: Any, ema: EMAConfig
) -> tuple[Callable[[], None], int]:
    """A function that trains for a step, and the bytes of the state."""
    optimizer = make_optimizer(config.optimizer, config.steps)
    program = jax.jit(make_train_step(recipe.loss, optimizer, ema=ema), donate_argnums=0)
    frozen, state = recipe.frozen(), initial_state(recipe.trained(), optimizer, config.seed)
    if ema.averages:
        state = state._replace(ema=copy_as_average(state.params, ema.averages))

    def run() -> None:
        nonlocal state
        state, _ = program(state, frozen, batch)
        jax.block_until_ready(state)

    return run, sum(leaf.nbytes for leaf in jax.tree.leaves(state))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_name("study.yaml"))
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()
    print(describe())
    config = dataclasses.replace(
        read_config(InstructPix2PixConfig, args.config), ema=EMAConfig(), output="out/cost"
    )
    recipe: Any = instruct_pix2pix(config)
    batches = Batches(recipe.source, recipe.example, batch_size=config.batch_size, seed=0)
    batch = jax.device_put(next(batches))
    batches.close()
    prepared = {name: prepare(recipe, config, batch, ema) for name, ema in CASES.items()}
    medians = interleaved_medians({k: run for k, (run, _) in prepared.items()}, args.repeats)
    print("| average | ms per step | difference | MiB of state |")
    print("|---|---|---|---|")
    for name, (_, size) in prepared.items():
        more = medians[name] / medians["none"] - 1
        print(f"| {name} | {medians[name] * 1e3:.0f} | {more:+.1%} | {size / 2**20:.1f} |")


if __name__ == "__main__":
    main()
