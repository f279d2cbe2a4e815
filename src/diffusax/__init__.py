"""Run, edit with and train Hugging Face diffusion models in JAX."""

from diffusax.checkpoints import load_network, save_network
from diffusax.pipelines import DiffusionPipeline, ImagePipelineOutput, StableDiffusionPipeline
from diffusax.samplers import *  # noqa: F403
from diffusax.samplers import SCHEDULERS

__version__ = "0.1.0.dev0"

__all__ = [
    "DiffusionPipeline",
    "ImagePipelineOutput",
    "StableDiffusionPipeline",
    "load_network",
    "save_network",
]
__all__ += list(SCHEDULERS)
