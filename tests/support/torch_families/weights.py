"""Random weights for any torch module, drawn from torch's global generator."""

import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch

NORMS = ("gamma", "norm.weight", "layernorm.weight")


def randomize(module: torch.nn.Module, gain: float = 1.0) -> Any:
    """Draws every parameter: weights of `gain`, norms around one, biases around zero.

    Weights that diffusers starts at zero are drawn too, so that every layer changes the output.
    """
    for name, parameter in module.named_parameters():
        parameter.data = _draw(name, parameter.data, gain)
    return module.eval().requires_grad_(False)


def _draw(name: str, data: torch.Tensor, gain: float) -> torch.Tensor:
    values = torch.randn(data.shape)
    if name.endswith(NORMS) or (data.ndim == 1 and name.endswith("weight")):
        values = 1 + 0.2 * values
    elif data.ndim > 1 and "embed" in name:
        values *= 0.3 * gain
    elif data.ndim > 1:
        values *= gain * (data.shape[0] / data.numel()) ** 0.5
    else:
        values *= 0.2
    return values.to(data.dtype)


def network(name: str, **config: Any) -> Callable[[], Any]:
    """A function that makes a random network of the class `name` of diffusers."""
    return lambda: randomize(getattr(diffusers, name)(**config))


def scheduler(name: str, **config: Any) -> Callable[[], Any]:
    """A function that makes a scheduler of the class `name` of diffusers."""
    return lambda: getattr(diffusers, name)(**config)


def parts(*given: Any, **more: Any) -> Callable[[], dict[str, Any]]:
    """A function that makes components, of dictionaries, functions that make them, and `more`.

    Those values of the dictionaries that are functions are called; what comes later wins.
    """

    def make() -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for part in (*given, more):
            merged |= part() if callable(part) else part
        return {k: v() if inspect.isroutine(v) else v for k, v in merged.items()}

    return make


def extended(base: Callable[[], dict[str, Any]], extra: dict[str, Any]) -> Callable[[], Any]:
    """A function that makes components of `extra`, calling the functions there, and of `base`."""

    def make() -> dict[str, Any]:
        made = {k: v() if callable(v) else v for k, v in extra.items()}
        return {**base(), **made}

    return make
