"""Optimizers and learning-rate schedules, from optax."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec
from msgspec import Meta
from optax.contrib import MuonDimensionNumbers, muon

from diffusax.boundary.options import Options, Weight
from diffusax.models.network import Params
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.runtime.devices.layouts import is_kernel
from diffusax.runtime.devices.mesh import axes_of

Rate = Annotated[float, Meta(ge=0, le=1e6)]
Beta = Annotated[float, Meta(ge=0, lt=1)]


@dataclasses.dataclass(frozen=True)
class OptimizerConfig(Options):
    """How gradients become updates."""

    group: ClassVar[str] = "optimizer."

    name: Literal["adamw", "adafactor", "lion", "muon"] = "adamw"
    """The optimizer; muon is for kernels, and trains all else by adamw with Nesterov momentum."""
    learning_rate: Rate = 1e-4
    """The learning rate after warm-up."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """The learning rate after warm-up: constant, or cosine or linear down to
    optimizer.final_learning_rate at the last step."""
    warmup_steps: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    """The number of steps over which the learning rate rises linearly from 0."""
    final_learning_rate: Rate = 0.0
    """The last learning rate of the schedules cosine and linear."""
    beta1: Beta = 0.9
    """The decay of the gradients' average in adamw, lion and the adamw in muon."""
    beta2: Beta = 0.999
    """The decay of the squares' average in adamw and the adamw in muon; in lion the decay of the
    momentum, where 0.99 is usual."""
    epsilon: Annotated[float, Meta(gt=0, le=1)] = 1e-8
    """The number that adamw adds to the root of the squares' average."""
    weight_decay: Weight = 1e-2
    """The decoupled weight decay; it is multiplied by the learning rate of the step."""
    max_grad_norm: Annotated[float, Meta(gt=0)] = 1.0
    """The global norm to which larger gradients are scaled down; inf leaves them unchanged."""

    @property
    def keeps_finite(self) -> bool:
        """Whether finite gradients give finite updates for certain.

        Squares of numbers whose norm is finite in float32 are at most 3.4e38, so that the largest
        update is a learning rate times 1.9e19 / epsilon, and a decay that lets parameters grow.
        """
        grows = (self.learning_rate or 0.0) * self.weight_decay > 1
        bounded = self.name == "lion" or (self.name == "adamw" and self.epsilon >= 1e-12)
        return bounded and not grows


@dataclasses.dataclass(frozen=True)
class FineTuningOptimizerConfig(OptimizerConfig):
    """How gradients become updates, of whole networks that high learning rates would soon spoil."""

    learning_rate: Rate | None = None  # type: ignore[assignment]
    """The learning rate after warm-up; by default 5e-6, that of diffusers' train_dreambooth.py and
    train_controlnet.py, and 1e-4 for LoRA."""

    def with_rate(self, *, lora: bool) -> OptimizerConfig:
        """Returns the options with a learning rate, the default one where none is given."""
        if self.learning_rate is not None:
            return self
        rate = OptimizerConfig.learning_rate if lora else 5e-6
        return dataclasses.replace(self, learning_rate=rate)


def learning_rate(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Returns the learning rate of each step, counted from 0."""
    warmup = config.warmup_steps
    rest = max(total_steps - warmup, 1)
    if config.schedule == "constant":
        after = optax.constant_schedule(config.learning_rate)
    elif config.schedule == "linear":
        after = optax.linear_schedule(config.learning_rate, config.final_learning_rate, rest)
    else:
        after = optax.cosine_decay_schedule(
            config.learning_rate, rest, config.final_learning_rate / (config.learning_rate or 1.0)
        )
    if not warmup:
        return after
    return optax.join_schedules(
        [optax.linear_schedule(0.0, config.learning_rate, warmup), after], [warmup]
    )


def make_optimizer(
    config: OptimizerConfig, total_steps: int, rates: Mapping[str, float] | None = None
) -> optax.GradientTransformation:
    """Makes the optimizer, after clipping by global norm (Pascanu et al. 2013).

    Args:
        config: the options.
        total_steps: the number of steps of the run.
        rates: the learning rates of components that have their own, by the beginning of their
            names; the schedule is that of all others.
    """
    optimizer = _optimizer(config, total_steps)
    if not math.isinf(config.max_grad_norm):
        optimizer = optax.chain(_clip(config.max_grad_norm), optimizer)
    if not rates:
        return optimizer
    return _with_rates(optimizer, {k: rate / config.learning_rate for k, rate in rates.items()})


def _with_rates(
    optimizer: optax.GradientTransformation, factors: Mapping[str, float]
) -> optax.GradientTransformation:
    """Multiplies the updates of components, all of which are linear in the learning rate.

    The optimizer's state stays as it is without, so that a run can go on with other rates.
    """
    inner = optax.with_extra_args_support(optimizer)

    def update(
        grads: Params, state: Any, params: Params | None = None, **given: Any
    ) -> tuple[Params, Any]:
        updates, state = inner.update(grads, state, params, **given)
        for name, own in updates.items():
            factor = next((f for start, f in factors.items() if name.startswith(start)), None)
            if factor is not None:
                updates = {**updates, name: jax.tree.map(lambda x, f=factor: x * f, own)}
        return updates, state

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _clip(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scales gradients as `optax.clip_by_global_norm`, by the norm that the step knows already."""

    def update(
        grads: Params,
        state: optax.OptState,
        params: Params | None = None,
        *,
        grad_norm: jax.Array | None = None,
        **_: Any,
    ) -> tuple[Params, optax.OptState]:
        size = global_norm(grads) if grad_norm is None else grad_norm
        inside = size < max_norm
        return jax.tree.map(lambda g: jnp.where(inside, g, g / size * max_norm), grads), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, update)


