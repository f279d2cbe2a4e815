"""Tokens on their way into linear layers, which read them as they are or rounded to int8."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.nnx.tracers import TraceState

from diffusax.models.quantized import hadamard
from diffusax.runtime.devices.lowering import known_platform, plain_lowerings


class Int8Tokens(NamedTuple):
    """Tokens rounded to int8: values * scale."""

    values: jax.Array
    """... c, int8, from -127 to 127."""
    scale: jax.Array
    """... 1, float32: the largest number of each token, divided by 127."""


class LayerInput:
    """Tokens that are made when a layer reads them, once for all layers that read them alike.

    What makes them is a function of arrays that treats tokens alike, such as a norm and a
    modulation. A layer that computes with integers takes them from one kernel that makes and rounds
    them, and so they are not written before they are rounded.
    """

    def __init__(
        self, form: Callable[..., jax.Array], x: jax.Array, *others: jax.Array, width: int = 0
    ):
        """Keeps what makes the tokens.

        Args:
            form: returns the tokens, ... width, of the other arguments.
            x: ... c; the tokens have its dtype.
            *others: further arrays ... d with the same tokens, or vectors that broadcast to all of
                them.
            width: the channels of a token, those of x by default.
        """
        self.form, self.arguments = form, (x, *others)
        self.shape: tuple[int, ...] = (*x.shape[:-1], width or x.shape[-1])
        self.dtype = x.dtype
        self._made: dict[int | None, Any] = {}
        self._trace = TraceState()

    @property
    def dense(self) -> jax.Array:
        """The tokens as they are, ... c."""
        found: jax.Array = self._once(None, lambda: self.form(*self.arguments))
        return found

    def rounded(self, rotation: int) -> Int8Tokens:
        """Returns the tokens in int8, multiplied by `hadamard` of `rotation` before if it is not 0.

        No gradient goes through them.
        """

        def make() -> Int8Tokens:
            arguments = jax.lax.stop_gradient(self.arguments)
            return _round(self.form, self.shape, rotation, arguments)

        found: Int8Tokens = self._once(rotation, make)
        return found

    def _once(self, key: int | None, make: Callable[[], Any]) -> Any:
        if not self._trace.is_valid():
            # What is made inside of a loop or a branch is not known outside.
            return make()
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]


Tokens = jax.Array | LayerInput
"""Tokens, ... c, as what linear layers read takes them."""


def as_input(x: Tokens) -> LayerInput:
    """Returns tokens that are there already as `LayerInput`."""
    return x if isinstance(x, LayerInput) else LayerInput(_same, x)


def as_array(x: Tokens) -> jax.Array:
    """Returns tokens as they are."""
    return x.dense if isinstance(x, LayerInput) else x


def _same(x: jax.Array) -> jax.Array:
    return x


def to_int8(x: jax.Array, rotation: int = 0) -> Int8Tokens:
    """Rounds each token to the nearest of 255 numbers (Jacob et al. 2018, section 2.1, symmetric).

    Args:
        x: ... c.
        rotation: the channels in a group that is multiplied by `hadamard` before; 0 for none.
    """
    if rotation:
        parts = x.reshape(*x.shape[:-1], -1, rotation)
        matrix = jnp.asarray(hadamard(rotation), x.dtype)
        x = jnp.matmul(parts, matrix, preferred_element_type=jnp.float32).reshape(x.shape)
    wide = x.astype(jnp.float32)
    top = jnp.abs(wide).max(-1, keepdims=True)
    scale = jnp.where(top > 0, top / np.float32(127), np.float32(1))
    return Int8Tokens(jnp.round(wide / scale).astype(jnp.int8), scale)


def _round(
    form: Callable[..., jax.Array],
    shape: tuple[int, ...],
    rotation: int,
    arguments: tuple[jax.Array, ...],
) -> Int8Tokens:
    if known_platform() == "tpu" and _fits_kernel(shape, rotation, arguments):
        from diffusax.models.ops.rounding_kernel import round_tokens

        return Int8Tokens(*round_tokens(form, arguments, width=shape[-1], rotation=rotation))
    with plain_lowerings():
        return to_int8(form(*arguments), rotation)


def _fits_kernel(shape: tuple[int, ...], rotation: int, arguments: Any) -> bool:
    """Returns whether the kernel for TPUs takes such tokens, on one device."""
    from diffusax.models.ops.rounding_kernel import rotated_width

    whole = shape[-1] % max(128, rotated_width(rotation)) == 0
    half = arguments[0].dtype == jnp.bfloat16
    closed = all(isinstance(n, int) for n in shape)
    return len(shape) == 3 and whole and half and closed and on_one_device()


def on_one_device() -> bool:
    """Returns whether a program is traced for one device; Pallas' kernels take no others."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.empty or mesh.size == 1
