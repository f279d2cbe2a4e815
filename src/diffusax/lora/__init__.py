"""Files of LoRAs in the formats of diffusers, PEFT, kohya's scripts and LyCORIS."""

from diffusax.lora.changes import changes_of, with_alphas
from diffusax.lora.files import LoraFile, read_lora
from diffusax.lora.keys import Layers, find_layers
from diffusax.lora.names import called, output_name
from diffusax.lora.write import FORMATS, write_lora

__all__ = [
    "FORMATS",
    "Layers",
    "LoraFile",
    "called",
    "changes_of",
    "find_layers",
    "output_name",
    "read_lora",
    "with_alphas",
    "write_lora",
]
