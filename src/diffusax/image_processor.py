"""Image processors at the path where diffusers' users look for them."""

from typing import Any

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.image_prompt_masks import IPAdapterMaskProcessor
from diffusax.images.vae_image_processor import VaeImageProcessor

PipelineImageInput = Any
"""What calls take as images: paths, PIL images, arrays, tensors, or lists of these."""

__all__ = [
    "CLIPImageProcessor",
    "IPAdapterMaskProcessor",
    "PipelineImageInput",
    "VaeImageProcessor",
]
