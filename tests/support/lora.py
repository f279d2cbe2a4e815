"""LoRAs in PyTorch by PEFT, all weights random, and the same ones as our adapters."""

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer

ATTENTION = ["to_q", "to_k", "to_v", "to_out.0"]
TEXT_ATTENTION = ["q_proj", "k_proj", "v_proj", "out_proj"]


def every_layer(module: torch.nn.Module) -> list[str]:
    """The names of all linear layers and convolutions."""
    kinds = (torch.nn.Linear, torch.nn.Conv2d)
    found = [name for name, layer in module.named_modules() if isinstance(layer, kinds)]
    return [name.removesuffix(".base_layer") for name in found if ".lora_" not in name]


def add_lora(
    module: Any, name: str, rank: int, targets: list[str] | None = None, seed: int = 0
) -> None:
    """Adds an adapter of random weights to a network of diffusers or transformers."""
    targets = every_layer(module) if targets is None else targets
    config = LoraConfig(
        r=rank, lora_alpha=1.5 * rank, target_modules=targets, init_lora_weights=False
    )
    with warnings.catch_warnings():
        # PEFT warns of a second adapter.
        warnings.simplefilter("ignore")
        module.add_adapter(config, adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    for key, parameter in module.named_parameters():
        if f".{name}." in key and "lora_" in key:
            fan_in = parameter.numel() / parameter.shape[0]
            values = torch.randn(parameter.shape, generator=generator) * 0.7 * fan_in**-0.5
            parameter.data = values.to(parameter.dtype)
    module.eval().requires_grad_(False)


def lora_layers(module: torch.nn.Module, name: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The pairs A and B of an adapter by our paths, alpha / rank in B."""
    text = "CLIPText" in type(module).__name__
    found = {}
    for path, layer in tuner_layers(module):
        if name in layer.lora_A:
            a, b = (m[name].weight.numpy() for m in (layer.lora_A, layer.lora_B))
            scale = layer.lora_alpha[name] / layer.r[name]
            if text and not path.startswith(("text_model.", "text_projection")):
                path = f"text_model.{path}"
            down = a.T if a.ndim == 2 else a.transpose(2, 3, 1, 0)
            found[path] = down, scale * b.reshape(b.shape[:2]).T
    return found


def tuner_layers(module: torch.nn.Module) -> list[tuple[str, Any]]:
    return [(n, m) for n, m in module.named_modules() if isinstance(m, BaseTunerLayer)]


@contextlib.contextmanager
def weighed(weights: Mapping[str, float], *modules: torch.nn.Module) -> Iterator[None]:
    """Runs PyTorch's networks with these adapters, those left out off."""
    layers = [layer for module in modules for _, layer in tuner_layers(module)]
    for layer in layers:
        names = [name for name in weights if name in layer.lora_A]
        layer._active_adapter = names
        for name in names:
            layer.set_scale(name, weights[name])
    try:
        yield
    finally:
        for layer in layers:
            layer._active_adapter = []
