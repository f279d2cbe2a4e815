"""Pipelines: tasks for families of checkpoints, run by three kinds of compiled programs.

A call goes down through the rooms: `classes` has its signature, `pipeline` the object, `tasks` make
a plan of its arguments, `run` turns the plan into images. `components` holds the networks,
`families` says how kinds of checkpoints differ, and `plan` is the data that all of them share.

The names that are not in `__all__` are those that tasks and families of one's own are written with.
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
from diffusax.pipelines.families import STABLE_DIFFUSION as STABLE_DIFFUSION
from diffusax.pipelines.families import Family as Family
from diffusax.pipelines.pipeline.call import documented as documented
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.pipelines.tasks.tasks import text_to_image as text_to_image
from diffusax.runtime.random.noise import noise_source as noise_source

__all__ = [
    "AutoPipelineForImage2Image",
    "AutoPipelineForInpainting",
    "AutoPipelineForText2Image",
    "DiffusionPipeline",
    "ImagePipelineOutput",
    "MultiControlNetModel",
]
__all__ += classes.__all__
