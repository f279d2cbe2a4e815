"""Tasks: host-side work around the three compiled programs."""

from diffusax.pipelines.loading import DiffusionPipeline
from diffusax.pipelines.stable_diffusion import ImagePipelineOutput, StableDiffusionPipeline

__all__ = ["DiffusionPipeline", "ImagePipelineOutput", "StableDiffusionPipeline"]
