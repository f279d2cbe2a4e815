"""Tiny networks that make images larger."""

from typing import Any

import numpy as np
import safetensors.numpy


def save_upscaler(path: Any, width: int = 8, grow: int = 4, blocks: int = 1) -> None:
    """Saves an RRDBNet of random weights for four times larger images, by Real-ESRGAN's names."""
    random = np.random.default_rng(0)
    layers = {"conv_first": (3, width), "conv_body": (width, width), "conv_last": (width, 3)}
    layers |= dict.fromkeys(("conv_up1", "conv_up2", "conv_hr"), (width, width))
    for block in range(blocks):
        for dense in (1, 2, 3):
            for i in range(5):
                name = f"body.{block}.rdb{dense}.conv{i + 1}"
                layers[name] = width + i * grow, grow if i < 4 else width
    tensors: dict[str, Any] = {}
    for name, (inside, out) in layers.items():
        kernel = random.normal(0, 0.15, (out, inside, 3, 3))
        tensors[f"{name}.weight"] = kernel.astype(np.float32)
        tensors[f"{name}.bias"] = random.normal(0, 0.1, out).astype(np.float32)
    safetensors.numpy.save_file(tensors, path)
