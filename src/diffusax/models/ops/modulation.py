"""Shifts, scales and gates tokens by what follows from the time (Peebles and Xie 2023)."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax

from diffusax.models.ops.layer_input import LayerInput
from diffusax.models.ops.norms import normalized, rms_norm
from diffusax.runtime.devices.lowering import barrier_on


def modulate(x: jax.Array, shift: jax.Array, scale: jax.Array, *, eps: float = 1e-6) -> LayerInput:
    """Normalises tokens, then scales and shifts them. x: b t c; shift, scale: b 1 c, or b t c."""
    return LayerInput(_modulation(eps), x, shift, scale)


@lru_cache
def _modulation(eps: float) -> Callable[..., jax.Array]:
    return partial(_modulated, eps=eps)


def _modulated(x: jax.Array, shift: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    return shifted(normalized(x, eps=eps), shift, scale)


def scaled_rms_norm(norm: Any, x: jax.Array, scale: Any) -> LayerInput:
    """Normalises tokens by a layer `RMSNorm`, then scales them. x: b t c; scale: as `scaled`."""
    form, gain = partial(_rms_normed, eps=norm.epsilon), norm.scale[...]
    if isinstance(scale, jax.Array):
        return LayerInput(form, x, gain, scale)
    return LayerInput(partial(form, scale=scale), x, gain)


def _rms_normed(x: jax.Array, gain: jax.Array, scale: Any, *, eps: float) -> jax.Array:
    return scaled(rms_norm(x, gain, eps=eps), scale)


def scaled_layer_norm(x: jax.Array, scale: jax.Array, *, eps: float) -> LayerInput:
    """Normalises tokens without gain and bias, then scales them. x: b t c; scale: b 1 c."""
    return LayerInput(partial(_layer_normed, eps=eps), x, scale)


def _layer_normed(x: jax.Array, scale: jax.Array, *, eps: float) -> jax.Array:
    return scaled(normalized(x, eps=eps), scale)


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
    layer: Callable[[LayerInput], jax.Array], x: jax.Array, shift: Any, scale: Any, gate: Any
) -> jax.Array:
    """Adds a layer's output for modulated x, times a gate: x + gate * layer(modulated x)."""
    return add_gated(x, gate, layer(modulate(x, shift, scale)))
