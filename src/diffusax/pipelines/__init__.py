"""Pipelines: tasks for families of checkpoints, run by three kinds of compiled programs.

A call goes down through the rooms: `classes` has its signature, `pipeline` the object, `tasks` make
a plan of its arguments, `run` turns the plan into images. `components` holds the networks,
`families` says how kinds of checkpoints differ, and `plan` is the data that all of them share.
"""

from diffusax.images.outputs import ImagePipelineOutput
from diffusax.pipelines import classes
from diffusax.pipelines.classes import *  # noqa: F403
from diffusax.pipelines.classes.auto import (
    AutoPipelineForImage2Image,
    AutoPipelineForInpainting,
    AutoPipelineForText2Image,
)
from diffusax.pipelines.components.components import MultiControlNetModel
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline

__all__ = [
    "AutoPipelineForImage2Image",
    "AutoPipelineForInpainting",
    "AutoPipelineForText2Image",
    "DiffusionPipeline",
    "ImagePipelineOutput",
    "MultiControlNetModel",
    *classes.__all__,
]
