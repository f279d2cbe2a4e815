"""Multiplies tokens by kernels, as integers where a kernel is int8 and integers are faster."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.ops.layer_input import Int8Tokens, Tokens, as_array, as_input, on_one_device
from diffusax.models.ops.matmul import matmul
from diffusax.models.quantized import Kernel, Quantized
from diffusax.models.streaming import computed
from diffusax.runtime.devices.lowering import (
    cuda_capability,
    device_kinds,
    int8_choice,
    is_plain,
    known_platform,
    known_sizes,
)
from diffusax.runtime.devices.splitting import context_parts

FASTER = {
    "TPU v5 lite": (512, 1024, 1024),
    "TPU v5e": (512, 1024, 1024),
    "TPU v6 lite": (512, 1024, 1024),
    "TPU v6e": (512, 1024, 1024),
}
"""Where products of integers are faster: the fewest tokens, inputs and outputs, by JAX's kind of
device.

By libtpu's own estimates of a layer that rounds, multiplies and scales against one in bfloat16; see
benchmarks/int8_compile.py. XLA estimates no time of the kernel for NVIDIA's GPUs.
"""


def linear(x: Tokens, kernel: Kernel, bias: jax.Array | None = None) -> jax.Array:
    """Computes x kernel + bias. x: ... c, kernel: c d, bias: d -> ... d, in the kernel's dtype.

    Where `rounds_inputs` says so, tokens are rounded to int8, and the product is one of integers,
    exact in int32, that is scaled to float32 and rounded once. Gradients are those of the product
    with the kernel multiplied out, as if nothing was rounded (Bengio et al. 2013, "straight
    through").
    """
    if isinstance(kernel, Quantized) and rounds_inputs(x.shape, kernel):
        tokens = as_input(x)
        given = tokens.rounded(kernel.rotation)
        return computed(_product(tokens.form, tokens.arguments, given, kernel, bias))
    return matmul(as_array(x).astype(kernel.dtype), kernel, bias)


def rounds_inputs(shape: Sequence[Any], kernel: Quantized) -> bool:
    """Returns whether a layer computes with integers, see `int8_activations`.

    shape: that of the tokens, ... c.
    """
    choice = int8_choice()
    if choice == "off" or kernel.values.dtype != jnp.int8 or not kernel.has_channel_scales:
        return False
    if choice == "on":
        return True
    # Without a rotation a token's few large channels leave the others too few of the 255 numbers.
    if not kernel.rotation or is_plain() or known_platform() not in ("tpu", "cuda"):
        return False
    *tokens, c = known_sizes(shape)
    least = [FASTER.get(kind, (math.inf,) * 3) for kind in device_kinds()]
    sizes = math.prod(tokens), c, kernel.shape[-1]
    return all(size >= limit for limits in least for size, limit in zip(sizes, limits))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(
    form: Callable[..., jax.Array],
    arguments: tuple[jax.Array, ...],
    tokens: Int8Tokens,
    kernel: Quantized,
    bias: jax.Array | None,
) -> jax.Array:
    """Multiplies form(*arguments), which was rounded to tokens before."""
    del form, arguments
    return multiply(tokens, kernel, bias)


def _forward(form: Callable[..., jax.Array], *given: Any) -> tuple[jax.Array, Any]:
    return _product(form, *given), given


def _backward(form: Callable[..., jax.Array], given: Any, g: jax.Array) -> tuple[Any, ...]:
    arguments, tokens, kernel, bias = given

    def multiplied_out(arguments: Any, scale: jax.Array, bias: Any) -> jax.Array:
        own = dataclasses.replace(kernel, scale=scale)
        return matmul(form(*arguments).astype(kernel.dtype), own, bias)

    _, pull = jax.vjp(multiplied_out, arguments, kernel.scale, bias)
    of_arguments, of_scale, of_bias = pull(g)
    none = [np.zeros(x.shape, jax.dtypes.float0) for x in (tokens.values, kernel.values)]
    of_tokens = Int8Tokens(none[0], jnp.zeros_like(tokens.scale))  # type: ignore[arg-type]
    return (
        of_arguments,
        of_tokens,
        dataclasses.replace(kernel, values=none[1], scale=of_scale),
        of_bias,
    )


_product.defvjp(_forward, _backward)


def multiply(tokens: Int8Tokens, kernel: Quantized, bias: jax.Array | None) -> jax.Array:
    """Multiplies integers, then scales. tokens: ... c -> ... d, in the kernel's dtype.

    On TPUs XLA's own kernel of the product does all of it, and what follows, such as a gate and a
    residual, before it writes the result. On NVIDIA's GPUs there is a kernel for it.
    """
    shape = tokens.values.shape
    # Images and tokens in one axis could not be split by tokens.
    whole = context_parts() > 1
    given = Int8Tokens(*(x if whole else x.reshape(-1, x.shape[-1]) for x in tokens))
    form = _on_cuda if known_platform() == "cuda" else _scaled_sums
    return form(given, kernel, bias).reshape(*shape[:-1], kernel.shape[-1])


def _on_cuda(tokens: Int8Tokens, kernel: Quantized, bias: jax.Array | None) -> jax.Array:
    """Multiplies by the kernel for NVIDIA's GPUs where that takes the shapes."""
    from diffusax.models.ops.product_kernel import multiply_scaled, takes

    known = all(isinstance(n, int) for n in tokens.values.shape) and tokens.values.ndim == 2
    old = (cuda_capability() or (0, 0)) < _MIN_CAPABILITY
    if old or not known or not takes(kernel) or not on_one_device():
        return _scaled_sums(tokens, kernel, bias)
    return multiply_scaled(tokens, kernel, bias)


_MIN_CAPABILITY = (8, 0)
"""The compute capability from which tensor cores multiply 32 integers of eight bits at once."""


def _scaled_sums(tokens: Int8Tokens, kernel: Quantized, bias: jax.Array | None) -> jax.Array:
    values, scale = tokens
    over_inputs = (((values.ndim - 1,), (0,)), ((), ()))
    sums = jax.lax.dot_general(values, kernel.values, over_inputs, preferred_element_type=jnp.int32)
    y = sums.astype(jnp.float32) * scale * kernel.scale
    if bias is not None:
        y = y + bias.astype(jnp.float32)
    return y.astype(kernel.dtype)
