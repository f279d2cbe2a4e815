"""Changes of a layer's weight that adapters make, to be merged into the weight.

Weights and changes have PyTorch's layouts: d c for a linear layer, d c kh kw for a convolution, d
for biases and for norms. `delta` returns what is added to a weight; a Product is a LoRA (Hu et al.
2021), and the others are LyCORIS' (Yeh et al. 2023), whose formulas the tests repeat in PyTorch.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar, dataclass_transform

import jax
import jax.numpy as jnp
import numpy as np

Array = Any
T = TypeVar("T")


class Change(Protocol):
    """A change of a weight."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns what is added to a weight, in its shape and in float32.

        scale: the weight that the user gives the adapter.
        """
        ...


@dataclass_transform(frozen_default=True, eq_default=False)
def _change(cls: type[T]) -> type[T]:
    """Makes a class of changes a frozen dataclass and a tree of its arrays."""
    made: Any = dataclasses.dataclass(frozen=True, eq=False)(cls)
    fields = dataclasses.fields(made)
    static = [field.name for field in fields if field.metadata.get("static")]
    data = [field.name for field in fields if field.name not in static]
    return jax.tree_util.register_dataclass(made, data, static)


@_change
class Product:
    """A LoRA: the product of B and A, and of a core between them for Tucker's decomposition."""

    down: Array
    """A: r c, r c kh kw, or r c 1 1 with a core."""
    up: Array
    """B: d r, or d r 1 1."""
    factor: Array = 1.0
    """alpha / r."""
    core: Array | None = None
    """The core of Tucker's decomposition, r r kh kw."""
    bias: Array | None = None
    """The bias of B, d, which changes the layer's bias and not its weight."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns scale times the product."""
        return _full(_product(self.up, self.down, self.core), weight) * (self.factor * scale)


