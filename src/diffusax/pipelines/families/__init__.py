"""Families of checkpoints: how prompts become conditions, and which network is asked."""

from diffusax.pipelines.families.family import Family
from diffusax.pipelines.families.stable_diffusion import STABLE_DIFFUSION
from diffusax.pipelines.families.stable_diffusion_xl import STABLE_DIFFUSION_XL

__all__ = ["STABLE_DIFFUSION", "STABLE_DIFFUSION_XL", "Family"]
