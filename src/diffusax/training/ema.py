"""Exponential moving averages of the parameters, during a run or only at its end.

The average starts as a copy of the parameters after step `start` and costs neither time nor memory
before. From there on, after every `every` steps, with n the number of updates so far (from 1),

    average <- average + (1 - decay(n)) (parameters - average)

where decay(n) follows one of the rules of `EMAConfig.rule`. A run of diffusers' EMAModel with
update_after_step=u is the one with ema.start=u + 1: there, updates up to that step are copies.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from msgspec import Meta

from diffusax.models.network import Params
from diffusax.options import Count, Options, Share


@dataclasses.dataclass(frozen=True)
class EMAConfig(Options):
    """Averaging of the parameters over the training steps."""

    group: ClassVar[str] = "ema."

    rule: Literal["none", "constant", "ramp", "warmup", "half_life"] = "none"
    """The rule of the decay: none keeps no average; constant is ema.decay; ramp is
    (1 + n) / (10 + n), the default of diffusers' EMAModel; warmup is
    1 - (1 + n / ema.inv_gamma)^-ema.power, its use_ema_warmup; half_life follows
    ema.half_life_images."""
    decay: Share = 0.9999
    """The decay of the rule constant, and the most that ramp and warmup reach."""
    min_decay: Share = 0.0
    """The least decay of the rules ramp and warmup."""
    inv_gamma: Annotated[float, Meta(gt=0, le=1e9)] = 1.0
    """How slowly the rule warmup begins: a larger value is slower."""
    power: Annotated[float, Meta(gt=0, le=100)] = 2 / 3
    """The exponent of the rule warmup: 2/3 suits runs of a million steps and more, 3/4 shorter
    ones."""
    half_life_images: Annotated[float, Meta(gt=0, le=1e15)] = 500_000.0
    """The number of images after which a contribution has halved, for the rule half_life (Karras et
    al. 2022)."""
    start: Annotated[int, Meta(ge=0, le=2**31 - 1)] | Share = 0
    """When averaging begins: a whole number (700) is a step, a number with a point (0.7) the
    fraction of the run that is over by then. So 1 is the first step and 1.0 the end."""
    every: Count = 1
    """The number of steps from one update of the average to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_decay > self.decay:
            raise ValueError(
                f"ema.min_decay={self.min_decay} must not be above ema.decay={self.decay}"
            )

    def start_step(self, total_steps: int) -> int | None:
        """The step after which the average begins as a copy, or None where there is none."""
        if self.rule == "none":
            return None
        if isinstance(self.start, int):
            return self.start
        return round(self.start * total_steps)


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
    if config.rule == "constant":
        return jnp.float32(1 - config.decay)
    if config.rule == "half_life":
        return jnp.float32(1 - 2.0 ** (-images_per_update / config.half_life_images))
    if config.rule == "ramp":
        rest = 9 / (10 + n)
    else:
        rest = (1 + n / config.inv_gamma) ** -config.power
    return jnp.clip(rest, 1 - config.decay, 1 - config.min_decay)


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
        return update_ema(config, ema, params, images_per_update=images_per_step * config.every)

    if config.every == 1:
        return update(state)
    return jax.lax.cond(steps_since_start % config.every == 0, update, lambda ema: ema, state)
