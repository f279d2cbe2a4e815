"""Optimizers and learning-rate schedules, from optax."""

import dataclasses
import math
from typing import Any

import jax
import optax
from optax.contrib import MuonDimensionNumbers, muon

from diffusax.models.network import Params

OPTIMIZERS = ("adamw", "adafactor", "lion", "muon")
SCHEDULES = ("constant", "cosine", "linear")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates."""

    optimizer: str = "adamw"
    """adamw, adafactor, lion, or muon (for kernels; for all else adamw with Nesterov momentum)."""
    lr: float = 1e-4
    """The learning rate after warm-up."""
    lr_schedule: str = "constant"
    """After warm-up: constant, or cosine or linear down to lr_end at the last step."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises linearly from 0."""
    lr_end: float = 0.0
    """The last learning rate of cosine and linear."""
    beta1: float = 0.9
    """Of adamw, lion and the adamw in muon."""
    beta2: float = 0.999
    """Of adamw, lion (0.99 is usual) and the adamw in muon."""
    adam_epsilon: float = 1e-8
    """Of adamw."""
    weight_decay: float = 1e-2
    """Decoupled, times the learning rate."""
    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm; inf leaves them as they are."""

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise ValueError(
                f"optimizer={self.optimizer!r} is not known; use {', '.join(OPTIMIZERS)}"
            )
        if self.lr_schedule not in SCHEDULES:
            raise ValueError(
                f"lr_schedule={self.lr_schedule!r} is not known; use {', '.join(SCHEDULES)}"
            )
        if self.max_grad_norm <= 0:
            raise ValueError(f"max_grad_norm must be positive (got {self.max_grad_norm})")


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """The learning rate of each step, from 0."""
    warmup = config.lr_warmup_steps
    rest = max(total_steps - warmup, 1)
    if config.lr_schedule == "constant":
        after = optax.constant_schedule(config.lr)
    elif config.lr_schedule == "linear":
        after = optax.linear_schedule(config.lr, config.lr_end, rest)
    else:
        after = optax.cosine_decay_schedule(config.lr, rest, config.lr_end / config.lr)
    if not warmup:
        return after
    return optax.join_schedules([optax.linear_schedule(0.0, config.lr, warmup), after], [warmup])


def make_optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm (Pascanu et al. 2013), then the optimizer."""
    schedule = learning_rate(config, total_steps)
    decay = config.weight_decay
    if config.optimizer == "adamw":
        optimizer = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            eps=config.adam_epsilon,
            weight_decay=decay,
        )
    elif config.optimizer == "lion":
        optimizer = optax.lion(schedule, b1=config.beta1, b2=config.beta2, weight_decay=decay)
    elif config.optimizer == "muon":
        optimizer = muon(
            schedule,
            weight_decay=decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_matrices,
            # Updates as large as AdamW's usually are (Liu et al. 2025, section 2.2).
            consistent_rms=0.2,
        )
    else:
        optimizer = optax.adafactor(schedule, weight_decay_rate=decay * config.lr or None)
    if math.isinf(config.max_grad_norm):
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), optimizer)


def _matrices(params: Params) -> Any:
    """Which parameters Muon (Jordan et al. 2024) turns into orthogonal matrices, inputs by outputs.

    All kernels but those of the first and last convolution, as its authors advise.
    """

    def axes(path: tuple[Any, ...], x: jax.Array) -> MuonDimensionNumbers | None:
        names = {key.key for key in path}
        if "kernel" not in names or names & {"conv_in", "conv_out"}:
            return None
        return MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)
