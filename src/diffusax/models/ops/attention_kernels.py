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

from diffusax.runtime.compat import pretend_cudnn

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


def flash_on_one_device(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Computes `attention` on one TPU. q: b t h d, k and v: b s g d, key_lengths: b -> b t h d.

    Positions are padded to the kernel's blocks, and the padding is marked as another segment.
    """
    from jax.experimental.pallas.ops.tpu.flash_attention import (
        BlockSizes,
        SegmentIds,
        flash_attention,
    )

    (b, t, _, d), s = q.shape, k.shape[1]
    k, v = for_each_head(q, k, v)
    # The kernel takes any head size up to 128, and multiples of 128.
    pad = -d % 128 if d > 128 else 0
    rows, columns = block_size(t), block_size(s)
    q, k, v = (
        jnp.pad(x.transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, -x.shape[1] % block), (0, pad)))
        for x, block in ((q, rows), (k, columns), (v, columns))
    )
    segments = None
    if q.shape[2] > t or k.shape[2] > s or key_lengths is not None:
        ends = (t, s if key_lengths is None else key_lengths[:, None])
        ids = (jnp.arange(x.shape[2]) >= end for x, end in zip((q, k), ends))
        segments = SegmentIds(
            *(jnp.broadcast_to(i.astype(jnp.int32), (b, i.shape[-1])) for i in ids)
        )
    blocks = BlockSizes(
        block_b=1,
        block_q=rows,
        block_k_major=columns,
        block_k=columns,
        block_q_major_dkv=rows,
        block_q_dkv=rows,
        block_k_major_dkv=columns,
        block_k_dkv=columns,
        block_q_dq=rows,
        block_k_major_dq=columns,
        block_k_dq=columns,
    )
    y = flash_attention(
        q, k, v, segment_ids=segments, causal=causal, sm_scale=scale, block_sizes=blocks
    )
    return y[:, :, :t, :d].transpose(0, 2, 1, 3)


def block_size(n: int) -> int:
    """Returns the positions per block that need least padding, and then the most of those.

    Blocks are large because each reads all keys.
    """
    sizes = (512, 384, 256) if n > 2048 else (512, 384, 256, 128)
    return min(sizes, key=lambda size: (-n % size, -size))


def for_each_head(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Repeats shared heads of keys and values, so that each head of q has its own: b s h d."""
    count = q.shape[2] // k.shape[2]
    return (k, v) if count == 1 else (jnp.repeat(k, count, axis=2), jnp.repeat(v, count, axis=2))


def cudnn_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Computes attention, even if the program is only traced and this machine has no cuDNN.

    The arguments are those of `diffusax.models.ops.attention.attention`.
    """
    pretend_cudnn()
    if key_lengths is not None:
        return _padded(q, k, v, key_lengths, scale=scale, causal=causal)
    if q.shape[1] % 2 or k.shape[1] % 2:
        return _odd(q, k, v, scale, causal)
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _cudnn_kernel(
    q: jax.Array, k: jax.Array, v: jax.Array, *, scale: float, causal: bool, **lengths: Any
) -> jax.Array:
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, implementation="cudnn", **lengths
    )


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _odd(q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool) -> jax.Array:
    """Takes odd lengths, which the kernel's gradients do not; those are computed on padding."""
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal)


def _odd_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool
) -> tuple[jax.Array, Any]:
    return jax.vjp(partial(_padded, scale=scale, causal=causal), q, k, v)


def _odd_backward(scale: float, causal: bool, pull: Any, g: jax.Array) -> Any:
    del scale, causal
    return pull(g)


_odd.defvjp(_odd_forward, _odd_backward)


def _padded(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    key_lengths: jax.Array | None = None,
    *,
    scale: float,
    causal: bool,
) -> jax.Array:
    """Pads odd lengths; the true lengths tell the kernel what is padding."""
    (b, t, _, _), s = q.shape, k.shape[1]
    own = jnp.full(b, s, jnp.int32) if key_lengths is None else key_lengths
    lengths = {"query_seq_lengths": jnp.full(b, t, jnp.int32), "key_value_seq_lengths": own}
    q, k, v = (jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) for x in (q, k, v))
    return _cudnn_kernel(q, k, v, scale=scale, causal=causal, **lengths)[:, :t]
