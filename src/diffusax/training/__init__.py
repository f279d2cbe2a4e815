"""Training of diffusion models. Needs the extra `train`."""

from diffusax.training.cached import CacheConfig, cache_latents
from diffusax.training.config import TrainConfig
from diffusax.training.ema import EMAConfig
from diffusax.training.loop import train
from diffusax.training.optimizers import OptimizerConfig
from diffusax.training.options import read_config
from diffusax.training.recipe import Recipe
from diffusax.training.recipes.autoencoder import AutoencoderConfig, autoencoder
from diffusax.training.recipes.instruct_pix2pix import InstructPix2PixConfig, instruct_pix2pix
from diffusax.training.recipes.text_to_image import TextToImageConfig, text_to_image
from diffusax.training.signals import Preempted

__all__ = [
    "AutoencoderConfig",
    "CacheConfig",
    "EMAConfig",
    "InstructPix2PixConfig",
    "OptimizerConfig",
    "Preempted",
    "Recipe",
    "TextToImageConfig",
    "TrainConfig",
    "autoencoder",
    "cache_latents",
    "instruct_pix2pix",
    "read_config",
    "text_to_image",
    "train",
]
