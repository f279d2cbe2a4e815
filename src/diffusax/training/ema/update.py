"""Updates moving averages of the parameters, during a run or only at its end.

The average starts as a copy of the parameters after step `start` and costs neither time nor memory
before. From there on, after every `every` steps, with n the number of updates so far (from 1),

    average <- average + (1 - decay(n)) (parameters - average)

where decay(n) follows one of the rules of `EMAConfig.rule`. A run of diffusers' EMAModel with
update_after_step=u is the one with ema.start=u + 1: there, updates up to that step are copies.
The rule power keeps several averages, of which `diffusax.training.ema.posthoc` makes others.
"""

import dataclasses
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from diffusax.boundary.options import Count, Options, Share
from diffusax.models.network import Params
from diffusax.training.ema.posthoc import Length, power_gamma

Start = Annotated[int, Meta(ge=0, le=2**31 - 1)] | Share
"""A step, or a fraction of the run."""

# A smaller share of the starting weights than three half-lives leave is no cause for a warning.
_MUCH_LEFT = 1 / 8
_HALF_LIVES = 7


@dataclasses.dataclass(frozen=True)
class EMAConfig(Options):
    """Averaging of the parameters over the training steps."""

    group: ClassVar[str] = "ema."

    rule: Literal["none", "constant", "ramp", "warmup", "half_life", "power"] = "none"
    """The rule of the decay: none keeps no average; constant is ema.decay; ramp is
    (1 + n) / (10 + n), the default of diffusers' EMAModel; warmup is
    1 - (1 + n / ema.inv_gamma)^-ema.power, its use_ema_warmup; half_life follows
    ema.half_life_images; power is (1 - 1 / n)^(gamma + 1), an average for each of ema.lengths
    (Karras et al. 2024)."""
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
    start: Start = 0
    """When averaging begins: a whole number (700) is a step, a number with a point (0.7) the
    fraction of the run that is over by then. So 1 is the first step and 1.0 the end."""
    every: Count = 1
    """The number of steps from one update of the average to the next."""
    lengths: Annotated[tuple[Length, ...], Meta(min_length=1, max_length=4)] = (0.05, 0.1)
    """The averages of the rule power: the width of each (sigma_rel) as a share of the steps since
    ema.start. The first is the result; `diffusax ema` makes any other from them.
    """
    snapshot_every: Count = 1000
    """The number of steps from one time that the rule power's averages are stored to the next; they
    are also stored after the last step. All are kept."""
    snapshot_dtype: Literal["float32", "float16"] = "float32"
    """The dtype of the stored averages."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.min_decay > self.decay:
            raise ValueError(
                f"ema.min_decay={self.min_decay} must not be above ema.decay={self.decay}"
            )

    def start_step(self, total_steps: int) -> int | None:
        """Returns the step after which the average begins as a copy; None without an average."""
        if self.rule == "none":
            return None
        if isinstance(self.start, int):
            return self.start
        return round(self.start * total_steps)

    @property
    def averages(self) -> int:
        """The number of averages once averaging has begun."""
        return {"none": 0, "power": len(self.lengths)}.get(self.rule, 1)

    @property
    def kind(self) -> str:
        """The kind of average in words; averages of one kind can continue with other options."""
        if self.rule == "power":
            return f"averages of the lengths {', '.join(f'{x:g}' for x in self.lengths)}"
        return "" if self.rule == "none" else "an average of one length"


class EMAState(NamedTuple):
    """The averages, and the number of their updates."""

    averages: tuple[Params, ...]
    updates: jax.Array

    @property
    def params(self) -> Params:
        """The average that is the result."""
        return self.averages[0]


def copy_as_average(params: Params, averages: int = 1) -> EMAState:
    """Makes the first averages, which are copies of the parameters."""
    copies = (jax.tree.map(jnp.copy, params) for _ in range(averages))
    return EMAState(tuple(copies), jnp.int32(0))


def one_minus_decay(
    config: EMAConfig, updates: Any, images_per_update: int, average: int = 0
) -> jax.Array:
    """Returns 1 - decay(updates) in float32; computing the decay first would lose four digits.

    Upstream of ramp and warmup: diffusers training_utils.py, EMAModel.get_decay.

    average: the number of the average, where there are several.
    """
    n = jnp.asarray(updates, jnp.float32)
    if config.rule == "power":
        exponent = power_gamma(config.lengths[average]) + 1
        return -jnp.expm1(exponent * jnp.log1p(-1 / n))
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
    """Updates the averages once; parameters that are not float32 are averaged in float32."""
    updates = state.updates + 1

    def updated(index: int, average: Params) -> Params:
        rest = one_minus_decay(config, updates, images_per_update, index)
        return jax.tree.map(
            lambda a, p: (a + rest * (p.astype(jnp.float32) - a)).astype(a.dtype), average, params
        )

    averages = tuple(updated(i, average) for i, average in enumerate(state.averages))
    return EMAState(averages, updates)


def maybe_update_ema(
    config: EMAConfig,
    state: EMAState | None,
    params: Params,
    *,
    steps_since_start: jax.Array,
    images_per_step: int,
) -> EMAState | None:
    """Updates the averages in a training step; does nothing on steps between two updates."""
    if state is None:
        return None

    def update(ema: EMAState) -> EMAState:
        return update_ema(config, ema, params, images_per_update=images_per_step * config.every)

    if config.every == 1:
        return update(state)
    return jax.lax.cond(steps_since_start % config.every == 0, update, lambda ema: ema, state)


def share_left(config: EMAConfig, updates: int, images_per_update: int) -> float:
    """Returns the share of an average that is still its first copy: the product of the decays."""
    log, first, chunk = 0.0, 1, 2**20
    while first <= updates and log > -50:
        n = np.arange(first, min(first + chunk, updates + 1))
        rest = np.asarray(one_minus_decay(config, n, images_per_update), np.float64)
        with np.errstate(divide="ignore"):
            log += float(np.log1p(-np.broadcast_to(rest, n.shape)).sum())
        first += chunk
    return float(np.exp(log))


def short_window(config: EMAConfig, total_steps: int, images_per_step: int) -> str | None:
    """Returns a warning about an average that begins too late for its decay, or None.

    It begins too late where more than an eighth of it would still be the weights at its start, so
    that three half-lives of the decay do not fit. The decay that the warning suggests has a half-
    life of a seventh of the window, which leaves 1/128, as in mosaicml/diffusion's training of
    Stable Diffusion 2: a decay of 0.9999 over the last 50,000 of 1,400,000 steps.
    """
    start = config.start_step(total_steps)
    if start is None:
        return None
    window = total_steps - start
    updates = window // config.every
    share = share_left(config, updates, images_per_step * config.every)
    if share <= _MUCH_LEFT:
        return None
    rest = -np.expm1(-np.log(2) * _HALF_LIVES / max(updates, 1))
    fits = 1 - float(f"{rest:.2g}")
    return (
        f"averaging begins with {window} of {total_steps} steps left, and {share:.0%} of the "
        f"average will still be the weights at its start (ema.start={config.start}, "
        f"ema.rule={config.rule}); ema.rule=constant with ema.decay={fits:.10g} leaves 1%"
    )
