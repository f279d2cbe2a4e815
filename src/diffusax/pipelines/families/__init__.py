"""Families of checkpoints: everything in which one kind of model differs from another."""

from diffusax.pipelines.families.denoiser import Denoiser
from diffusax.pipelines.families.family import (
    IMAGE_PROMPTS,
    Component,
    Family,
    diffusers_components,
)
from diffusax.pipelines.families.flux import FLUX
from diffusax.pipelines.families.flux2 import FLUX2_KLEIN, FLUX2_KLEIN_KV
from diffusax.pipelines.families.flux3 import FLUX3_KLEIN
from diffusax.pipelines.families.krea2 import KREA2
from diffusax.pipelines.families.qwen_image import QWEN_IMAGE
from diffusax.pipelines.families.qwen_image21 import QWEN_IMAGE21
from diffusax.pipelines.families.qwen_image_edit import QWEN_IMAGE_EDIT, QWEN_IMAGE_EDIT_PLUS
from diffusax.pipelines.families.stable_diffusion import STABLE_DIFFUSION
from diffusax.pipelines.families.stable_diffusion_xl import STABLE_DIFFUSION_XL
from diffusax.pipelines.families.unconditional import UNCONDITIONAL
from diffusax.pipelines.families.wan import WAN, WAN_IMAGE_TO_VIDEO
from diffusax.pipelines.families.z_image import Z_IMAGE

__all__ = [
    "FLUX",
    "FLUX2_KLEIN",
    "FLUX2_KLEIN_KV",
    "FLUX3_KLEIN",
    "IMAGE_PROMPTS",
    "KREA2",
    "QWEN_IMAGE",
    "QWEN_IMAGE21",
    "QWEN_IMAGE_EDIT",
    "QWEN_IMAGE_EDIT_PLUS",
    "STABLE_DIFFUSION",
    "STABLE_DIFFUSION_XL",
    "UNCONDITIONAL",
    "WAN",
    "WAN_IMAGE_TO_VIDEO",
    "Z_IMAGE",
    "Component",
    "Denoiser",
    "Family",
    "diffusers_components",
]
