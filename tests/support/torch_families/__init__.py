"""Tiny PyTorch pipelines of diffusers with random weights, by the name of their class."""

import importlib

from .catalogue import all_image_pipelines, all_pipelines
from .reasons import without_entry
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
    "older",
    "flux2",
    "seeing_images",
    "videos",
    "more_videos",
    "audio",
    "kolors",
)
for group in GROUPS:
    importlib.import_module(f"{__name__}.{group}")
WITHOUT_ENTRY = without_entry()

__all__ = ["REGISTRY", "WITHOUT_ENTRY", "Family", "all_image_pipelines", "all_pipelines"]
