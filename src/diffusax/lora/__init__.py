"""Everything about a LoRA: reading, checking, stacking, merging, writing and training.

A file's tensors become layers (`files`, `keys`), layers a `Lora` that fits a pipeline's networks
(`lora`), and several of these the `LowRank` layers of a program (`stacks`) or other parameters
(`changes`). `trained` has those that training makes, and `write` what goes back to a file.
"""

from diffusax.lora.files import (
    FileLayers,
    LoraFile,
    called,
    layout_of,
    output_name,
    read_lora,
)
from diffusax.lora.keys import find_layers
from diffusax.lora.lora import Lora, lora_of_layers
from diffusax.lora.write import write_lora

__all__ = [
    "FileLayers",
    "Lora",
    "LoraFile",
    "called",
    "find_layers",
    "layout_of",
    "lora_of_layers",
    "output_name",
    "read_lora",
    "write_lora",
]
