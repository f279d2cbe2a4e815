"""Decides which Python numbers among the arguments are data."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from diffusax.interop.torch.structures import Leaf, Node, Number, Static, Structure

Path = tuple[Any, ...]


class Numbers:
    """Finds the numbers that change from call to call.

    Programs are compiled for a number until it changes in a call that is otherwise the same. Then
    it becomes data, unless the module cannot be traced with it as data (a size, a switch) or would
    compute in another dtype.
    """

    def __init__(self) -> None:
        self.data: set[Path] = set()
        self._fixed: set[Path] = set()
        self._first: dict[Structure, dict[Path, Any]] = {}

    def learn(self, structure: Structure, shapes: Callable[[Structure], list[Any]]) -> None:
        """Compares the numbers of a call with those of earlier calls.

        shapes: returns the results' shapes and dtypes with some numbers as data; raises an error
        where the module cannot be traced so.
        """
        found = dict(_numbers(structure))
        first = self._first.setdefault(_masked(structure, found), found)
        changed = {p for p in found if found[p] != first[p]} - self.data - self._fixed
        for path in changed:
            wanted = {*self.data, path}
            try:
                same = shapes(_masked(structure, wanted)) == shapes(_masked(structure, self.data))
            except Exception:
                same = False
            (self.data if same else self._fixed).add(path)

    def split(self, structure: Structure, leaves: list[Any]) -> tuple[Structure, list[Any]]:
        """Returns the structure without the numbers that are data, and all leaves."""
        found = _masked(structure, self.data)
        return found, self.leaves(found, structure, leaves)

    def leaves(self, found: Structure, structure: Structure, leaves: list[Any]) -> list[Any]:
        """Returns the leaves of `found`, which has numbers of the structure as data."""
        return list(_joined(found, structure, iter(leaves)))


def _numbers(structure: Structure, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if isinstance(structure, Static) and type(structure.value) in (int, float):
        yield path, structure.value
    if isinstance(structure, Node):
        for name, child in zip(structure.names, structure.children):
            yield from _numbers(child, (*path, name))


def _masked(structure: Structure, paths: Any, path: Path = ()) -> Structure:
    """Returns the structure with the numbers at these paths as data."""
    if isinstance(structure, Static) and path in paths and type(structure.value) in (int, float):
        return Number(type(structure.value))
    if isinstance(structure, Node):
        children = (
            _masked(child, paths, (*path, name))
            for name, child in zip(structure.names, structure.children)
        )
        return structure._replace(children=tuple(children))
    return structure


def _joined(found: Structure, structure: Structure, leaves: Iterator[Any]) -> Iterator[Any]:
    if isinstance(found, Leaf):
        yield next(leaves)
    elif isinstance(found, Number) and isinstance(structure, Static):
        yield np.asarray(structure.value, np.float32 if found.kind is float else np.int32)
    elif isinstance(found, Node) and isinstance(structure, Node):
        for child, original in zip(found.children, structure.children):
            yield from _joined(child, original, leaves)
