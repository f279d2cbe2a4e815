"""Image processors at the path where diffusers' users look for them."""

from diffusax.images.image_processor import CLIPImageProcessor
from diffusax.images.image_prompt_masks import IPAdapterMaskProcessor
from diffusax.images.vae_image_processor import VaeImageProcessor

__all__ = ["CLIPImageProcessor", "IPAdapterMaskProcessor", "VaeImageProcessor"]
