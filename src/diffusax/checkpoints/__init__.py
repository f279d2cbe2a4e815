"""Disk and Hub <-> networks. Safetensors only."""

from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.networks import (
    cast_network,
    load_network,
    parse_dtype,
    read_model_index,
    save_network,
    write_model_index,
)

__all__ = [
    "cast_network",
    "load_network",
    "parse_dtype",
    "read_model_index",
    "resolve",
    "save_network",
    "write_model_index",
]
