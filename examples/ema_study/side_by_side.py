"""The averages that the study compares, all of one run.

An average does not change the training that it averages, so that one run gives any number of them.
"""

import dataclasses
import functools
from collections.abc import Mapping

import jax

from diffusax.models import Params
from diffusax.training import EMAConfig, EMAState, copy_as_average, update_ema

DECAYS = (0.9, 0.98)
SHARES = (0.035, 0.05, 0.1, 0.2)
"""Of the run's last steps that late averages are over."""
LENGTHS = (0.02, 0.05, 0.1, 0.15, 0.25)
"""Of the averages that are made after the run (sigma_rel)."""
MEANS = (0.1, 0.2)
"""Of the run's last steps that plain means are over, which are made after the run too."""


def averages_in_training() -> dict[str, EMAConfig]:
    """By their names in the results: from the first step on, and late ones."""
    found = {f"full-{decay:g}": EMAConfig(rule="constant", decay=decay) for decay in DECAYS}
    for share in SHARES:
        for decay in DECAYS:
            config = EMAConfig(rule="constant", decay=decay, start=1 - share)
            found[f"late-{share:g}-{decay:g}"] = config
    return found


class SideBySide:
    """Averages by name, each begun and updated as a run of its own would do it."""

    def __init__(self, configs: Mapping[str, EMAConfig], *, steps: int, images_per_step: int):
        """steps: of the run. The averages are updated after each step (ema.every=1)."""
        self.configs, self.images_per_step = configs, images_per_step
        self.starts = {name: config.start_step(steps) for name, config in configs.items()}
        self.states: dict[str, EMAState] = {}

    def begin(self, step: int, params: Params) -> None:
        """Copies the parameters after a step for the averages that begin there."""
        for name, start in self.starts.items():
            if start == step:
                self.states[name] = _copy(params, self.configs[name].averages)

    def update(self, params: Params) -> None:
        """Updates the averages that have begun, after one more step."""
        for name, state in self.states.items():
            # Where an average begins is nothing that its update needs, so one program is enough
            # for all of one decay.
            config = dataclasses.replace(self.configs[name], start=0)
            self.states[name] = _update(config, state, params, self.images_per_step)


_copy = jax.jit(copy_as_average, static_argnums=1)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=1)
def _update(config: EMAConfig, state: EMAState, params: Params, images_per_step: int) -> EMAState:
    return update_ema(config, state, params, images_per_update=images_per_step)
