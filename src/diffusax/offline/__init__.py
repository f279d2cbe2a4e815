"""Generates images for many prompts, on as many machines as there are."""

from diffusax.offline.prompts import open_prompts
from diffusax.offline.requests import Settings
from diffusax.offline.run import Stopped, Summary, generate
from diffusax.offline.with_ray import generate_with_ray

__all__ = ["Settings", "Stopped", "Summary", "generate", "generate_with_ray", "open_prompts"]
