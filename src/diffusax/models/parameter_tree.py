"""Parameter trees: checked, in the form that a network has them, and in the order of its layers.

All keys of a network's tree are texts, because JAX's and Flax's own tools want them so; indices of
lists, too: {"layers": {"0": ..., "10": ...}}. JAX sorts texts, in which "10" comes before "2".
"""

import abc
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from diffusax.runtime.devices.host import on_device
from diffusax.runtime.devices.memory import array_bytes

_SHOWN = 3
"""The number of parameters that an error names."""


class Replacement(abc.ABC):
    """What stands in a tree as one parameter, and has what is asked of an array.

    It is a dataclass whose arrays are leaves for JAX. `[...]` returns the parameter as an array.
    """

    values: Any
    """The numbers, in the parameter's shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The parameter's shape."""
        return tuple(self.values.shape)

    @property
    def ndim(self) -> int:
        """The number of the parameter's axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of the parameter's numbers."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of all arrays."""
        return int(sum(map(array_bytes, jax.tree.leaves(self))))

    @property
    def sharding(self) -> Any:
        """Where the numbers lie."""
        return self.values.sharding

    @property
    def is_fully_addressable(self) -> bool:
        """Whether this process has all of the numbers."""
        return bool(getattr(self.values, "is_fully_addressable", True))

    def devices(self) -> Any:
        """Returns the devices of the numbers."""
        return self.values.devices()

    @abc.abstractmethod
    def __getitem__(self, key: Any) -> jax.Array:
        """Returns a part of the parameter as an array."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(on_device(self)[...], dtype)


def fitted_tree(shapes: Any, params: Any, owner: str) -> Any:
    """Returns parameters as the nested dict that a network has, after checking each of them.

    An index of a list may be a text such as "10" or an integer, and lists, tuples, dataclasses,
    Flax's states, frozen dicts and modules may stand for dicts. A tree that is right already is
    returned as it is.

    Args:
        shapes: the network's parameters as shapes.
        params: the parameters: arrays, tracers or shapes.
        owner: the network's name, for errors.

    Raises:
        ValueError: parameters are missing, unexpected, of another shape, or no floating-point
            numbers; names the first ones.
    """
    if _is_fitted(shapes, params):
        return params
    wanted = {path_name(path): leaf for path, leaf in ordered_leaves(shapes)}
    found: dict[str, Any] = {}
    twice = []
    for path, leaf in _leaves(params, ()):
        name = ".".join(path)
        if name in found:
            twice.append(name)
        found[name] = leaf
    wrong = {
        "lacks": [name for name in wanted if name not in found],
        "has, beside the network's,": [name for name in found if name not in wanted],
        "has twice": twice,
        "differs in": [
            f"{name} ({_described(found[name])}, not {_described(leaf)})"
            for name, leaf in wanted.items()
            if name in found and not _fits(leaf, found[name])
        ],
    }
    if parts := [f"{what} {_listed(names)}" for what, names in wrong.items() if names]:
        raise ValueError(
            f"params must be those of the {owner}, in the shapes of its `network.shapes`: the tree "
            f"{', '.join(parts)}"
        )
    return fill(shapes, (found[name] for name in wanted))


def replaced(tree: Any, path: tuple[str, ...], value: Any) -> Any:
    """Returns a copy of a nested dict with another leaf; what is not on its path is shared."""
    return {**tree, path[0]: replaced(tree[path[0]], path[1:], value)} if path else value


def texts_as_keys(tree: Any) -> Any:
    """Returns a nested dict with texts as indices of lists, as parameters have them."""
    if not isinstance(tree, Mapping):
        return tree
    return {str(key): texts_as_keys(value) for key, value in tree.items()}


def numbers_as_keys(tree: Any) -> Any:
    """Returns a nested dict with numbers as indices of lists, as Flax's modules have them."""
    if not isinstance(tree, Mapping):
        return tree
    return {
        int(key) if key.isdecimal() else key: numbers_as_keys(value) for key, value in tree.items()
    }


