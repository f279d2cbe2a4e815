"""Tiny PyTorch pipelines of diffusers with random weights, by the name of their class."""

from . import flux, stable_diffusion, stable_diffusion_xl, transformers_t5
from .registry import REGISTRY, Family

__all__ = [
    "REGISTRY",
    "Family",
    "flux",
    "stable_diffusion",
    "stable_diffusion_xl",
    "transformers_t5",
]
