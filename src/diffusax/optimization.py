"""Learning rates over the steps of a training, under the names of `diffusers.optimization`.

Each function returns a schedule as optax takes it, `optax.adamw(get_scheduler("cosine", 1e-4,
...))`, which loops of one's own also step as PyTorch's: `step()` and `get_last_lr()`.
"""

import enum
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Factor = Callable[[Any], Any]
"""The factor of the learning rate at a step, counted from 0."""


class SchedulerType(enum.Enum):
    """The names of the schedules."""

    LINEAR = "linear"
    COSINE = "cosine"
    COSINE_WITH_RESTARTS = "cosine_with_restarts"
    POLYNOMIAL = "polynomial"
    CONSTANT = "constant"
    CONSTANT_WITH_WARMUP = "constant_with_warmup"
    PIECEWISE_CONSTANT = "piecewise_constant"


class LearningRate:
    """A learning rate by step: a schedule of optax, and a counter for loops of one's own."""

    def __init__(self, rate: float, factor: Factor, last_epoch: int = -1):
        """Begins before the first step.

        Args:
            rate: the learning rate of which each step has a share.
            factor: the share at a step.
            last_epoch: the last step that was taken before, or -1.
        """
        self.base_lrs, self.factor = [rate], factor
        self.last_epoch = last_epoch + 1

    def __call__(self, count: Any) -> jax.Array:
        """Returns the learning rate at a step, counted from 0; traced steps too."""
        return self.base_lrs[0] * jnp.asarray(self.factor(jnp.asarray(count, jnp.float32)))

    def step(self) -> None:
        """Goes on to the next step."""
        self.last_epoch += 1

    def get_last_lr(self) -> list[float]:
        """Returns the learning rate of the present step, in a list."""
        return [float(self(self.last_epoch))]

    def state_dict(self) -> dict[str, Any]:
        """Returns the step."""
        return {"last_epoch": self.last_epoch, "base_lrs": list(self.base_lrs)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Goes on at the step of a `state_dict`."""
        self.last_epoch = int(state_dict["last_epoch"])


def get_constant_schedule(optimizer: Any, last_epoch: int = -1) -> LearningRate:
    """Returns a learning rate that stays; arguments as of `get_scheduler`."""
    return LearningRate(_rate(optimizer), jnp.ones_like, last_epoch)


def get_constant_schedule_with_warmup(
    optimizer: Any, num_warmup_steps: int, last_epoch: int = -1
) -> LearningRate:
    """Returns a learning rate that rises from 0 and stays; arguments as of `get_scheduler`."""
    factor = _warmed(num_warmup_steps, jnp.ones_like)
    return LearningRate(_rate(optimizer), factor, last_epoch)


def get_piecewise_constant_schedule(
    optimizer: Any, step_rules: str, last_epoch: int = -1
) -> LearningRate:
    """Returns a learning rate of several levels; arguments as of `get_scheduler`.

    Raises:
        ValueError: the rules are not factors with their last steps, and one factor.
    """
    try:
        *rules, last = step_rules.split(",")
        parts = [(float(f), int(end)) for f, end in (rule.split(":") for rule in rules)]
        rest = float(last)
    except (AttributeError, ValueError):
        raise ValueError(
            "step_rules must be factors with the steps that they end at, and a last factor, such "
            f"as '1:10,0.1:20,0.01' (got {step_rules!r})"
        ) from None

    def factor(step: Any) -> Any:
        value: Any = jnp.full_like(step, rest)
        for share, end in sorted(parts, key=lambda part: -part[1]):
            value = jnp.where(step < end, share, value)
        return value

    return LearningRate(_rate(optimizer), factor, last_epoch)


def get_linear_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    last_epoch: int = -1,
    f_min: float = 0.0,
    f_max: float = 1.0,
) -> LearningRate:
    """Returns a learning rate that rises from 0, then falls linearly.

    Arguments as of `get_scheduler`. f_min, f_max: the shares at the last step and after warm-up.
    """
    rest = _progress(num_warmup_steps, num_training_steps)

    def factor(step: Any) -> Any:
        return f_min + (f_max - f_min) * jnp.maximum(0.0, 1 - rest(step))

    whole = _warmed(num_warmup_steps, factor, f_max)
    return LearningRate(_rate(optimizer), whole, last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
) -> LearningRate:
    """Returns a learning rate that rises from 0, then follows a cosine.

    Arguments as of `get_scheduler`. num_cycles: the number of waves; a half goes down to 0.
    """
    rest = _progress(num_warmup_steps, num_training_steps)

    def factor(step: Any) -> Any:
        return jnp.maximum(0.0, 0.5 * (1 + jnp.cos(2 * math.pi * num_cycles * rest(step))))

    return LearningRate(_rate(optimizer), _warmed(num_warmup_steps, factor), last_epoch)


def get_cosine_with_hard_restarts_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    num_cycles: int = 1,
    last_epoch: int = -1,
) -> LearningRate:
    """Returns a learning rate that rises from 0, then falls along a cosine several times.

    Arguments as of `get_scheduler`.
    """
    rest = _progress(num_warmup_steps, num_training_steps)

    def factor(step: Any) -> Any:
        done = rest(step)
        wave = 0.5 * (1 + jnp.cos(math.pi * ((num_cycles * done) % 1.0)))
        return jnp.where(done >= 1, 0.0, jnp.maximum(0.0, wave))

    return LearningRate(_rate(optimizer), _warmed(num_warmup_steps, factor), last_epoch)


def get_polynomial_decay_schedule_with_warmup(
    optimizer: Any,
    num_warmup_steps: int,
    num_training_steps: int,
    lr_end: float = 1e-7,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LearningRate:
    """Returns a learning rate that rises from 0, then falls to `lr_end` as a power of what is left.

    Arguments as of `get_scheduler`.

    Raises:
        ValueError: lr_end is not below the learning rate.
    """
    rate, rest = _rate(optimizer), _progress(num_warmup_steps, num_training_steps)
    if not rate > lr_end:
        raise ValueError(f"lr_end must be below the learning rate {rate} (got {lr_end})")

    def factor(step: Any) -> Any:
        left = jnp.clip(1 - rest(step), 0.0, 1.0)
        return ((rate - lr_end) * left**power + lr_end) / rate

    return LearningRate(rate, _warmed(num_warmup_steps, factor), last_epoch)


def get_scheduler(
    name: str | SchedulerType,
    optimizer: Any,
    step_rules: str | None = None,
    num_warmup_steps: int | None = None,
    num_training_steps: int | None = None,
    num_cycles: int = 1,
    power: float = 1.0,
    last_epoch: int = -1,
) -> LearningRate:
    """Returns a learning rate by the name of its schedule, as diffusers' function of this name.

    Args:
        name: constant, constant_with_warmup, linear, cosine, cosine_with_restarts, polynomial or
            piecewise_constant.
        optimizer: the learning rate, a number, for which PyTorch's function takes an optimizer. One
            of PyTorch's is taken, too, for the learning rate of its first group.
        step_rules: for piecewise_constant: factors with the steps that they end at, and a last
            factor, such as "1:10,0.1:20,0.01".
        num_warmup_steps: the number of steps over which the learning rate rises from 0.
        num_training_steps: the number of all steps.
        num_cycles: for cosine_with_restarts: how often it falls.
        power: for polynomial: the exponent.
        last_epoch: the last step that was taken before, for loops that go on.

    Raises:
        ValueError: the name is unknown, or the schedule lacks an argument.
    """
    try:
        kind = SchedulerType(name)
    except ValueError:
        names = ", ".join(one.value for one in SchedulerType)
        raise ValueError(f"name must be one of {names} (got {name!r})") from None
    if kind is SchedulerType.CONSTANT:
        return get_constant_schedule(optimizer, last_epoch)
    if kind is SchedulerType.PIECEWISE_CONSTANT:
        return get_piecewise_constant_schedule(optimizer, str(step_rules), last_epoch)
    warmup: Any = _given("num_warmup_steps", num_warmup_steps, kind)
    if kind is SchedulerType.CONSTANT_WITH_WARMUP:
        return get_constant_schedule_with_warmup(optimizer, warmup, last_epoch)
    steps: Any = _given("num_training_steps", num_training_steps, kind)
    common: dict[str, Any] = {"last_epoch": last_epoch}
    match kind:
        case SchedulerType.LINEAR:
            return get_linear_schedule_with_warmup(optimizer, warmup, steps, **common)
        case SchedulerType.COSINE:
            return get_cosine_schedule_with_warmup(optimizer, warmup, steps, **common)
        case SchedulerType.POLYNOMIAL:
            decay = get_polynomial_decay_schedule_with_warmup
            return decay(optimizer, warmup, steps, power=power, **common)
    restarts = get_cosine_with_hard_restarts_schedule_with_warmup
    return restarts(optimizer, warmup, steps, num_cycles=num_cycles, **common)


def _given(name: str, value: int | None, kind: SchedulerType) -> int:
    if value is None:
        raise ValueError(f"{name} must be given for the schedule {kind.value}")
    return value


def _rate(optimizer: Any) -> float:
    """Returns the learning rate.

    Raises:
        ValueError: it is neither a number nor an optimizer of PyTorch.
    """
    groups = getattr(optimizer, "param_groups", None)
    value = groups[0].get("initial_lr", groups[0]["lr"]) if groups else optimizer
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            "optimizer must be the learning rate, a number: optax's optimizers take the schedule "
            f"that this returns (got {type(optimizer).__name__})"
        )
    return float(value)


def _progress(warmup: int, total: int) -> Factor:
    """Returns a function of the step: the share of the steps after warm-up that are over."""
    return lambda step: (step - warmup) / max(1, total - warmup)


def _warmed(warmup: int, factor: Factor, most: float = 1.0) -> Factor:
    """Returns a factor that rises from 0 to `most` over the first steps."""
    return lambda step: jnp.where(step < warmup, most * step / max(1, warmup), factor(step))
