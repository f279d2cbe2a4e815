"""Shifts, scales and gates tokens by what follows from the time (Peebles and Xie 2023)."""

from collections.abc import Callable
from typing import Any

import jax

from diffusax.models.ops.norms import normalized
from diffusax.runtime.devices.lowering import barrier_on


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises tokens, then scales and shifts them. x: b t c; shift, scale: b 1 c."""
    return shifted(normalized(x, eps=1e-6), shift, scale)


def shifted(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """Scales and shifts tokens. x: b t c; shift, scale: b 1 c."""
    return _written(x * (1 + scale) + shift)


def scaled(x: jax.Array, scale: Any) -> jax.Array:
    """Scales tokens. x: b t c; scale: b 1 c, or a number."""
    return _written(x * scale)


def add_gated(x: jax.Array, gate: Any, y: jax.Array) -> jax.Array:
    """Returns x + gate y. x and y: b t c; gate: b 1 c, or a number."""
    return _written(x + gate * y)


def _written(x: jax.Array) -> jax.Array:
    """Makes a TPU write x, which is scaled by the image's modulation, to memory as it is.

    XLA would move the reshape of the next product before the scaling, and write the scales of all
    blocks for all tokens instead.
    """
    written: jax.Array = barrier_on("tpu", x)
    return written


def gated_layer(
    layer: Callable[[jax.Array], jax.Array], x: jax.Array, shift: Any, scale: Any, gate: Any
) -> jax.Array:
    """Adds a layer's output for modulated x, times a gate: x + gate * layer(modulated x)."""
    return add_gated(x, gate, layer(modulate(x, shift, scale)))
