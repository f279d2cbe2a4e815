"""Tiny PyTorch pipelines of diffusers with random weights, by the name of their class."""

import importlib

from .registry import REGISTRY, Family

GROUPS = (
    "stable_diffusion",
    "stable_diffusion_xl",
    "transformers_t5",
    "flux",
    "stable_diffusion_variants",
    "kandinsky",
    "pixels",
    "cascades",
    "sana",
    "image_transformers",
    "deprecated",
    "more_images",
    "qwen_image",
    "flux2",
)
for group in GROUPS:
    importlib.import_module(f"{__name__}.{group}")

__all__ = ["REGISTRY", "Family"]
