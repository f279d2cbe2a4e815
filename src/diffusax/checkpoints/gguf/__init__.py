"""GGUF files, as llama.cpp, ComfyUI-GGUF and stable-diffusion.cpp write them."""

from diffusax.checkpoints.gguf.header import is_gguf, read_gguf
from diffusax.checkpoints.gguf.names import as_in_transformers

__all__ = ["as_in_transformers", "is_gguf", "read_gguf"]
