"""Attention on TPUs of heads that lie side by side, as the products before write them.

JAX's kernel wants every head by itself. Heads of 64 channels fill half of a TPU's 128 lanes then,
and XLA writes queries, keys, values and results several times to turn them. This kernel takes 128
channels at once, two heads of 64. A head's scores are a product over all of them in which the
channels of the other are zeros, which takes the matrix unit as long as a product over 64.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LANES = 128
_QUERIES = 512
"""The queries of a block."""
_KEYS = 512
"""The keys whose scores are held at once."""


def attend_side_by_side(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    scale: float,
    form: Callable[[jax.Array, jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Computes softmax(q k^T scale) v on one TPU, the softmax in float32 (Dao et al. 2022).

    Args:
        q: b t h d, where d divides 128.
        k: b s h d.
        v: b s h d.
        scale: the factor of the scores.
        form: computes the same in another way, by which gradients are computed.
    """
    call = jax.custom_vjp(partial(_call, scale=scale))
    call.defvjp(lambda *qkv: jax.vjp(form, *qkv), lambda pull, y: pull(y))
    result: jax.Array = call(q, k, v)
    return result


def _call(q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float) -> jax.Array:
    (b, t, h, d), s = q.shape, k.shape[1]
    c = h * d
    width, rows = min(_LANES, c), min(_QUERIES, t)
    queries = pl.BlockSpec((1, rows, width), lambda image, part, block: (image, block, part))
    keys = pl.BlockSpec((1, s, width), lambda image, part, block: (image, 0, part))
    y = pl.pallas_call(
        partial(_kernel, d=d, channels=c, scale=scale),
        grid=(b, pl.cdiv(c, width), pl.cdiv(t, rows)),
        in_specs=[queries, keys, keys],
        out_specs=queries,
        out_shape=jax.ShapeDtypeStruct((b, t, c), q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        cost_estimate=pl.CostEstimate(
            flops=4 * b * t * s * c,
            transcendentals=b * h * t * s,
            bytes_accessed=2 * b * (t + s) * c * q.dtype.itemsize,
        ),
    )(*(x.reshape(*x.shape[:2], c) for x in (q, k, v)))
    return y.reshape(q.shape)


def _kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, y_ref: Any, *, d: int, channels: int, scale: float
) -> None:
    """Attends with a block of queries, one head after the other: 1 rows width, 1 s width."""
    s, width = k_ref.shape[1:]
    first = pl.program_id(1) * width
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    # What stands behind the last channel may be no number.
    known = None if channels % width == 0 else lane < channels - first

    def attend_head(start: int) -> None:
        own = (lane >= start) & (lane < start + d)
        add = partial(_add_keys, jnp.where(own, q_ref[0], 0), k_ref, v_ref, known, scale)
        rows = q_ref.shape[1]
        state = (
            jnp.full((rows, 1), -jnp.inf, jnp.float32),
            jnp.zeros((rows, 1), jnp.float32),
            jnp.zeros((rows, width), jnp.float32),
        )
        whole, rest = divmod(s, _KEYS)
        state = jax.lax.fori_loop(0, whole, lambda i, x: add(x, i * _KEYS, _KEYS), state)
        _, total, y = add(state, whole * _KEYS, rest) if rest else state
        y_ref[0] = jnp.where(own, (y / total).astype(y_ref.dtype), y_ref[0])

    for start in range(0, width, d):
        pl.when(first + start < channels)(partial(attend_head, start))


def _add_keys(
    q: jax.Array,
    k_ref: Any,
    v_ref: Any,
    known: jax.Array | None,
    scale: float,
    state: tuple[jax.Array, jax.Array, jax.Array],
    start: Any,
    count: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adds some keys to the state: the largest scores, the sums of exponentials, and those times
    the values.
    """
    top, total, y = state
    k, v = (ref[0, pl.ds(start, count)] for ref in (k_ref, v_ref))
    k = k if known is None else jnp.where(known, k, 0)
    over_channels = (((1,), (1,)), ((), ()))
    scores = jax.lax.dot_general(q, k, over_channels, preferred_element_type=jnp.float32) * scale
    highest = jnp.maximum(top, scores.max(1, keepdims=True))
    p, before = jnp.exp(scores - highest), jnp.exp(top - highest)
    added = jnp.matmul(p.astype(v.dtype), v, preferred_element_type=jnp.float32)
    return highest, before * total + p.sum(1, keepdims=True), before * y + added
