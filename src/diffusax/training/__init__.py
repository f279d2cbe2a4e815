"""Training of diffusion models. Needs the extra `train`."""

from diffusax.training.cached import CacheConfig, cache_latents
from diffusax.training.config import TrainConfig, ValidationConfig
from diffusax.training.data import DataConfig
from diffusax.training.ema import EMAConfig
from diffusax.training.loop import train
from diffusax.training.optimizers import OptimizerConfig
from diffusax.training.options import read_config
from diffusax.training.recipe import Recipe
from diffusax.training.recipes.autoencoder import (
    AutoencoderConfig,
    AutoencoderValidationConfig,
    autoencoder,
)
from diffusax.training.recipes.text_to_image import (
    TextToImageConfig,
    TextToImageValidationConfig,
    text_to_image,
)
from diffusax.training.signals import Preempted
from diffusax.training.timesteps import TimestepBiasConfig

__all__ = [
    "AutoencoderConfig",
    "AutoencoderValidationConfig",
    "CacheConfig",
    "DataConfig",
    "EMAConfig",
    "OptimizerConfig",
    "Preempted",
    "Recipe",
    "TextToImageConfig",
    "TextToImageValidationConfig",
    "TimestepBiasConfig",
    "TrainConfig",
    "ValidationConfig",
    "autoencoder",
    "cache_latents",
    "read_config",
    "text_to_image",
    "train",
]
