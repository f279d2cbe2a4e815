"""Low-rank adapters (LoRA, Hu et al. 2021) as more rank of a network's layers.

A linear layer with adapters computes y = x W + ((x A + o) * s) B, where A: c R and B: R d hold the
ranks of all adapters side by side, and s: b R holds the weight of each column for each row of the
batch. For a convolution A is a convolution to R channels, and B a product. o: R is one for columns
whose row of B is an adapter's bias, and zero for the others. Which adapters there are, and what
they weigh in each row, is data: other ones compile nothing. Where all rows weigh them alike, a
run multiplies s into B before its steps, or adds A s B to W; see `mixing`.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.ops.conv import Padding, conv2d
from diffusax.models.ops.matmul import matmul
from diffusax.models.parameter_tree import ordered_leaves, path_name
from diffusax.models.quantized import Kernel
from diffusax.runtime.devices.splitting import split_widths


class Base(NamedTuple):
    """A layer while it is traced, and what it returns without adapters."""

    y: jax.Array
    """The layer's own result, b ... d."""
    kernel: Kernel
    bias: jax.Array | None


class LowRank(NamedTuple):
    """The adapters of one layer. Their alpha / rank is in `up`."""

    down: Any
    """A: c R, or kh kw c R with the size of the convolution's kernel."""
    up: Any
    """B: R d."""
    which: Any
    """The number n of the adapter that each of the R columns belongs to, R, int32; -1 - n for a
    column that is one whatever the input is, so that B's row is a bias."""
    scale: Any = None
    """s: b R (or 1 R), float32, the weight of each column in each row; None outside of a trace."""

    def linear(self, x: jax.Array, base: Base) -> jax.Array:
        """Returns what the adapters add to a linear layer. x: b ... c -> b ... d."""
        return self._raised(matmul(x, self.down))

    def conv(self, x: jax.Array, base: Base, *, stride: int, padding: Padding) -> jax.Array:
        """Returns what the adapters add to a convolution. x: b h w c -> b h' w' d."""
        return self._raised(conv2d(x, self.down, stride=stride, padding=padding))

    def columns(self, widths: Sequence[int]) -> list["LowRank"]:
        """Returns the adapters of the layers that stand side by side in one, of these widths."""
        return [self._replace(up=up) for up in split_widths(self.up, widths)]

    def mixed(self, weights: jax.Array) -> "Mixed":
        """Returns the adapters with weights, n, that are those of all rows."""
        # A layer's own gather, as compilers make one kernel for all layers of a shape then.
        scale = jnp.take(jnp.asarray(weights, jnp.float32), _number_of(self.which))
        up = self.up.astype(jnp.float32) * scale[:, None]
        bias = jnp.where((self.which < 0)[:, None], up, 0).sum(0)
        return Mixed(self.down, up.astype(self.up.dtype), bias.astype(self.up.dtype))

    def _raised(self, h: jax.Array) -> jax.Array:
        """Weighs a product with A, and multiplies it with B. h: b ... R -> b ... d."""
        if len(self.scale) not in (1, len(h)):
            raise ValueError(
                f"adapters' weights must have one row for each of the {len(h)} rows of a layer's "
                f"input, or one for all (got {len(self.scale)})"
            )
        scale = self.scale.reshape(len(self.scale), *(1,) * (h.ndim - 2), -1)
        constant = (self.which < 0).astype(jnp.float32)
        h = ((h.astype(jnp.float32) + constant) * scale).astype(h.dtype)
        return matmul(h, self.up)


class Merged(NamedTuple):
    """The adapters of a linear layer without bias, whose kernel has their product already."""

    bias: Any
    """The sum of the adapters' weighed biases, d."""


class Mixed(NamedTuple):
    """The adapters of one layer where all rows weigh them alike, see `mixing`."""

    down: Any
    """A: c R, or kh kw c R with the size of the convolution's kernel."""
    up: Any
    """s B: R d."""
    bias: Any
    """The sum of the adapters' weighed biases, d."""
    together: Any = None
    """A of all layers that read what this one reads, side by side, c (R + ...); the first of them
    has it."""

    def linear(self, x: jax.Array, base: Base) -> jax.Array:
        """Returns what the adapters add to a linear layer. x: b ... c -> b ... d."""
        return self.raised(matmul(x, self.down))

    def conv(self, x: jax.Array, base: Base, *, stride: int, padding: Padding) -> jax.Array:
        """Returns what the adapters add to a convolution. x: b h w c -> b h' w' d."""
        return self.raised(conv2d(x, self.down, stride=stride, padding=padding))

    def raised(self, h: jax.Array) -> jax.Array:
        """Multiplies a product with A with B. h: b ... R -> b ... d."""
        return matmul(h, self.up, self.bias)

    def merged(self, kernel: jax.Array) -> jax.Array:
        """Returns the layer's kernel with the adapters' product added."""
        return kernel + matmul(self.down, self.up)

    def columns(self, widths: Sequence[int]) -> list["Mixed"]:
        """Returns the adapters of the layers that stand side by side in one, of these widths."""
        parts = zip(split_widths(self.up, widths), split_widths(self.bias, widths))
        return [Mixed(self.down, up, bias) for up, bias in parts]


Layers = Mapping[str, LowRank]
"""The adapters of a network's layers, by the layers' paths in the parameter tree, joined by dots:
`mid_block.attentions.0.proj_in`."""


