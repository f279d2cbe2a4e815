"""Reads and writes networks on disk and from the Hub, as safetensors only."""

from diffusax.checkpoints import processors as processors
from diffusax.checkpoints.files import read_call_defaults, read_model_index, write_model_index
from diffusax.checkpoints.hub import resolve
from diffusax.checkpoints.networks import save_network

__all__ = [
    "read_call_defaults",
    "read_model_index",
    "resolve",
    "save_network",
    "write_model_index",
]
