"""Activations of networks, in the form that is best for the platform.

XLA's CPU backend rounds half precision after every operation of an activation, which takes longer
than the activation itself. There they are computed in float32, and rounded once as PyTorch does.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from diffusax.runtime.devices.lowering import by_platform, is_plain

_Activation = Callable[..., jax.Array]


def silu(x: jax.Array) -> jax.Array:
    """Computes x sigmoid(x) (Hendrycks and Gimpel 2016), in x's dtype."""
    return _activate(nnx.silu, x)


def gelu(x: jax.Array) -> jax.Array:
    """Computes x P(normal <= x) exactly (Hendrycks and Gimpel 2016), like PyTorch."""
    return _activate(_exact_gelu, x)


def approximate_gelu(x: jax.Array) -> jax.Array:
    """Computes GELU by its formula with a hyperbolic tangent (Hendrycks and Gimpel 2016)."""
    return _activate(gelu_by_tanh, x)


def quick_gelu(x: jax.Array) -> jax.Array:
    """Computes x sigmoid(1.702 x) (Hendrycks and Gimpel 2016), in x's dtype."""
    return _activate(_quick_gelu, x)


def gated_silu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes silu(gate) x (Shazeer 2020), in x's dtype."""
    return _activate(_gated_silu, gate, x)


def gated_gelu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes gelu(gate) x with the exact GELU (Shazeer 2020), in x's dtype."""
    return _activate(_gated_gelu, gate, x)


def gated_approximate_gelu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """Computes approximate_gelu(gate) x (Shazeer 2020), in x's dtype."""
    return _activate(_gated_gelu_by_tanh, gate, x)


# Inlined, because activations of one shape are traced once.
@partial(jax.jit, static_argnums=0, inline=True)
def _activate(activation: _Activation, *xs: jax.Array) -> jax.Array:
    if is_plain():
        return activation(*xs)
    half = xs[-1].dtype.itemsize == 2

    def choose(platform: str) -> str:
        if platform == "cuda" and activation in _ON_CUDA:
            return "cuda"
        return "rounded once" if platform == "cpu" and half else "own"

    forms: dict[str, _Activation] = {
        "own": activation,
        "rounded once": partial(_rounded_once, activation),
        "cuda": _ON_CUDA.get(activation, activation),
    }
    return by_platform(choose, forms, *xs)


def _rounded_once(activation: _Activation, *xs: jax.Array) -> jax.Array:
    return activation(*(x.astype(jnp.float32) for x in xs)).astype(xs[-1].dtype)


def _exact_gelu(x: jax.Array) -> jax.Array:
    # `jax.nn.gelu` uses erfc, whose two branches take eight times as long on CPU.
    return 0.5 * x * (1 + jax.lax.erf(x * math.sqrt(0.5)))


def gelu_by_tanh(x: jax.Array) -> jax.Array:
    return nnx.gelu(x, approximate=True)


def gelu_by_sigmoid(x: jax.Array) -> jax.Array:
    """Has the sigmoid of twice the argument instead, as GPUs have an exponential function."""
    y = x.astype(jnp.float32)
    return (y * jax.nn.sigmoid(2 * _GELU * (y + 0.044715 * y**3))).astype(x.dtype)


_GELU = math.sqrt(2 / math.pi)
_ON_CUDA: dict[_Activation, _Activation] = {gelu_by_tanh: gelu_by_sigmoid}


def _quick_gelu(x: jax.Array) -> jax.Array:
    return x * nnx.sigmoid(1.702 * x)


def _gated_silu(gate: jax.Array, x: jax.Array) -> jax.Array:
    return nnx.silu(gate) * x


def _gated_gelu(gate: jax.Array, x: jax.Array) -> jax.Array:
    return x * _exact_gelu(gate)


def _gated_gelu_by_tanh(gate: jax.Array, x: jax.Array) -> jax.Array:
    return gelu_by_tanh(gate) * x
