"""Pipelines: tasks for families of checkpoints, run by three kinds of compiled programs."""

from diffusax.images.outputs import ImagePipelineOutput
from diffusax.pipelines import classes
from diffusax.pipelines.auto import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    AutoPipelineForText2Image,
)
from diffusax.pipelines.classes import *  # noqa: F403
from diffusax.pipelines.components import MultiControlNetModel
from diffusax.pipelines.pipeline import DiffusionPipeline
from diffusax.pipelines.running_batch import RunningBatch

__all__ = [
    "AutoPipelineForImage2Image",
    "AutoPipelineForInpainting",
    "AutoPipelineForText2Image",
    "DiffusionPipeline",
    "ImagePipelineOutput",
    "MultiControlNetModel",
    "RunningBatch",
    *classes.__all__,
]
