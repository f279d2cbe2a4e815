"""Run, edit with and train Hugging Face diffusion models in JAX."""

from diffusax.checkpoints import load_network, save_network
from diffusax.pipelines import DiffusionPipeline, ImagePipelineOutput, StableDiffusionPipeline
from diffusax.samplers import (
    DDIMScheduler,
    DDPMScheduler,
    DPMSolverMultistepScheduler,
    DPMSolverSinglestepScheduler,
    EulerAncestralDiscreteScheduler,
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    KDPM2AncestralDiscreteScheduler,
    KDPM2DiscreteScheduler,
    LCMScheduler,
    LMSDiscreteScheduler,
    PNDMScheduler,
    TCDScheduler,
    UniPCMultistepScheduler,
)

__version__ = "0.1.0.dev0"

__all__ = [
    "DDIMScheduler",
    "DDPMScheduler",
    "DPMSolverMultistepScheduler",
    "DPMSolverSinglestepScheduler",
    "DiffusionPipeline",
    "EulerAncestralDiscreteScheduler",
    "EulerDiscreteScheduler",
    "HeunDiscreteScheduler",
    "ImagePipelineOutput",
    "KDPM2AncestralDiscreteScheduler",
    "KDPM2DiscreteScheduler",
    "LCMScheduler",
    "LMSDiscreteScheduler",
    "PNDMScheduler",
    "StableDiffusionPipeline",
    "TCDScheduler",
    "UniPCMultistepScheduler",
    "load_network",
    "save_network",
]