def ordered_leaves(
    tree: Any, path: tuple[jax.tree_util.DictKey, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields the paths and leaves of a tree, lists in the order of numbers: "10" follows "9"."""
    if isinstance(tree, Mapping):
        for key in sorted(tree, key=_place):
            yield from ordered_leaves(tree[key], (*path, jax.tree_util.DictKey(key)))
    else:
        for rest, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=replaces):
            yield (*path, *rest), leaf


def first_parameter(tree: Any) -> Any:
    """Returns one parameter of a tree, by which the dtype of all is known; None without any."""
    left = [tree]
    while left:
        node = left.pop()
        if isinstance(node, Mapping):
            left += [node[key] for key in sorted(node, reverse=True)]
        elif isinstance(node, list | tuple):
            left += reversed(node)
        elif node is not None:
            return node
    return None


def fill(tree: Any, values: Iterable[Any]) -> Any:
    """Returns a tree of the same structure with other leaves, in the order of `ordered_leaves`."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=replaces)
    places = jax.tree.unflatten(structure, range(len(leaves)))
    found = dict(zip((place for _, place in ordered_leaves(places)), values, strict=True))
    return jax.tree.unflatten(structure, [found[place] for place in range(len(leaves))])


def path_name(path: tuple[Any, ...]) -> str:
    """Returns the name of a parameter, its keys joined by dots: down_blocks.0.resnets.1.scale."""
    return ".".join(str(key.key) for key in path)


def _place(key: Any) -> tuple[int, str]:
    """Returns what keys of one dict are sorted by."""
    return (int(key), "") if str(key).isdecimal() else (-1, key)


def _is_fitted(shapes: Any, params: Any) -> bool:
    """Returns whether the tree is right as it is; a call asks it each time, so it is quick."""
    try:
        leaves: list[Any] = jax.tree.leaves(params)
        structure: Any = jax.tree.structure(params)
    except (TypeError, ValueError):
        return False  # Keys of several types have no order.
    if structure != (wanted := jax.tree.structure(shapes)):
        # Kernels of eight bits are trees themselves, and stand for one parameter each.
        leaves, structure = jax.tree.flatten(params, is_leaf=replaces)
        if structure != wanted:
            return False
    return all(map(_fits, jax.tree.leaves(shapes), leaves))


def _fits(wanted: Any, leaf: Any) -> bool:
    dtype = getattr(leaf, "dtype", None)
    if dtype is None or leaf.shape != wanted.shape:
        return replaces(leaf)
    return _floating(dtype) == _floating(wanted.dtype)


def _floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def replaces(leaf: Any) -> bool:
    """Returns whether a layer reads its parameter from something else, see `Replacement`."""
    return isinstance(leaf, Replacement)


def _leaves(tree: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the leaves of a tree with their paths, in which an index is its decimal number."""
    if isinstance(tree, nnx.Variable):
        tree = tree.get_value()
    if tree is None:
        return
    is_leaf = replaces(tree) or (hasattr(tree, "shape") and hasattr(tree, "dtype"))
    children = None if is_leaf else _children(tree)
    if children is None:
        yield path, tree
        return
    for key, child in children:
        text = str(key)
        name = str(int(text)) if text.isdecimal() else text
        yield from _leaves(child, (*path, name))


def _children(tree: Any) -> Iterable[tuple[Any, Any]] | None:
    """Returns the keys and values of what stands for a dict; None for a leaf."""
    if isinstance(tree, nnx.Module):
        tree = nnx.to_pure_dict(nnx.state(tree))
    if isinstance(tree, Mapping):
        return tree.items()
    if isinstance(tree, list | tuple):
        return tree._asdict().items() if hasattr(tree, "_asdict") else enumerate(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [(field.name, getattr(tree, field.name)) for field in dataclasses.fields(tree)]
    return None


def _described(leaf: Any) -> str:
    shape, dtype = getattr(leaf, "shape", None), getattr(leaf, "dtype", None)
    if shape is None or dtype is None:
        return f"a {type(leaf).__name__}"
    kind = "" if _floating(dtype) else f" {dtype}"
    return f"{tuple(shape)}{kind}"


def _listed(names: list[str]) -> str:
    rest = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {rest} more" if rest > 0 else "")
