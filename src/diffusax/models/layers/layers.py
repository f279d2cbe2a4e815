"""The layers that all networks share: Flax's own, with layout, accumulation and lowering fixed.

Every layer computes in the dtype of its parameters, so the dtype of a network is that of its
parameter tree. Images are channels last, `b h w c`.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn.initializers import lecun_normal, normal, ones, zeros

from diffusax.models.adapters.low_rank import Base, LowRank, Mixed
from diffusax.models.arranged import Arranged, arranged
from diffusax.models.layers.rngs import shaped
from diffusax.models.ops.conv import conv2d
from diffusax.models.ops.int8 import linear, rounds_inputs
from diffusax.models.ops.layer_input import LayerInput, Tokens, as_array
from diffusax.models.ops.matmul import apart, columns, matmul, split_matmul
from diffusax.models.ops.norms import group_norm, group_norm_in_bands, layer_norm, rms_norm
from diffusax.models.quantized import Kernel, Quantized
from diffusax.runtime.devices.host import in_host_memory
from diffusax.runtime.devices.lowering import by_platform
from diffusax.runtime.devices.splitting import (
    in_order_of_devices,
    split_axis,
    split_widths,
    tensor_parts,
)

_DENSE: dict[str, Any] = {"kernel_init": shaped(lecun_normal()), "bias_init": shaped(zeros)}
_NORM: dict[str, Any] = {"scale_init": shaped(ones), "bias_init": shaped(zeros)}


class Linear(nnx.Linear):
    """A linear layer. x: ... c -> ... d."""

    adapters: LowRank | Mixed | None = None
    """The layer's adapters, or those in training, while a network is traced with some; x is b ... c
    then."""
    shift: jax.Array | None = None
    """A bias in the place of one that the layer has not, see `Merged`."""

    def __init__(self, c: int, d: int, *, bias: bool = True, rngs: nnx.Rngs):
        super().__init__(c, d, use_bias=bias, rngs=rngs, **_DENSE)

    def __call__(self, x: Tokens) -> jax.Array:
        kernel, bias = self._parameters()
        if self.adapters is None:
            return linear(x, kernel, bias)
        if isinstance(kernel, Quantized) and rounds_inputs(x.shape, kernel):
            y, other = linear(x, kernel, bias), as_array(x).astype(kernel.dtype)
        else:
            own, other = apart(as_array(x).astype(kernel.dtype), 2)
            y = linear(own, kernel, bias)
        return y + self.adapters.linear(other, Base(y, kernel, bias))

    def raised(self, x: Tokens, h: jax.Array) -> jax.Array:
        """Returns the layer's result with adapters whose product with A is h, b ... R."""
        assert isinstance(self.adapters, Mixed)
        return linear(x, *self._parameters()) + self.adapters.raised(h)

    def _parameters(self) -> tuple[Kernel, jax.Array | None]:
        return self.kernel.get_value(), self.shift if self.bias is None else self.bias[...]


class ArrangedLinear(Linear):
    """A linear layer whose kernel has the channels of several layers, or inputs, side by side.

    On a mesh with a tensor axis it reads the kernel in the order of the devices, see
    `models.arranged`.
    """

    axis: ClassVar[int]
    """The axis of the kernel along which they lie."""
    widths: tuple[int, ...]
    """Their channels."""

    @property
    def parts(self) -> int:
        """The number of the mesh's devices that have a part of each; 1 where they cannot."""
        parts = tensor_parts()
        return 1 if any(width % parts for width in self.widths) else parts

    @property
    def is_streamed(self) -> bool:
        """Whether the kernel lies in the host's memory, and is copied where it is read."""
        return in_host_memory(self.kernel.get_raw_value())

    def arranged(self) -> Any:
        """Returns the kernel in the order of the devices, which may stand in the kernel's place."""
        kernel: Any = self.kernel.get_value()
        return arranged(kernel, self.axis, self.widths, self.parts)

    def _parameters(self) -> tuple[Kernel, jax.Array | None]:
        kernel, bias = super()._parameters()
        return kernel.plain() if isinstance(kernel, Arranged) else kernel, bias


