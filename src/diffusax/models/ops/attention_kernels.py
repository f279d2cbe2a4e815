"""Attention by kernels of libraries: JAX's for TPUs, and cuDNN's."""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from diffusax.runtime.compat import pretend_cudnn


class Operands(NamedTuple):
    """The arguments of a lowering of attention, see `diffusax.models.ops.attention.attention`."""

    q: jax.Array
    """b t h d."""
    k: jax.Array
    """b s g d."""
    v: jax.Array
    """b s g d."""
    scale: float
    causal: bool = False
    key_lengths: jax.Array | None = None
    """b."""
    bias: jax.Array | None = None
    """h t s."""


def flash_on_one_device(of: Operands) -> jax.Array:
    """Computes attention on one TPU with JAX's Pallas kernel (Dao et al. 2022).

    Positions are padded to the kernel's blocks, and the padding is marked as another segment.
    """
    from jax.experimental.pallas.ops.tpu.flash_attention import (
        BlockSizes,
        SegmentIds,
        flash_attention,
    )

    q, (k, v), key_lengths = of.q, for_each_head(of.q, of.k, of.v), of.key_lengths
    (b, t, _, d), s = q.shape, k.shape[1]
    # The kernel takes any head size up to 128, and multiples of 128.
    pad = -d % 128 if d > 128 else 0
    rows, columns = query_block(t), key_block(s)
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
        q, k, v, segment_ids=segments, causal=of.causal, sm_scale=of.scale, block_sizes=blocks
    )
    return y[:, :, :t, :d].transpose(0, 2, 1, 3)


def query_block(t: int) -> int:
    """Returns the queries per block, in multiples of a tile's 16 rows.

    Each block reads all keys from memory, which a chip does as quickly as it computes with 200 to
    600 queries.
    """
    return -(-t // 16) * 16 if t <= 1024 else _block(t, range(1024, 511, -16))


def key_block(s: int) -> int:
    """Returns the keys per block, in multiples of a tile's 128 columns."""
    return _block(s, (640, 512, 384, 256) if s > 2048 else (512, 384, 256, 128))


def _block(n: int, sizes: Sequence[int]) -> int:
    """Returns the first size that needs at most 1% of padding, or else that with the least."""
    little = (size for size in sizes if -n % size <= n // 100)
    return next(little, min(sizes, key=lambda size: -n % size))


def for_each_head(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Repeats shared heads of keys and values, so that each head of q has its own: b s h d."""
    count = q.shape[2] // k.shape[2]
    return (k, v) if count == 1 else (jnp.repeat(k, count, axis=2), jnp.repeat(v, count, axis=2))


def cudnn_attention(of: Operands) -> jax.Array:
    """Computes attention, even if the program is only traced and this machine has no cuDNN."""
    pretend_cudnn()
    q, k, v, scale, causal, key_lengths, _ = of
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
