"""The switches of a module: attributes, besides its arguments, that its programs depend on."""

import types
from typing import Any

import torch

from diffusax.interop.torch.compat import MODULE_ATTRIBUTES

_PLAIN = frozenset((bool, int, float, str, types.NoneType))


class Switches:
    """The plain attributes of a module's parts and of its attention processors.

    Pipelines and users set `use_tiling`, FreeU's factors, GLIGEN's `enabled` and the scales of
    LoRAs and IP-Adapters between two calls, anywhere in a module. Reading a few thousand values
    takes about a millisecond; finding their places takes longer and is done when parts change.
    """

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._known: dict[Any, int] = {}
        self._look()

    def read(self) -> tuple[int, int]:
        """Returns two numbers that identify the set of parts and the state of all switches."""
        if any(part.processor is not p for part, p in self._attentions) or any(
            len(attributes) != count for attributes, count, _ in self._holders
        ):
            self._look()
        values = tuple(
            value if type(value) in _PLAIN else _frozen(value)
            for attributes, _, names in self._holders
            for value in map(attributes.get, names)
        )
        parts = self._known.setdefault(self._places, len(self._known))
        return parts, self._known.setdefault((parts, values), len(self._known))

    def _look(self) -> None:
        parts = [*self._module.modules()]
        self._attentions = [(part, part.processor) for part in parts if hasattr(part, "processor")]
        found = [*parts, *(p for _, p in self._attentions if hasattr(p, "__dict__"))]
        self._holders = [(vars(x), len(vars(x)), _names(vars(x))) for x in found]
        self._places = tuple((type(x), names) for x, (_, _, names) in zip(found, self._holders))


def _names(attributes: dict[str, Any]) -> tuple[str, ...]:
    plain = (k for k, value in attributes.items() if _frozen(value) is not Ellipsis)
    return tuple(sorted({*plain} - MODULE_ATTRIBUTES))


def _frozen(value: Any) -> Any:
    """Makes plain values, lists and dictionaries hashable; returns Ellipsis for others."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, list | tuple):
        frozen = tuple(map(_frozen, value))
        return Ellipsis if Ellipsis in frozen else frozen
    return Ellipsis
