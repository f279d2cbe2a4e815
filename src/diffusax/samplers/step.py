"""The generic step, in JAX: one loop serves every sampler."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from diffusax.samplers.rows import SLOTS, Table
from diffusax.samplers.terms import NAMES

_NOISE = NAMES.index("NOISE")


def init_state(x: jax.Array) -> jax.Array:
    """Makes the state of a run that starts from latents x: 6 b h w c, float32."""
    x = x.astype(jnp.float32)
    return jnp.concatenate([x[None], jnp.zeros((SLOTS - 1, *x.shape), jnp.float32)])


def run(
    model: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
    state: jax.Array,
    table: Table,
    start: jax.Array | int,
    stop: jax.Array | int,
    noise: Callable[[jax.Array], jax.Array],
    constrain: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Runs rows start..stop of the table; both may be traced, so that one program serves any run.

    Args:
        model: (x: b h w c, float32, timestep: scalar or b, row number) -> the raw prediction,
            b h w c; channels beyond c, which are a learned variance, are ignored.
        state: 6 b h w c from `init_state` or an earlier call; slot 0 holds the latents.
        table: the coefficients, shared by all images or different for each (`stack_tables`).
        start: the first row.
        stop: the row after the last.
        noise: row number -> standard normal noise, b h w c; called only for rows that use noise.
        constrain: (x: b h w c, signal, noise level, row number) -> x, applied to the latents after
            each row; signal and noise level are those of x there, each a scalar or b 1 1 1.
    """
    return run_with_memory(
        lambda x, t, i, memory: (model(x, t, i), memory),
        *(state, None, table, start, stop, noise, constrain),
    )[0]


def run_with_memory(
    model: Callable[[jax.Array, jax.Array, jax.Array, Any], tuple[jax.Array, Any]],
    state: jax.Array,
    memory: Any,
    table: Table,
    start: jax.Array | int,
    stop: jax.Array | int,
    noise: Callable[[jax.Array], jax.Array],
    constrain: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """Runs rows as `run`, by a model that remembers something from row to row.

    Args:
        model: as that of `run`, with what it remembers as a last argument, and as a second result.
        state: see `run`.
        memory: what it remembers at first, a tree of arrays whose shapes stay; None for nothing.
        table: see `run`.
        start: see `run`.
        stop: see `run`.
        noise: see `run`.
        constrain: see `run`.

    Returns:
        The state and what is remembered after the rows.
    """

    def body(i: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
        state, memory = carry
        row = jax.tree.map(lambda column: jnp.asarray(column)[i], table)
        at_row = None if constrain is None else functools.partial(_at_row, constrain, i)
        return step_with_memory(
            lambda x, t: model(x, t, i, memory), state, row, lambda: noise(i), at_row
        )

    carry: tuple[jax.Array, Any] = jax.lax.fori_loop(start, stop, body, (state, memory))
    return carry


def step(
    model: Callable[[jax.Array, jax.Array], jax.Array],
    state: jax.Array,
    row: Any,
    noise: Callable[[], jax.Array],
    constrain: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> jax.Array:
    """Evaluates one row of a table and returns the next state, 6 b h w c; see `run`.

    Args:
        model: (x: b h w c, float32, timestep: scalar or b) -> the raw prediction, b h w c.
        state: 6 b h w c.
        row: a `Table` without the axis of the rows; with an axis of images in its place, they have
            coefficients of their own.
        noise: () -> standard normal noise, b h w c; called only for rows that use noise.
        constrain: (x, signal, noise level) -> x, applied to the latents after the row.
    """
    return step_with_memory(lambda x, t: (model(x, t), None), state, row, noise, constrain)[0]


def step_with_memory(
    model: Callable[[jax.Array, jax.Array], tuple[jax.Array, Any]],
    state: jax.Array,
    row: Any,
    noise: Callable[[], jax.Array],
    constrain: Callable[[jax.Array, jax.Array, jax.Array], jax.Array] | None = None,
) -> tuple[jax.Array, Any]:
    """Evaluates one row as `step`, and also returns the second result of the model."""
    x = state[0]
    raw, memory = model(spread(row.in_scale, x) * x, row.timestep)
    raw = raw.astype(jnp.float32)[..., : x.shape[-1]]
    p = spread(row.prediction[..., 0], x) * x + spread(row.prediction[..., 1], x) * raw
    clip = spread(row.clip, x)
    p = jnp.clip(p, -clip, clip)
    if row.threshold is not None:
        p = _threshold(p, row.threshold[..., 0], row.threshold[..., 1])
    drawn = jax.lax.cond(
        (row.update[..., _NOISE] != 0).any(),
        lambda: noise().astype(jnp.float32),
        lambda: jnp.zeros_like(x),
    )
    terms = jnp.concatenate([state, raw[None], p[None], drawn[None]])
    state = _mix(row.update, terms)
    if constrain is None:
        return state, memory
    signal, level = (spread(row.level[..., k], x) for k in range(2))
    # Not `state.at[0].set`: XLA for GPUs (jaxlib 0.11) cannot update a library's product in place.
    state = jnp.concatenate([constrain(state[0], signal, level)[None], state[1:]])
    return state, memory


def _at_row(constrain: Callable[..., jax.Array], i: jax.Array, *values: jax.Array) -> jax.Array:
    return constrain(*values, i)


def _mix(update: jax.Array, terms: jax.Array) -> jax.Array:
    """Computes the next state, 6 b ..., from update: 6 9 or b 6 9, and terms: 9 b ...."""
    equation = "st,t...->s..." if update.ndim == 2 else "bst,tb...->sb..."
    # Full precision: an accelerator's default would round the latents to bfloat16.
    return jnp.einsum(equation, update, terms, precision=jax.lax.Precision.HIGHEST)


def _threshold(p: jax.Array, quantile: jax.Array, highest: jax.Array) -> jax.Array:
    """Applies dynamic thresholding (Saharia et al. 2022, section 2.3) if `highest` is above 0."""
    sizes = jnp.abs(p).reshape(p.shape[0], -1)
    quantile = jnp.broadcast_to(quantile, p.shape[:1])
    limit = jnp.minimum(jnp.maximum(jax.vmap(jnp.quantile)(sizes, quantile), 1), highest)
    limit = spread(jnp.where(highest > 0, limit, 1), p)
    return jnp.where(spread(highest, p) > 0, jnp.clip(p, -limit, limit) / limit, p)


def spread(value: jax.Array, x: jax.Array) -> jax.Array:
    """Returns a scalar as it is, and one number per image as b 1 1 1."""
    return value if value.ndim == 0 else value.reshape(-1, *[1] * (x.ndim - 1))