@_change
class LoHa:
    """The elementwise product of two products (FedPara, Hyeon-Woo et al. 2021)."""

    w1_a: Array
    w1_b: Array
    w2_a: Array
    w2_b: Array
    factor: Array = 1.0
    """alpha / r."""
    t1: Array | None = None
    """The core of the first product, r r kh kw; None without Tucker's decomposition."""
    t2: Array | None = None

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns scale times (w1_a w1_b) * (w2_a w2_b)."""
        first = _tucker_or_product(self.t1, self.w1_a, self.w1_b)
        second = _tucker_or_product(self.t2, self.w2_a, self.w2_b)
        return _full(first * second, weight) * (self.factor * scale)


@_change
class LoKr:
    """The Kronecker product of two matrices, each whole or a product (Edalati et al. 2022)."""

    w1: Array
    """l m, or the pair (l r, r m)."""
    w2: Array
    """k n or k n kh kw, the pair (k r, r n) or (k r, r (n kh kw)), or the core and that pair."""
    factor: Array = 1.0
    """alpha / r; 1 where both matrices are whole."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns scale times the Kronecker product: row i l + j of it is row i of w1, j of w2."""
        w1, w2 = _matrix(self.w1), _matrix(self.w2)
        rows, columns = weight.shape[:2]
        w2 = w2.reshape(rows // w1.shape[0], columns // w1.shape[1], -1)
        whole = w1[:, None, :, None, None] * w2[None, :, None]
        return _full(whole.reshape(rows, -1), weight) * (self.factor * scale)


@_change
class Ia3:
    """Factors of a layer's inputs or outputs (Liu et al. 2022)."""

    vector: Array
    """What is added to factors of one: d, or c on inputs."""
    on_input: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether it is the inputs that are scaled."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns scale times the weight's rows or columns times the vector."""
        vector = _float(self.vector).reshape(-1)
        axis = (1, -1) if self.on_input else (-1, 1)
        return weight * vector.reshape(*axis, *(1,) * (weight.ndim - 2)) * scale


@_change
class Difference:
    """A difference of the weight's own shape."""

    difference: Array

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns scale times the difference."""
        return _full(_float(self.difference), weight) * scale


@_change
class Rows:
    """The rows of a LoHa or LoKr of several layers in one that are those of one of them."""

    change: Any
    start: int = dataclasses.field(metadata={"static": True})
    """The number of rows before them."""
    total: int = dataclasses.field(metadata={"static": True})
    """The number of rows of all layers."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns these rows of scale times the change."""
        # Such a change depends on nothing but the weight's shape.
        whole = self.change.delta(jnp.zeros((self.total, *weight.shape[1:]), jnp.float32), scale)
        return whole[self.start : self.start + weight.shape[0]]


@_change
class Decomposed:
    """A change whose sum with the weight gets new lengths (DoRA, Liu et al. 2024)."""

    change: Any
    """The change of the direction."""
    magnitude: Array
    """The lengths of rows, d, or of columns."""
    on_columns: bool = dataclasses.field(default=False, metadata={"static": True})
    """Whether the lengths are those of columns, over the outputs and the kernel's size."""
    inside: bool = dataclasses.field(default=True, metadata={"static": True})
    """Whether the user's weight scales the change of the direction, as in PEFT, or the whole
    difference, as in the programs that read LyCORIS' files."""

    def delta(self, weight: Array, scale: Array) -> Array:
        """Returns the difference between the weight with new lengths and the weight."""
        moved = weight + self.change.delta(weight, scale if self.inside else 1.0)
        axis = 1 if self.on_columns else 0
        axes = tuple(i for i in range(weight.ndim) if i != axis)
        lengths = jnp.sqrt(jnp.sum(moved**2, axes, keepdims=True))
        shape = [1] * weight.ndim
        shape[axis] = weight.shape[axis]
        magnitude = _float(self.magnitude).reshape(shape)
        if not self.inside:
            lengths = lengths + jnp.finfo(jnp.float32).eps
        difference = moved * (magnitude / lengths) - weight
        return difference if self.inside else difference * scale


@functools.partial(jax.jit, static_argnums=3)
def merge(leaf: Array, changes: Sequence[Any], scales: Sequence[Any], kernel: bool) -> Array:
    """Adds changes to a parameter, in float32, and returns it in its dtype.

    Args:
        leaf: a parameter in the layout of the tree.
        changes: the changes.
        scales: the weight of each change.
        kernel: whether the parameter is a kernel, whose axes PyTorch has in another order.
    """
    weight = leaf.astype(jnp.float32)
    weight = _to_torch(weight) if kernel else weight
    total = weight + sum(c.delta(weight, s) for c, s in zip(changes, scales, strict=True))
    return (_to_flax(total) if kernel else total).astype(leaf.dtype)


def check_change(change: Any, shape: tuple[int, ...]) -> str | None:
    """Returns why a change does not fit a weight of a shape in PyTorch's layout; None if it does.

    The shape of a 1x1 convolution and of a linear layer are the same to a change.
    """
    weight = jax.ShapeDtypeStruct(shape, np.float32)
    bias = getattr(change, "bias", None)
    if bias is not None and bias.shape != shape[:1]:
        return f"its bias is {bias.shape}"
    try:
        found = jax.eval_shape(lambda w: change.delta(w, 1.0), weight)
    except (TypeError, ValueError, ZeroDivisionError, IndexError) as error:
        return str(error).splitlines()[0] or type(error).__name__
    return None if found.shape == shape else f"it makes {found.shape}"


def _to_torch(x: Array) -> Array:
    return x.transpose(3, 2, 0, 1) if x.ndim == 4 else x.T


def _to_flax(x: Array) -> Array:
    return x.transpose(2, 3, 1, 0) if x.ndim == 4 else x.T


def _float(x: Array) -> Array:
    return jnp.asarray(x).astype(jnp.float32)


def _flat(x: Array) -> Array:
    """Returns a matrix of what may be a convolution's kernel: r c kh kw -> r (c kh kw)."""
    x = _float(x)
    return x.reshape(x.shape[0], -1)


def _full(change: Array, weight: Array) -> Array:
    """Returns a change in the shape of the weight; both have the outputs first."""
    if change.size != weight.size or change.shape[:1] != weight.shape[:1]:
        raise ValueError(f"it makes {change.shape}")
    return change.reshape(weight.shape)


def _product(up: Array, down: Array, core: Array | None) -> Array:
    if core is None:
        return _flat(up) @ _flat(down)
    return jnp.einsum("mn...,im,nj->ij...", _float(core), _flat(up), _flat(down))


def _tucker_or_product(core: Array | None, a: Array, b: Array) -> Array:
    """Returns a b, or with a core the sum of core[i, j] a[i] b[j], as LyCORIS stores it."""
    if core is None:
        return _flat(a) @ _flat(b)
    return jnp.einsum("ij...,ip,jr->pr...", _float(core), _flat(a), _flat(b))


def _matrix(factors: Any) -> Array:
    if not isinstance(factors, tuple):
        return _float(factors)
    *core, a, b = factors
    return _tucker_or_product(core[0] if core else None, a, b)
