"""What a LoRA's tensors add to a parameter, and the parameters to which it is added.

A change is the tensors of a layer that concern one parameter, under the names of `files.Parts`,
with a factor in the place of alpha and scale. Weights and changes have PyTorch's layouts: d c for a
linear layer, d c kh kw for a convolution, d for biases and for norms. The formulas are LoRA's (Hu
et al. 2021), DoRA's (Liu et al. 2024), IA3's (Liu et al. 2022) and LyCORIS' (Yeh et al. 2023),
which the tests repeat in PyTorch.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.lora.files import ROWS
from diffusax.models.parameter_tree import replaces
from diffusax.models.quantized import dense

Array = Any
Change = Mapping[str, Array]
"""down and up (and mid), or hada_*, or lokr_*, with a factor, and with magnitude (PEFT's DoRA) or
dora_scale (LyCORIS'); or weight (and on_input), IA3's; or diff, of the parameter's own shape."""
_LENGTHS = ("magnitude", "dora_scale")


@functools.partial(jax.jit, static_argnums=3)
def merge(leaf: Array, changes: Sequence[Change], scales: Sequence[Any], kernel: bool) -> Array:
    """Adds changes to a parameter, in float32, and returns it in its dtype.

    Args:
        leaf: a parameter in the layout of the tree; one of eight bits stays one, rounded anew.
        changes: the changes.
        scales: the weight that the user gives each change.
        kernel: whether the parameter is a kernel, whose axes PyTorch has in another order.
    """
    weight = dense(leaf).astype(jnp.float32)
    n = weight.ndim
    weight = weight.transpose(n - 1, n - 2, *range(n - 2)) if kernel else weight
    total = weight + sum(delta(c, weight, s) for c, s in zip(changes, scales, strict=True))
    total = total.transpose(*range(2, n), 1, 0) if kernel else total
    return leaf.refilled(total) if replaces(leaf) else total.astype(leaf.dtype)


def delta(change: Change, weight: Array, scale: Array) -> Array:
    """Returns what a change adds to a weight, in its shape and in float32.

    DoRA gives the sum of weight and change new lengths. The user's weight scales the change alone
    in PEFT, and the whole difference in the programs that read LyCORIS' files.

    scale: the weight that the user gives the LoRA.
    """
    name = next((name for name in _LENGTHS if name in change), None)
    if name is None:
        return _added(change, weight) * (change.get("factor", 1.0) * scale)
    inside, lengths = name == "magnitude", change[name]
    moved = weight + _added(change, weight) * (change["factor"] * (scale if inside else 1.0))
    # Lengths of columns are over the outputs and the kernel's size.
    axis = int(not inside and lengths.shape[0] == 1 and lengths.size > 1)
    others = tuple(i for i in range(weight.ndim) if i != axis)
    found = jnp.sqrt(jnp.sum(moved**2, others, keepdims=True))
    wanted = _float(lengths).reshape([n if i == axis else 1 for i, n in enumerate(weight.shape)])
    if inside:
        return moved * (wanted / found) - weight
    return (moved * (wanted / (found + jnp.finfo(jnp.float32).eps)) - weight) * scale


def misfit(change: Change, shape: tuple[int, ...]) -> str | None:
    """Returns why a change does not fit a weight of a shape in PyTorch's layout; None if it does.

    The shape of a 1x1 convolution and of a linear layer are the same to a change.

    Raises:
        KeyError: the change lacks a tensor.
    """
    wanted = [(change, shape)]
    if ROWS in change:
        whole = {k: x for k, x in change.items() if k not in (ROWS, *_LENGTHS)}
        wanted.insert(0, (whole, (int(change[ROWS][1]), *shape[1:])))
    for one, expected in wanted:
        weight = jax.ShapeDtypeStruct(expected, np.float32)
        try:
            found = jax.eval_shape(functools.partial(delta, one, scale=1.0), weight)
        except (TypeError, ValueError, ZeroDivisionError, IndexError) as error:
            return str(error).splitlines()[0] or type(error).__name__
        if found.shape != expected:
            return f"it makes {found.shape}"
    return None


def _added(change: Change, weight: Array) -> Array:
    """Returns a change without its factor, in the shape of the weight."""
    if "weight" in change:
        vector = _float(change["weight"]).reshape(-1)
        axis = (1, -1) if "on_input" in change else (-1, 1)
        return weight * vector.reshape(*axis, *(1,) * (weight.ndim - 2))
    if "diff" in change:
        found = _float(change["diff"])
    elif "down" in change:
        down, up, core = change["down"], change["up"], change.get("mid")
        if core is None:
            found = _flat(up) @ _flat(down)
        else:
            found = jnp.einsum("mn...,im,nj->ij...", _float(core), _flat(up), _flat(down))
    elif "hada_w1_a" in change:
        # FedPara (Hyeon-Woo et al. 2021): the elementwise product of two products.
        found = _factor(change, "hada_w1", "hada_t1") * _factor(change, "hada_w2", "hada_t2")
    else:
        # Edalati et al. 2022: row i l + j of a Kronecker product is row i of w1, j of w2.
        w1, w2 = _factor(change, "lokr_w1", "lokr_t1"), _factor(change, "lokr_w2", "lokr_t2")
        w2 = w2.reshape(len(w2), weight.shape[1] // w1.shape[1], -1)
        found = (w1[:, None, :, None, None] * w2[None, :, None]).reshape(len(w1) * len(w2), -1)
    if ROWS in change:
        found = found.reshape(len(found), -1)
        found = jax.lax.dynamic_slice_in_dim(found, change[ROWS][0], weight.shape[0])
    if found.size != weight.size or found.shape[:1] != weight.shape[:1]:
        raise ValueError(f"it makes {found.shape}")
    return found.reshape(weight.shape)


def _factor(change: Change, name: str, core: str) -> Array:
    """Returns a whole matrix, or the product of a and b.

    With a core it is the sum of core[i, j] a[i] b[j], as LyCORIS stores it.
    """
    if name in change:
        return _float(change[name])
    a, b = change[f"{name}_a"], change[f"{name}_b"]
    if core not in change:
        return _flat(a) @ _flat(b)
    return jnp.einsum("ij...,ip,jr->pr...", _float(change[core]), _flat(a), _flat(b))


def _float(x: Array) -> Array:
    return jnp.asarray(x).astype(jnp.float32)


def _flat(x: Array) -> Array:
    """Returns a matrix of what may be a convolution's kernel: r c kh kw -> r (c kh kw)."""
    x = _float(x)
    return x.reshape(x.shape[0], -1)
