"""A run that has nothing left to do: its result stays as it is."""

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from diffusax.models.network import Params
from diffusax.runtime.mesh import to_host
from diffusax.training.config import TrainConfig
from diffusax.training.options import read_config
from diffusax.training.recipe import Recipe
from diffusax.training.results.export import export, push_to_hub, result_folders
from diffusax.training.step import TrainState

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
"""The file in a run's folder with its options."""


def leave_finished(recipe: Recipe, config: TrainConfig, step: int, state: TrainState) -> TrainState:
    """Says that the run has done its steps, and hands its state back.

    Nothing in its folder changes, but for a result that is missing: that is written, with the
    options that the run had.

    Args:
        recipe: of the run.
        config: that it was started with again.
        step: that it has reached.
        state: at that step.
    """
    folders = result_folders(config, averaged=state.ema is not None)
    # A card is the last that is written of each.
    missing = _agreed(not all((folder / "README.md").is_file() for folder in folders))
    done = "; its result was missing and is written now" if missing else ", and stays as it is"
    log.info("the run in %s is finished at step %d%s", config.output, step, done)
    if missing:
        export(recipe, _own_options(config), steps=step, **results(state))
    elif config.push_to_hub and jax.process_index() == 0:
        push_to_hub(folders[-1], config.push_to_hub)
    return state


def results(state: TrainState) -> dict[str, Params | None]:
    """The parameters and their average, on the host; all processes must call it."""
    ema = None if state.ema is None else to_host(state.ema.params)
    return {"params": to_host(state.params), "ema": ema}


def _own_options(config: TrainConfig) -> TrainConfig:
    """The options in the run's folder; those given where they cannot be read."""
    try:
        own = read_config(type(config), Path(config.output) / CONFIG)
    except ValueError:
        return config
    return dataclasses.replace(own, output=config.output, push_to_hub=config.push_to_hub)


def _agreed(value: bool) -> bool:
    """What the first process says."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))
