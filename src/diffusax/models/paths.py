"""Layers of a module by their paths."""

from typing import Any


def layer_at(module: Any, path: str) -> Any:
    """Returns the layer of a module at a path joined by dots; None where there is none."""
    layer = module
    for part in path.split("."):
        try:
            layer = layer[int(part)] if part.isdecimal() else getattr(layer, part)
        except (AttributeError, IndexError, TypeError):
            return None
    return layer
