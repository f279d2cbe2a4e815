"""The generic step, in JAX: one loop serves every sampler."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from diffusax.samplers.rows import NOISE, SLOTS, Table

_NOISE = int(NOISE.argmax())


def init_state(x: jax.Array) -> jax.Array:
    """The state of a run that starts from latents x: 6 b h w c, float32."""
    x = x.astype(jnp.float32)
    return jnp.concatenate([x[None], jnp.zeros((SLOTS - 1, *x.shape), jnp.float32)])


def run(
    model: Callable[[jax.Array, jax.Array], jax.Array],
    state: jax.Array,
    table: Table,
    start: jax.Array | int,
    stop: jax.Array | int,
    noise: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Rows start..stop of the table; both may be traced, so that one program serves any run.

    Args:
        model: (x: b h w c, float32, timestep: scalar) -> the raw prediction, b h w c.
        state: 6 b h w c from `init_state` or an earlier call; slot 0 holds the latents.
        table: the coefficients.
        start: the first row.
        stop: the row after the last.
        noise: row number -> standard normal noise, b h w c; computed only where a row adds some.
    """

    def body(i: jax.Array, state: jax.Array) -> jax.Array:
        row = jax.tree.map(lambda column: jnp.asarray(column)[i], table)
        x = state[0]
        raw = model(row.in_scale * x, row.timestep).astype(jnp.float32)
        p = row.prediction[0] * x + row.prediction[1] * raw
        p = jnp.clip(p, -row.clip, row.clip)
        drawn = jax.lax.cond(
            row.update[0, _NOISE] != 0,
            lambda: noise(i).astype(jnp.float32),
            lambda: jnp.zeros_like(x),
        )
        terms = jnp.concatenate([state, raw[None], p[None], drawn[None]])
        # Full precision: an accelerator's default would round the latents to bfloat16.
        return jnp.einsum("st,t...->s...", row.update, terms, precision=jax.lax.Precision.HIGHEST)

    return jax.lax.fori_loop(start, stop, body, state)
