"""Multiplies integers on NVIDIA's GPUs, and scales the sums before they are written."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from diffusax.models.ops.layer_input import Int8Tokens
from diffusax.models.quantized import Quantized

_TOKENS, _COLUMNS, _INPUTS = 128, 128, 64
"""The tokens and outputs of a block, and the inputs that it multiplies at once; by the PTX that
XLA makes of it for an H200 and a 4090, whose shared memory holds four times as many inputs."""


def takes(kernel: Quantized) -> bool:
    """Returns whether blocks divide the inputs and outputs of a kernel."""
    return kernel.shape[0] % _INPUTS == 0 and kernel.shape[1] % _COLUMNS == 0


def multiply_scaled(
    tokens: Int8Tokens, kernel: Quantized, bias: jax.Array | None, *, interpret: bool = False
) -> jax.Array:
    """Computes `int8.multiply` in one kernel: t c -> t d.

    The sums are never written: XLA writes those of its own products, four bytes each, for the
    scales to be applied by another kernel.

    Args:
        tokens: t c, and t 1.
        kernel: c d, int8, best in the order of `layouts.place_of`.
        bias: d.
        interpret: whether Pallas' interpreter computes it.
    """
    count, (c, d) = len(tokens.values), kernel.shape
    # Blocks that are not full are not known to Triton.
    values, scale = (jnp.pad(x, ((0, -count % _TOKENS), (0, 0))) for x in tokens)
    columns = jnp.broadcast_to(kernel.scale, d)
    offset = jnp.zeros(d, jnp.float32) if bias is None else bias.astype(jnp.float32)
    by_column = pl.BlockSpec((_COLUMNS,), lambda i, j: (j,))
    y = pl.pallas_call(
        partial(_kernel, c=c),
        grid=(len(values) // _TOKENS, d // _COLUMNS),
        in_specs=[
            pl.BlockSpec((_TOKENS, c), lambda i, j: (i, 0)),
            pl.BlockSpec((_COLUMNS, c), lambda i, j: (j, 0)),
            pl.BlockSpec((_TOKENS,), lambda i, j: (i,)),
            by_column,
            by_column,
        ],
        out_specs=pl.BlockSpec((_TOKENS, _COLUMNS), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((len(values), d), kernel.dtype),
        compiler_params=triton.CompilerParams(num_warps=8, num_stages=4),
        interpret=interpret,
        # Tensor cores want both operands' inputs beside each other.
    )(values, kernel.values.T, scale[:, 0], columns, offset)
    return y[:count]


def _kernel(
    x_ref: Any, k_ref: Any, rows_ref: Any, columns_ref: Any, b_ref: Any, y_ref: Any, *, c: int
) -> None:
    """Computes a block of the result, with some of the inputs after others."""

    def add(i: Any, sums: jax.Array) -> jax.Array:
        own = pl.ds(i * _INPUTS, _INPUTS)
        over_inputs = (((1,), (0,)), ((), ()))
        x, kernel = x_ref[:, own], k_ref[:, own].T
        more = jax.lax.dot_general(x, kernel, over_inputs, preferred_element_type=jnp.int32)
        return sums + more

    sums = jax.lax.fori_loop(0, c // _INPUTS, add, jnp.zeros(y_ref.shape, jnp.int32))
    scale = rows_ref[...][:, None] * columns_ref[...][None]
    y_ref[...] = (sums.astype(jnp.float32) * scale + b_ref[...][None]).astype(y_ref.dtype)
