"""CLIP's image processor, at the path where diffusers' users look for it."""

from diffusax.images.image_processor import CLIPImageProcessor

__all__ = ["CLIPImageProcessor"]
