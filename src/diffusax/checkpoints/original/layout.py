"""How the modules of a transformer are named in its authors' code, told by a table."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

Table = Mapping[str, str | tuple[str, ...]]
"""For each module in the original code the path in diffusers, or the paths of those that it is made
of, whose outputs lie one after the other in it. A * stands for the number of a block. Both may be a
part of a path, from one dot to another: {"attention.out": "attention.to_out.0"}.
"""


class Module(NamedTuple):
    """A module in the original code."""

    paths: tuple[str, ...]
    """The paths in diffusers of the modules that it is made of."""
    swapped: bool = False
    """Whether the two halves of its outputs are in the other order in diffusers."""


Names = dict[str, Module]
"""The modules of a network by their names in the original code."""


@dataclasses.dataclass(frozen=True)
class Original:
    """How a transformer's modules are named in the original code."""

    known_by: tuple[str, ...]
    """The tensors of a file in the original layout that no other network has together."""
    known_by_in_diffusers: tuple[str, ...]
    """Those of a file in diffusers' layout."""
    modules: Table
    """The modules whose paths differ."""
    swapped: tuple[str, ...] = ()
    """The original names of modules whose halves of outputs are swapped in diffusers."""
    scales: tuple[str, ...] = ()
    """The ends of the names of modules whose weight is called scale."""
    tables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of parameters that are no weight and no bias, with those in diffusers."""
    parameters: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of parameters whose modules are others in diffusers, with those there."""
    flat: tuple[str, ...] = ()
    """The beginnings of the names of modules whose tables are one row."""
    adapters: Table = dataclasses.field(default_factory=dict)
    """Further names that LoRAs have for modules."""
    leftovers: tuple[str, ...] = ()
    """The beginnings of tensors' names that no image depends on."""
    flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """The names of tensors without numbers by which a file turns options of the config on."""


def original_modules(original: Original, paths: Iterable[str]) -> Names:
    """Returns all modules of a network by their names in the original code."""
    paths = list(paths)
    found = named(original.modules, paths)
    known = {path for own in found.values() for path in own}
    names = {name: Module(own, name in original.swapped) for name, own in found.items()}
    return names | {path: Module((path,)) for path in paths if path not in known}


def named(table: Table, paths: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the paths in diffusers by the names that a table has for them.

    Of several that are one module in the original code, one is enough to name them all.
    """
    rules = []
    for theirs, ours in table.items():
        own = (ours,) if isinstance(ours, str) else ours
        rules += [(name, _pattern(name), theirs, own) for name in own]
    # A longer path may end with a shorter one.
    rules.sort(key=lambda rule: -rule[0].count("."))
    found = {}
    for path in paths:
        for _, pattern, theirs, own in rules:
            if match := pattern.search(path):
                start, end = path[: match.start()], path[match.end() :]
                place = [start + _filled(name, match.groups()) + end for name in (theirs, *own)]
                found[place[0]] = tuple(place[1:])
                break
    return found


def _pattern(name: str) -> re.Pattern[str]:
    """Returns a pattern of a name from one dot to another."""
    return re.compile(rf"(?<![^.]){re.escape(name).replace(chr(92) + '*', '([^.]+)')}(?![^.])")


def _filled(name: str, numbers: Iterable[str]) -> str:
    for number in numbers:
        name = name.replace("*", number, 1)
    return name