def _optimizer(config: OptimizerConfig, total_steps: int) -> optax.GradientTransformation:
    schedule, decay = learning_rate(config, total_steps), config.weight_decay
    betas = {"b1": config.beta1, "b2": config.beta2}
    if config.name == "adamw":
        return optax.adamw(schedule, **betas, eps=config.epsilon, weight_decay=decay)
    if config.name == "lion":
        return optax.lion(schedule, **betas, weight_decay=decay)
    if config.name == "muon":
        return muon(
            schedule,
            weight_decay=decay,
            adam_b1=config.beta1,
            adam_b2=config.beta2,
            muon_weight_dimension_numbers=_matrices,
            # This makes updates as large as AdamW's usually are (Liu et al. 2025, section 2.2).
            consistent_rms=0.2,
        )
    # optax's own schedule would not scale the decay.
    adafactor = optax.adafactor(1.0, weight_decay_rate=decay or None)
    return optax.chain(adafactor, optax.scale_by_schedule(schedule))


def _matrices(params: Params) -> Any:
    """Returns which parameters Muon (Jordan et al. 2024) orthogonalises, as inputs by outputs.

    They are all kernels but those of the first and last convolution, as its authors advise; of
    adapters they are A and B.
    """

    def axes(path: tuple[Any, ...], x: jax.Array) -> MuonDimensionNumbers | None:
        names = {key.key for key in path}
        if not names & {"kernel", "down", "up"} or names & {"conv_in", "conv_out"}:
            return None
        return MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1)

    return jax.tree_util.tree_map_with_path(axes, params)


def global_norm(tree: Any) -> jax.Array:
    """Computes the norm from the sum of squares of each array."""
    squares = (jnp.sum(jnp.square(x.astype(jnp.float32))) for _, x in ordered_leaves(tree))
    return jnp.sqrt(sum(squares))


def global_norm_by_rows(tree: Any, *, stored: bool) -> jax.Array:
    """Computes the norm from the sums of squares of all rows of all matrices together.

    A GPU takes two kernels to add up a matrix, and a network has hundreds. It is for arrays that
    are whole on each device: parts of them would have to be gathered.

    Args:
        tree: the arrays.
        stored: whether they are in memory, from where all vectors are taken together, too; vectors
            that are being computed are added up on the way.
    """
    return jnp.sqrt(_squares_by_rows([x for _, x in ordered_leaves(tree)], stored))


def global_norm_of_shares(tree: Any, shardings: Any, *, stored: bool) -> jax.Array:
    """Computes `global_norm_by_rows` where each device adds up what it has, inside a mesh.

    Args:
        tree: the arrays.
        shardings: the `NamedSharding` of each. What several devices have counts once.
        stored: see `global_norm_by_rows`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)

    def own(tree: Any) -> jax.Array:
        by_copies: dict[int, list[jax.Array]] = {}
        for (_, x), (_, sharding) in zip(ordered_leaves(tree), ordered_leaves(shardings)):
            by_copies.setdefault(_copies(sharding), []).append(x)
        sums = (_squares_by_rows(some, stored) / count for count, some in by_copies.items())
        return jax.lax.psum(sum(sums), mesh.axis_names)

    squares = jax.shard_map(own, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False)
    return jnp.sqrt(squares(tree))


def _copies(sharding: NamedSharding) -> int:
    """Returns how many devices of a mesh have each part of an array."""
    return sharding.mesh.size // math.prod(sharding.mesh.shape[axis] for axis in axes_of(sharding))


def _squares_by_rows(arrays: Sequence[jax.Array], stored: bool) -> jax.Array:
    """Adds up the squares of all numbers, see `global_norm_by_rows`."""
    leaves = [x.astype(jnp.float32) for x in arrays]
    vectors = [x.reshape(-1) for x in leaves if x.ndim < 2]
    rows = [_row_sums(jnp.square(x)) for x in leaves if x.ndim >= 2]
    if stored and vectors:
        vectors = [_together(vectors)]
    squares = sum((jnp.sum(jnp.square(x)) for x in vectors), jnp.float32(0))
    return squares + jnp.sum(_together(rows)) if rows else squares


def _together(vectors: Sequence[jax.Array]) -> jax.Array:
    """Concatenates vectors; without the barrier XLA would add up one by one what comes of them."""
    return jax.lax.optimization_barrier(jnp.concatenate(vectors))


def _row_sums(x: jax.Array) -> jax.Array:
    """Adds up the rows of an array as they lie in a GPU's memory, n."""
    return x.sum(tuple(range(x.ndim - 1)) if is_kernel(x.shape) else -1).reshape(-1)