class SplitLinear(ArrangedLinear):
    """Linear layers that stand side by side in one kernel. x: ... c -> ... d for each width d."""

    axis = -1

    def __init__(
        self,
        c: int,
        widths: Sequence[int],
        *,
        bias: bool = True,
        read_together: Sequence[int] = (),
        rngs: nnx.Rngs,
    ):
        """Builds the layers.

        Args:
            c: the input's channels.
            widths: the outputs' channels.
            bias: whether they have biases.
            read_together: how many layers that follow each other are read at once, for each reader;
                by default all are.
            rngs: the keys of the parameters.
        """
        super().__init__(c, sum(widths), bias=bias, rngs=rngs)
        self.widths, self.read_together = tuple(widths), tuple(read_together)

    def __call__(  # type: ignore[override]
        self, x: Tokens
    ) -> tuple[jax.Array, ...]:
        parts = self.parts
        if parts == 1 and self.adapters is not None:
            return split_widths(super().__call__(x), self.widths)
        kernel, bias = self._on_devices() if parts > 1 else self._parameters()
        if isinstance(kernel, Quantized) and rounds_inputs(x.shape, kernel):
            ys = split_widths(linear(x, kernel, bias), self.widths, parts)
        else:
            ys = split_matmul(as_array(x), kernel, bias, self.widths, self.read_together, parts)
        return ys if self.adapters is None else self._adapted(x, ys, kernel)

    def _on_devices(self) -> tuple[Kernel, jax.Array | None]:
        """Returns the kernel and the bias in the order of the devices."""
        kernel = self.arranged()
        assert isinstance(kernel, Arranged)
        if self.bias is None:
            return kernel.values, None
        return kernel.values, in_order_of_devices(self.bias[...], -1, self.widths, self.parts)

    def _adapted(self, x: Tokens, ys: Sequence[jax.Array], kernel: Kernel) -> tuple[jax.Array, ...]:
        """Adds what adapters add to each layer. kernel: in the order of the devices."""
        given, found = as_array(x).astype(kernel.dtype), []
        kernels = columns(kernel, self.widths, self.parts)
        biases: Sequence[Any] = [None] * len(ys)
        if self.bias is not None:
            biases = split_widths(self.bias[...], self.widths)
        adapters: Any = self.adapters
        for own, *base in zip(adapters.columns(self.widths), ys, kernels, biases):
            own = own._replace(up=split_axis(own.up, -1))
            found.append(base[0] + own.linear(given, Base(*base)))
        return tuple(found)


