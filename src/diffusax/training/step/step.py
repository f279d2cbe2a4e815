"""One training step as one compiled program."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from diffusax.models.network import Params
from diffusax.runtime.devices.lowering import backward_alone
from diffusax.runtime.random.noise import as_key, seed_key
from diffusax.runtime.switches import standard_promotion, under_own_switches
from diffusax.training.ema.update import EMAConfig, EMAState, maybe_update_ema
from diffusax.training.optimizers import global_norm

Batch = dict[str, Any]
Loss = Callable[[Params, Params, Batch, jax.Array], jax.Array]
"""(trained parameters, frozen parameters, batch, one random key per example) -> losses, b."""


class TrainState(NamedTuple):
    """All that a run carries from step to step, except its position in the data."""

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    ema: EMAState | None
    key: jax.Array
    """The run's random key, as `jax.random.key_data`; it never changes."""
    skipped: jax.Array
    """The number of steps with a loss, gradients or update that were not finite."""


@under_own_switches
def initial_state(params: Params, optimizer: optax.GradientTransformation, seed: int) -> TrainState:
    """Makes the state before the first step; parameters become float32."""
    params = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return TrainState(
        step=jnp.int32(0),
        params=params,
        opt_state=optimizer.init(params),
        ema=None,
        key=jax.random.key_data(seed_key(seed)),
        skipped=jnp.int32(0),
    )


def make_train_step(
    loss: Loss,
    optimizer: optax.GradientTransformation,
    *,
    accumulate: int = 1,
    ema: EMAConfig | None = None,
    ema_start: int = 0,
    norm: Callable[..., jax.Array] | None = None,
    check_updates: bool = True,
) -> Callable[[TrainState, Params, Batch], tuple[TrainState, dict[str, jax.Array]]]:
    """Returns the function (state, frozen parameters, batch) -> (state, metrics), to be jitted.

    Example i of step s uses the key fold_in(fold_in(key, s), i), so that the random numbers do not
    depend on the number of microbatches or devices.

    Args:
        loss: see `Loss`.
        optimizer: turns gradients into updates.
        accumulate: the number of microbatches of a batch, which must divide its size.
        ema: the rule of the average, for states that hold one.
        ema_start: the step after which the average began.
        norm: computes the norm of gradients and updates like `global_norm_by_rows`; by default that
            of one array after the other.
        check_updates: whether to check that updates are finite. Where finite gradients always give
            such, updates are computed once without the check, and twice with it.

    Returns:
        The function. Its metrics are scalars: loss, grad_norm (before clipping) and skipped (so
        far). A step whose loss, gradients or update are not finite changes neither parameters nor
        optimizer nor average.
    """

    def mean_loss(params: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        return loss(params, frozen, batch, keys).mean()

    def gradients(
        params: Params, frozen: Params, batch: Batch, keys: jax.Array
    ) -> tuple[jax.Array, Params]:
        value_and_grad = jax.value_and_grad(mean_loss)
        if accumulate == 1:
            return value_and_grad(params, frozen, batch, keys)

        def add(total: Any, microbatch: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, value_and_grad(params, frozen, *microbatch)), None

        zero = (jnp.float32(0), jax.tree.map(jnp.zeros_like, params))
        split = jax.tree.map(lambda x: _microbatches(x, accumulate), (batch, keys))
        total, _ = jax.lax.scan(add, zero, split)
        return jax.tree.map(lambda x: x / accumulate, total)

    update = optax.with_extra_args_support(optimizer).update
    norm_of_grads = norm_of_updates = global_norm
    if norm is not None:
        norm_of_grads = functools.partial(norm, stored=True)
        norm_of_updates = functools.partial(norm, stored=False)

    @standard_promotion()
    def train_step(
        state: TrainState, frozen: Params, batch: Batch
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        size = jax.tree.leaves(batch)[0].shape[0]
        key = jax.random.fold_in(as_key(state.key), state.step)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(size, dtype=jnp.uint32))
        with backward_alone():
            value, grads = gradients(state.params, frozen, batch, keys)
        grad_norm = norm_of_grads(grads)
        updates, opt_state = update(grads, state.opt_state, state.params, grad_norm=grad_norm)
        params = optax.apply_updates(state.params, updates)
        step = state.step + 1
        average = maybe_update_ema(
            ema or EMAConfig(),
            state.ema,
            params,
            steps_since_start=step - ema_start,
            images_per_step=size,
        )

        norms = [value, grad_norm, *([norm_of_updates(updates)] if check_updates else [])]
        finite = jnp.isfinite(jnp.stack(norms)).all()
        params, opt_state, average = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            (params, opt_state, average),
            (state.params, state.opt_state, state.ema),
        )
        skipped = state.skipped + ~finite
        metrics = {"loss": value, "grad_norm": grad_norm, "skipped": skipped}
        return TrainState(step, params, opt_state, average, state.key, skipped), metrics

    return train_step


def _microbatches(x: jax.Array, count: int) -> jax.Array:
    """Splits (b, ...) into (count, b / count, ...), each device's examples over all of them."""
    return x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
