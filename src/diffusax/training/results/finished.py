"""Handles a run that is at its last step already: its result does not change."""

import dataclasses
import logging
from pathlib import Path

import jax
import numpy as np
from jax.experimental import multihost_utils

from diffusax.models.network import Params
from diffusax.runtime.devices.mesh import to_host
from diffusax.training.config import TrainConfig
from diffusax.training.options import read_config
from diffusax.training.recipe import Recipe
from diffusax.training.results.export import export, push_to_hub, result_folders
from diffusax.training.step import TrainState

log = logging.getLogger(__name__)

CONFIG = "config.yaml"
"""The name of the file with a run's options in its folder."""


def leave_finished(recipe: Recipe, config: TrainConfig, step: int, state: TrainState) -> TrainState:
    """Logs that the run has done its steps, and returns its state.

    Nothing in its folder changes, except that a missing result is written, with the options that
    the run had.

    Args:
        recipe: the recipe of the run.
        config: the options of this start.
        step: the step that the run has reached.
        state: the state at that step.
    """
    folders = result_folders(config, averaged=state.ema is not None)
    # The card of each is written last.
    missing = _agreed(not all((folder / "README.md").is_file() for folder in folders))
    done = "; its result was missing and is written now" if missing else ", and stays as it is"
    log.info("the run in %s is finished at step %d%s", config.output, step, done)
    if missing:
        export(recipe, _own_options(config), steps=step, **results(state))
    elif config.push_to_hub and jax.process_index() == 0:
        push_to_hub(folders[-1], config.push_to_hub)
    return state


def results(state: TrainState) -> dict[str, Params | None]:
    """Returns the parameters and their average on the host; all processes must call it."""
    ema = None if state.ema is None else to_host(state.ema.params)
    return {"params": to_host(state.params), "ema": ema}


def _own_options(config: TrainConfig) -> TrainConfig:
    """Reads the options in the run's folder; returns the given ones where they cannot be read."""
    try:
        own = read_config(type(config), Path(config.output) / CONFIG)
    except ValueError:
        return config
    return dataclasses.replace(own, output=config.output, push_to_hub=config.push_to_hub)


def _agreed(value: bool) -> bool:
    """Returns the first process's value."""
    if jax.process_count() == 1:
        return value
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))
