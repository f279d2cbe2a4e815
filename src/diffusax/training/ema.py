"""Exponential moving averages of the parameters, during a run or only at its end.

The average starts as a copy of the parameters after step `start` and costs neither time nor memory
before. From there on, after every `every` steps, with n the number of updates so far (from 1),

    average <- average + (1 - decay(n)) (parameters - average)

where decay(n) follows one of the rules of `EMAConfig.ema`. A run of diffusers' EMAModel with
update_after_step=u is the one with ema_start=u + 1: there, updates up to that step are copies.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.models.network import Params

RULES = ("none", "constant", "ramp", "warmup", "half_life")


@dataclasses.dataclass(frozen=True)
class EMAConfig:
    """Averaging of the parameters over the training steps."""

    ema: str = "none"
    """The decay's rule: none; constant (ema_decay); ramp ((1 + n) / (10 + n), the default of
    diffusers' EMAModel); warmup (1 - (1 + n / inv_gamma)^-power, its use_ema_warmup); half_life
    (ema_half_life_images)."""
    ema_decay: float = 0.9999
    """The decay of `constant`, and the most that ramp and warmup reach."""
    ema_min_decay: float = 0.0
    """The least decay of ramp and warmup."""
    ema_inv_gamma: float = 1.0
    """Of warmup."""
    ema_power: float = 2 / 3
    """Of warmup; 2/3 for runs of a million steps and more, 3/4 for shorter ones."""
    ema_half_life_images: float = 500_000.0
    """Of half_life: the images after which a contribution has halved (Karras et al. 2022)."""
    ema_start: float = 0.0
    """The step after which averaging begins (1 and more), or the fraction of the run (below 1)."""
    ema_every: int = 1
    """Steps from one update to the next."""

    def __post_init__(self) -> None:
        if self.ema not in RULES:
            raise ValueError(f"ema={self.ema!r} is not known; use {', '.join(RULES)}")
        if not 0 <= self.ema_min_decay <= self.ema_decay <= 1:
            raise ValueError(
                "ema_min_decay and ema_decay must be ordered and from 0 to 1 "
                f"(got {self.ema_min_decay} and {self.ema_decay})"
            )
        if self.ema_every < 1:
            raise ValueError(f"ema_every must be at least 1 (got {self.ema_every})")
        if self.ema_start < 0:
            raise ValueError(f"ema_start must not be negative (got {self.ema_start})")
        if self.ema_half_life_images <= 0 or self.ema_inv_gamma <= 0:
            raise ValueError("ema_half_life_images and ema_inv_gamma must be positive")

    def start_step(self, total_steps: int) -> int | None:
        """The step after which the average begins as a copy, or None where there is none."""
        if self.ema == "none":
            return None
        return round(self.ema_start * total_steps if self.ema_start < 1 else self.ema_start)


class EMAState(NamedTuple):
    """The average and how often it was updated."""

    params: Params
    updates: jax.Array


def copy_as_average(params: Params) -> EMAState:
    """The average as a copy of the parameters."""
    return EMAState(jax.tree.map(jnp.copy, params), jnp.int32(0))


def one_minus_decay(config: EMAConfig, updates: Any, images_per_update: int) -> jax.Array:
    """1 - decay(updates) in float32; as a difference it would lose the last four digits.

    Upstream of ramp and warmup: diffusers training_utils.py, EMAModel.get_decay.
    """
    n = jnp.asarray(updates, jnp.float32)
    if config.ema == "constant":
        return jnp.float32(1 - config.ema_decay)
    if config.ema == "half_life":
        return jnp.float32(1 - 2.0 ** (-images_per_update / config.ema_half_life_images))
    if config.ema == "ramp":
        rest = 9 / (10 + n)
    else:
        rest = (1 + n / config.ema_inv_gamma) ** -config.ema_power
    return jnp.clip(rest, 1 - config.ema_decay, 1 - config.ema_min_decay)


def update_ema(
    config: EMAConfig, state: EMAState, params: Params, *, images_per_update: int
) -> EMAState:
    """One update of the average; parameters that are not float32 are averaged in float32."""
    updates = state.updates + 1
    rest = one_minus_decay(config, updates, images_per_update)
    average = jax.tree.map(
        lambda a, p: (a + rest * (p.astype(jnp.float32) - a)).astype(a.dtype), state.params, params
    )
    return EMAState(average, updates)


def maybe_update_ema(
    config: EMAConfig,
    state: EMAState | None,
    params: Params,
    *,
    steps_since_start: jax.Array,
    images_per_step: int,
) -> EMAState | None:
    """The update of a training step, which does nothing on steps between two updates."""
    if state is None:
        return None

    def update(ema: EMAState) -> EMAState:
        return update_ema(config, ema, params, images_per_update=images_per_step * config.ema_every)

    if config.ema_every == 1:
        return update(state)
    return jax.lax.cond(steps_since_start % config.ema_every == 0, update, lambda ema: ema, state)
