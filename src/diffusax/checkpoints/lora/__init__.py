"""Files of LoRAs in the formats of diffusers, PEFT, kohya's scripts and LyCORIS."""

from diffusax.checkpoints.lora.changes import changes_of, with_alphas
from diffusax.checkpoints.lora.files import LoraFile, read_lora
from diffusax.checkpoints.lora.keys import Layers, find_layers
from diffusax.checkpoints.lora.names import called, output_name
from diffusax.checkpoints.lora.write import FORMATS, write_lora

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
