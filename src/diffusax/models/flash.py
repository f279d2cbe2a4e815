"""Calls JAX's flash attention for TPU (Dao et al. 2022), whose positions fill whole blocks."""

import jax
import jax.numpy as jnp


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