class Adapters(NamedTuple):
    """The adapters of a network, and how much each counts.

    layers: the adapters by layer. weights: b n, float32, the weight of each of n adapters in each
    row of the network's batch; 1 n where all rows agree.
    """

    layers: Layers | Mapping[str, Mixed | Merged]
    weights: Any

    def by_layer(self) -> Layers | Mapping[str, Mixed | Merged]:
        """Returns the adapters of each layer, with the weight of each column in each row."""
        own = {path: x for path, x in self.layers.items() if isinstance(x, LowRank)}
        return _weighed(own, self.weights) if own else self.layers

    def for_rows(self, rows: int) -> "Adapters":
        """Returns the adapters for more rows, of which those that follow each other share one's."""
        return self._replace(weights=jnp.repeat(self.weights, rows // len(self.weights), axis=0))


def _weighed(layers: Layers, weights: Any) -> dict[str, LowRank]:
    """Returns the adapters of each layer with the weight of each column. weights: b n."""
    # One gather for all layers, which fuses with their products.
    columns = [layer.which for layer in layers.values()]
    ends = np.cumsum([len(which) for which in columns])[:-1]
    which = _number_of(jnp.concatenate(columns))
    taken = jnp.take(jnp.asarray(weights, jnp.float32), which, axis=1)
    pairs = zip(layers.items(), jnp.split(taken, ends, axis=1), strict=True)
    return {path: layer._replace(scale=scale) for (path, layer), scale in pairs}


def _number_of(which: jax.Array) -> jax.Array:
    """Returns the number of the adapter of each column, see `LowRank.which`."""
    return jnp.where(which < 0, -1 - which, which)


def adapter_options(params: Mapping[str, Any], name: str, weights: Any) -> dict[str, Any]:
    """Returns the argument of `Network.apply` for a component's adapters; nothing without them.

    Args:
        params: parameters by component, and under "adapters" the layers of each one's adapters.
        name: the component.
        weights: see `Adapters`; None without adapters.
    """
    layers = params.get("adapters", {}).get(name)
    return {} if layers is None or weights is None else {"adapters": Adapters(layers, weights)}


class Attachable(Protocol):
    """Adapters of a network that can be given to its layers: `Adapters`, or those in training."""

    def by_layer(self) -> Mapping[str, Any]:
        """Returns for each layer what has the methods of `LowRank`, by path."""

    def for_rows(self, rows: int) -> Any:
        """Returns the adapters for an input of this number of rows."""


def attach(module: Any, adapters: Attachable) -> None:
    """Gives the layers of a module their adapters, for one trace.

    Raises:
        ValueError: the module has no layer of that path.
    """
    for path, given in adapters.by_layer().items():
        # An attribute of this trace's module alone, which is no part of Flax's state.
        name, value = ("shift", given.bias) if isinstance(given, Merged) else ("adapters", given)
        object.__setattr__(_layer(module, path), name, value)


def _layer(module: Any, path: str) -> Any:
    layer = layer_at(module, path)
    if not hasattr(layer, "adapters"):
        raise ValueError(f"adapters have the layer {path!r}, which {type(module).__name__} lacks")
    return layer


@functools.lru_cache(64)
def layer_shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the parameters of a network's layers, by path: `conv_in.kernel`."""
    leaves = ordered_leaves(network.shapes)
    return {path_name(path): tuple(leaf.shape) for path, leaf in leaves if len(path) > 1}


@functools.lru_cache(64)
def kernel_shapes(network: Any) -> dict[str, tuple[int, ...]]:
    """Returns the layers of a network that take adapters, with their kernels' shapes, by path.

    A linear layer's kernel is c d, a convolution's kh kw c d. The networks of other libraries have
    no such layers.
    """
    named = ((name.removesuffix(".kernel"), name, x) for name, x in layer_shapes(network).items())
    return {path: shape for path, name, shape in named if path != name}


def adapted_networks(
    networks: Sequence[Any], layers: Sequence[Layers | None], weights: Any
) -> tuple[Any, ...]:
    """Returns the networks with their adapters, and those unchanged that have none.

    layers: the adapters of each network; empty for none at all. weights: n m, of m adapters in each
    of n rows of inputs.
    """
    pairs = zip(networks, layers, strict=True) if layers else ((net, None) for net in networks)
    return tuple(
        net if own is None else AdaptedNetwork(net, Adapters(own, weights)) for net, own in pairs
    )


@dataclasses.dataclass(frozen=True, eq=False)
class AdaptedNetwork:
    """A network that is called with adapters, in the place of one without; for one trace.

    Where the first input has more rows than there are weights, as texts of several windows have,
    the rows that follow each other share their weights.
    """

    network: Any
    adapters: Attachable

    def __getattr__(self, name: str) -> Any:
        return getattr(self.network, name)

    def apply(self, params: Any, first: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Calls the network with its adapters, see `Network.apply`."""
        adapters = self.adapters.for_rows(len(first))
        return self.network.apply(params, first, *args, adapters=adapters, **kwargs)


def layer_at(module: Any, path: str) -> Any:
    """Returns the layer of a module at a path joined by dots; None where there is none."""
    layer = module
    for part in path.split("."):
        try:
            layer = layer[int(part)] if part.isdecimal() else getattr(layer, part)
        except (AttributeError, IndexError, TypeError):
            return None
    return layer
