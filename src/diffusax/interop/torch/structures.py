"""Splits arguments and results of PyTorch modules into tensors and a hashable description."""

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from diffusax.interop.torch.tensors import to_array

_LIBRARIES = ("diffusers.", "transformers.")
"""The libraries whose plain objects, such as a latent distribution or a cache, hold tensors."""


class Leaf(NamedTuple):
    """The place of a tensor."""


class Number(NamedTuple):
    """The place of a Python number that is passed as data."""

    kind: type


class Static:
    """A value that programs are compiled for; 1, 1.0 and True are different values."""

    def __init__(self, value: Any):
        self.value = value
        if isinstance(value, torch.Generator):
            # Each call may bring another; no program depends on it, see MixedEnvironment.
            self.key: Any = (type(value),)
            return
        if isinstance(value, slice):
            value = value.start, value.stop, value.step
        try:
            self.key = (type(self.value), value)
            hash(self.key)
        except TypeError:
            self.key = (type(self.value), id(self.value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"Static({self.value!r})"


class Constant:
    """A tensor of the host that programs are compiled for, identified by its values."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self.key = tensor.dtype, tuple(tensor.shape), to_array(tensor).tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


class Node(NamedTuple):
    """A container: its class, the names of its entries, and the entries."""

    kind: type
    names: tuple[Any, ...]
    children: tuple[Any, ...]


Structure = Leaf | Number | Static | Constant | Node


def flatten(value: Any) -> tuple[list[Any], Structure]:
    """Returns the tensors and arrays in a value, in order, and the structure around them."""
    leaves: list[Any] = []
    return leaves, _describe(value, leaves, ())


def rebuild(structure: Structure, leaves: Iterator[Any]) -> Any:
    """Inverts `flatten`, with other leaves in place of the tensors."""
    match structure:
        case Static():
            return structure.value
        case Constant():
            return structure.tensor
        case Leaf() | Number():
            return next(leaves)
        case Node(kind, names, children):
            return _build(kind, names, [rebuild(child, leaves) for child in children])
    raise TypeError(f"{structure!r} is no structure")


def fix(
    structure: Structure, leaves: list[Any], chosen: Callable[[Any], bool]
) -> tuple[list[Any], Structure]:
    """Returns the leaves and the structure with the chosen tensors as constants."""
    rest = iter(leaves)
    kept: list[Any] = []

    def walk(structure: Structure) -> Structure:
        if isinstance(structure, Node):
            return structure._replace(children=tuple(map(walk, structure.children)))
        if not isinstance(structure, Leaf):
            return structure
        leaf = next(rest)
        if chosen(leaf):
            return Constant(leaf)
        kept.append(leaf)
        return structure

    fixed = walk(structure)
    return kept, fixed


def _describe(value: Any, leaves: list[Any], above: tuple[int, ...]) -> Structure:
    if isinstance(value, torch.Tensor | jax.Array) or (
        isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc"
    ):
        leaves.append(value)
        return Leaf()
    items = None if id(value) in above else _items(value)
    if items is None:
        return Static(value)
    before = len(leaves)
    names, children = zip(*items) if items else ((), ())
    inside = (*above, id(value))
    described = tuple(_describe(child, leaves, inside) for child in children)
    if len(leaves) == before and _is_object(value):
        return Static(value)
    return Node(type(value), tuple(names), described)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the names and values of a container's entries; None for other values."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if _is_object(value):
        return list(vars(value).items())
    return None


def _is_object(value: Any) -> bool:
    if isinstance(value, type | torch.nn.Module | Mapping | list | tuple):
        return False
    return type(value).__module__.startswith(_LIBRARIES) and hasattr(value, "__dict__")


def _build(kind: Any, names: tuple[Any, ...], children: list[Any]) -> Any:
    if issubclass(kind, tuple):
        return kind(*children) if hasattr(kind, "_fields") else kind(children)
    if issubclass(kind, list):
        return kind(children)
    if issubclass(kind, Mapping) and dataclasses.is_dataclass(kind):
        return build_output(kind, dict(zip(names, children)))
    if issubclass(kind, Mapping):
        return kind(zip(names, children))
    built = object.__new__(kind)
    vars(built).update(zip(names, children))
    return built


def build_output(kind: Any, items: dict[str, Any]) -> Any:
    """Makes a ModelOutput or BaseOutput without its __post_init__, which changes other values."""
    built = kind.__new__(kind)
    for field in dataclasses.fields(kind):
        object.__setattr__(built, field.name, items.get(field.name))
    for name, value in items.items():
        OrderedDict.__setitem__(built, name, value)
    return built
