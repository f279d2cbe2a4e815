"""Disk and Hub <-> networks. Safetensors only."""

from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.networks import (
    load_network,
    read_model_index,
    save_network,
    write_model_index,
)

__all__ = [
    "load_network",
    "read_model_index",
    "resolve",
    "save_network",
    "write_model_index",
]
