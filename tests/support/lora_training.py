"""LoRAs in training by PEFT, all parameters random, and the same ones as our trees."""

import math
from typing import Any

import jax
import numpy as np
import torch
from peft import LoraConfig

from support.lora import every_layer, tuner_layers

ALPHA = 1.5
"""alpha over rank."""
GRADIENT = 1e-4
"""How far gradients may differ, as a share of the largest of each array."""


def add_trained(
    module: Any, rank: int, targets: list[str] | None, *, dora: bool = False, seed: int = 0
) -> None:
    """Adds an adapter to a network, whose own parameters need no gradients then.

    targets: the ends of the layers' names; None for every linear layer and convolution.
    """
    names = every_layer(module) if targets is None else targets
    options = {"lora_alpha": ALPHA * rank, "use_dora": dora, "init_lora_weights": False}
    module.requires_grad_(False)
    module.add_adapter(LoraConfig(r=rank, target_modules=names, **options))
    randomize_adapters(module, seed)


def randomize_adapters(module: Any, seed: int) -> None:
    """Draws A, B and DoRA's lengths, which are near those of the kernels."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        values = torch.randn(parameter.shape, generator=generator)
        if "magnitude" in name:
            parameter.data *= 1 + 0.2 * values
        else:
            fan_in = parameter.numel() / parameter.shape[0]
            parameter.data = 0.7 * values / math.sqrt(fan_in)


def trained_tree(module: Any, *, gradients: bool = False) -> dict[str, dict[str, np.ndarray]]:
    """The parameters of a network's adapters as our tree, or their gradients."""
    text = "CLIPText" in type(module).__name__
    found = {}
    for path, layer in tuner_layers(module):
        if text and not path.startswith(("text_model.", "text_projection")):
            path = f"text_model.{path}"
        own = {"down": layer.lora_A["default"].weight, "up": layer.lora_B["default"].weight}
        if "default" in layer.lora_magnitude_vector:
            own["magnitude"] = layer.lora_magnitude_vector["default"].weight
        found[path] = {name: _array(name, x, gradients) for name, x in own.items()}
    return found


def _array(name: str, parameter: Any, gradient: bool) -> np.ndarray:
    """In the layout of our trees. A layer behind what is used has no gradient."""
    tensor = parameter.grad if gradient else parameter.data
    array = np.zeros(parameter.shape, np.float32) if tensor is None else tensor.numpy()
    if name == "magnitude":
        return array.reshape(-1)
    if name == "up":
        return array.reshape(array.shape[:2]).T
    return array.T if array.ndim == 2 else array.transpose(2, 3, 1, 0)


def check_gradients(ours: Any, theirs: Any) -> None:
    """Asserts that they are alike, compared with the largest of each array."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    largest = max(np.abs(g).max() for g in jax.tree.leaves(theirs))
    leaves, _ = jax.tree_util.tree_flatten_with_path(theirs)
    for (path, value), gradient in zip(leaves, jax.tree.leaves(ours), strict=True):
        scale = max(np.abs(value).max(), 1e-3 * largest)
        assert np.abs(np.asarray(gradient) - value).max() < GRADIENT * scale, path
