"""Rounds tokens to eight bits on TPUs in one pass, together with what makes them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from diffusax.models.quantized import hadamard
from diffusax.runtime.devices.lowering import plain_lowerings

_LANES = 128
_TILE = 32
"""The tokens in a tile of int8."""
_NUMBERS = 2**20
"""The numbers of a block that are in float32 at once."""
_MEMORY = 64 << 20
"""The bytes of vector memory that the kernel may take, of the 128 MiB of a v5e or a v6e."""


def rotated_width(group: int) -> int:
    """Returns how many channels the kernel rotates by one product."""
    return max(group, _LANES) if group else 1


def round_tokens(
    form: Callable[..., jax.Array],
    arguments: Sequence[jax.Array],
    *,
    width: int,
    rotation: int,
) -> tuple[jax.Array, jax.Array]:
    """Rounds form(*arguments) as `layer_input.to_int8` does, without writing it before.

    Each block of the kernel has some tokens with all of their channels, so that the form may be
    anything that treats tokens alike.

    Args:
        form: makes b t width of the arguments.
        arguments: the first and perhaps others with tokens, b t c; and vectors for all tokens of an
            image or of all images, c or 1 1 c or b 1 c.
        width: the channels of the result.
        rotation: the channels of a rotated group, 0 for none.

    Returns:
        b t width, int8, and b t 1, float32.
    """
    b, t = arguments[0].shape[:2]
    rows = min(_block(max(width, *(x.shape[-1] for x in arguments))), -(-t // _TILE) * _TILE)
    given = [x.reshape((1,) * (3 - x.ndim) + x.shape) for x in arguments]
    specs = [_spec(x.shape, b, t, rows) for x in given]
    if rotation:
        whole = np.kron(np.eye(rotated_width(rotation) // rotation), hadamard(rotation))
        given.append(jnp.asarray(whole, arguments[0].dtype))
        specs.append(pl.BlockSpec(whole.shape, lambda i, j: (0, 0)))
    numbers, own = b * t * width, lambda i, j: (i, j, 0)
    values, scale = pl.pallas_call(
        partial(_kernel, form=form, rotated=bool(rotation)),
        grid=(b, pl.cdiv(t, rows)),
        in_specs=specs,
        out_specs=[pl.BlockSpec((1, rows, width), own), pl.BlockSpec((1, rows, 1), own)],
        out_shape=[
            jax.ShapeDtypeStruct((b, t, width), jnp.int8),
            jax.ShapeDtypeStruct((b, t, 1), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel"), vmem_limit_bytes=_MEMORY
        ),
        cost_estimate=pl.CostEstimate(
            flops=numbers * (10 + 2 * rotated_width(rotation) * bool(rotation)),
            transcendentals=0,
            bytes_accessed=numbers + sum(x.size * x.dtype.itemsize for x in given),
        ),
    )(*given)
    return values, scale


def _spec(shape: Sequence[int], b: int, t: int, rows: int) -> pl.BlockSpec:
    """Returns which part of an argument a block of tokens needs."""
    by_image, by_token = shape[0] == b, shape[1] == t and t > 1
    block = (1, rows if by_token else 1, shape[2])
    return pl.BlockSpec(block, lambda i, j: (i if by_image else 0, j if by_token else 0, 0))


def _block(channels: int) -> int:
    """Returns the tokens of a block."""
    return max(_TILE, min(512, _NUMBERS // channels // _TILE * _TILE))


def _kernel(*refs: Any, form: Callable[..., jax.Array], rotated: bool) -> None:
    *given, values_ref, scale_ref = refs
    matrix = given.pop() if rotated else None
    with plain_lowerings():
        y = form(*(ref[0] for ref in given))
    if matrix is not None:
        width = matrix.shape[0]
        parts = [
            jnp.matmul(y[:, i : i + width], matrix[...], preferred_element_type=jnp.float32)
            for i in range(0, y.shape[-1], width)
        ]
        y = jnp.concatenate(parts, axis=-1)
    y = y.astype(jnp.float32)
    top = jnp.abs(y).max(-1, keepdims=True)
    scale = jnp.where(top > 0, top / 127, 1.0)
    values_ref[0] = jnp.round(y / scale).astype(jnp.int32).astype(jnp.int8)
    scale_ref[0] = scale
