"""A LoRA's layers as a file has them, from PEFT's state dictionaries or from pairs."""

from collections.abc import Mapping
from typing import Any

from diffusax.checkpoints.lora.keys import Layers, split_key
from diffusax.pipelines.adapters import as_product
from diffusax.tensors import as_numpy


def layers_of(component: str, given: Mapping[str, Any]) -> Layers:
    """Returns a component's layers by path.

    given: PEFT's state dictionary, or the pairs (A, B) by path, see `Adapter`.

    Raises:
        ValueError: a key or value is neither.
    """
    found: Layers = {}
    for key, value in given.items():
        if isinstance(value, tuple | list):
            down, up = map(as_numpy, value)
            product = as_product((down, up))
            # B of a convolution is one of 1x1.
            whole = product.up.reshape(*product.up.shape, *(1,) * (down.ndim - 2))
            found[component, key] = {"down": product.down, "up": whole}
            continue
        path, part = split_key(key.removeprefix(f"{component}."))
        if part not in ("down", "up", "magnitude", "alpha"):
            raise ValueError(f"{component}'s {key} is no tensor of a LoRA in PEFT's format")
        found.setdefault((component, path), {})[part] = as_numpy(value)
    return found
