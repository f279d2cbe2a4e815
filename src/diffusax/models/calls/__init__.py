"""Models called as diffusers' and transformers' are: their arguments, layouts and results.

Images, latents and residuals are b c h w. Arrays of JAX and NumPy are taken, and arrays of JAX come
back; where samples or texts are tensors of PyTorch, so are the results. Calls are compiled, once
for each shape.
"""

from diffusax.models.calls.autoencoders import (
    AsymmetricAutoencoder,
    Autoencoder,
    TinyAutoencoder,
)
from diffusax.models.calls.encoders import (
    ImageEncoder,
    LanguageModel,
    TextAndImageEncoder,
    TextEncoder,
)
from diffusax.models.calls.flux import FluxControlNet, FluxTransformer
from diffusax.models.calls.flux2 import Flux2Transformer
from diffusax.models.calls.unet import Adapter, ControlNet, UNet, UNet2D
from diffusax.models.calls.z_image import ZImageTransformer

__all__ = [
    "Adapter",
    "AsymmetricAutoencoder",
    "Autoencoder",
    "ControlNet",
    "Flux2Transformer",
    "FluxControlNet",
    "FluxTransformer",
    "ImageEncoder",
    "LanguageModel",
    "TextAndImageEncoder",
    "TextEncoder",
    "TinyAutoencoder",
    "UNet",
    "UNet2D",
    "ZImageTransformer",
]