def project(x: Tokens, *layers: Linear) -> tuple[jax.Array, ...]:
    """Returns what each of several layers makes of x. x: b t c -> b t d each.

    The adapters of layers that their module's `reads_together` names read x in one product.
    """
    down = getattr(layers[0].adapters, "together", None)
    each: Sequence[Tokens] = (x,) * (len(layers) + 1)
    if not isinstance(x, LayerInput):
        each = apart(x, len(layers) + (down is not None))
    if down is None:
        return tuple(layer(own) for layer, own in zip(layers, each))
    h = matmul(as_array(each[-1]).astype(down.dtype), down)
    lowered = split_widths(h, [h.shape[-1] // len(layers)] * len(layers))
    return tuple(layer.raised(own, low) for layer, own, low in zip(layers, each, lowered))


class Conv2d(nnx.Conv):
    """A convolution with PyTorch's symmetric padding or explicit (low, high) pairs.

    x: b h w c -> b h' w' d.
    """

    adapters: LowRank | Mixed | None = None
    """The layer's adapters, or those in training, while a network is traced with some."""

    def __init__(
        self,
        c: int,
        d: int,
        kernel_size: int | tuple[int, int],
        *,
        stride: int = 1,
        padding: int | tuple[tuple[int, int], tuple[int, int]] | None = None,
        bias: bool = True,
        rngs: nnx.Rngs,
    ):
        kernel = (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size
        super().__init__(c, d, kernel, use_bias=bias, rngs=rngs, **_DENSE)
        if padding is None:
            padding = ((kernel[0] // 2, kernel[0] // 2), (kernel[1] // 2, kernel[1] // 2))
        self.stride = stride
        self.pad = ((padding, padding), (padding, padding)) if isinstance(padding, int) else padding

    def __call__(self, x: jax.Array, *, rows: tuple[int, int] | None = None) -> jax.Array:
        """Convolves a map. rows: those of zeros above and below it, by default the layer's own."""
        kernel: Kernel = self.kernel.get_value()
        x = x.astype(kernel.dtype)
        padding = self.pad if rows is None else (rows, self.pad[1])
        y = conv2d(x, kernel, stride=self.stride, padding=padding)
        bias = None if self.bias is None else self.bias[...]
        y = y if bias is None else y + bias
        if self.adapters is None:
            return y
        base = Base(y, kernel, bias)
        return y + self.adapters.conv(x, base, stride=self.stride, padding=padding)


class GroupNorm(nnx.GroupNorm):
    """Group normalisation with float32 statistics (Wu and He 2018). x: b ... c -> b ... c.

    shift: b c, which is added to all pixels of x before.
    """

    def __init__(self, c: int, groups: int, *, eps: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(c, num_groups=groups, epsilon=eps, rngs=rngs, **_NORM)

    def __call__(self, x: jax.Array, shift: jax.Array | None = None) -> jax.Array:
        arguments = (x, *_gain_and_bias(self), *(() if shift is None else (shift,)))
        return group_norm(*arguments, groups=self.num_groups, eps=self.epsilon)

    def convolved(self, form: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        """Returns a convolution of the normalised map, which a GPU computes in two bands of rows.

        x: b h w c -> b h w d. form: see `group_norm_in_bands`; the rows are `None` for those of
        the whole map.
        """
        bands = partial(group_norm_in_bands, form, groups=self.num_groups, eps=self.epsilon)
        forms: dict[str, Any] = {"bands": bands, "whole": lambda x, *_: form(self(x), None)}
        choose = lambda p: "bands" if p == "cuda" else "whole"  # noqa: E731
        found: jax.Array = by_platform(choose, forms, x, *_gain_and_bias(self))
        return found


class LayerNorm(nnx.LayerNorm):
    """Layer normalisation with float32 statistics. x: ... c -> ... c."""

    def __init__(self, c: int, *, eps: float = 1e-5, rngs: nnx.Rngs):
        super().__init__(c, epsilon=eps, rngs=rngs, **_NORM)

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, *_gain_and_bias(self), eps=self.epsilon)


class RMSNorm(nnx.RMSNorm):
    """Root mean square normalisation in float32 (Zhang and Sennrich 2019). x: ... c -> ... c."""

    def __init__(self, c: int, *, eps: float = 1e-6, rngs: nnx.Rngs):
        super().__init__(c, epsilon=eps, rngs=rngs, scale_init=shaped(ones))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale: Any = self.scale
        return rms_norm(x, scale[...], eps=self.epsilon)


class CentredRMSNorm(nnx.Module):
    """An RMSNorm that multiplies by one more than its parameter. x: ... c -> ... c."""

    def __init__(self, c: int, *, eps: float, rngs: nnx.Rngs):
        self.epsilon = eps
        self.centred_scale = nnx.Param(shaped(zeros)(rngs.params(), (c,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale: Any = self.centred_scale
        return rms_norm(x, scale[...], eps=self.epsilon, centre=1.0)


class Embedding(nnx.Embed):
    """A table lookup. ids: ... -> ... c."""

    def __init__(self, num: int, c: int, *, rngs: nnx.Rngs):
        super().__init__(num, c, rngs=rngs, embedding_init=shaped(normal(0.02)))

    def __call__(self, ids: jax.Array) -> jax.Array:
        return self.embedding[...][ids]


def _gain_and_bias(norm: Any) -> tuple[jax.Array, jax.Array]:
    return norm.scale[...], norm.bias[...]
