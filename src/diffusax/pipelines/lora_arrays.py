"""A LoRA's layers as a file has them, from PEFT's state dictionaries or from pairs."""

from collections.abc import Mapping
from typing import Any

from diffusax.boundary.tensors import as_numpy
from diffusax.checkpoints.lora.keys import Layers, split_key
from diffusax.pipelines.adapters import as_product


def layers_of(component: str, given: Mapping[str, Any]) -> Layers:
    """Returns a component's layers by path.

    given: PEFT's state dictionary, or the pairs (A, B) or (A, B, bias) by path, see `Adapter`.

    Raises:
        ValueError: a key or value is neither.
    """
    found: Layers = {}
    for key, value in given.items():
        if isinstance(value, tuple | list):
            arrays = tuple(map(as_numpy, value))
            product = as_product(arrays)
            # B of a convolution is one of 1x1.
            whole = product.up.reshape(*product.up.shape, *(1,) * (arrays[0].ndim - 2))
            found[component, key] = {"down": product.down, "up": whole}
            if product.bias is not None:
                found[component, key]["bias"] = product.bias
            continue
        path, part = split_key(key.removeprefix(f"{component}."))
        if part not in ("down", "up", "bias", "magnitude", "alpha"):
            raise ValueError(f"{component}'s {key} is no tensor of a LoRA in PEFT's format")
        found.setdefault((component, path), {})[part] = as_numpy(value)
    return found
