"""Draws images from noise alone.

The calls' arguments, their order and defaults are diffusers'; those after the star are added.
"""

from typing import Any

from diffusax.pipelines.families import UNCONDITIONAL
from diffusax.pipelines.pipeline.call import documented
from diffusax.pipelines.pipeline.pipeline import DiffusionPipeline
from diffusax.pipelines.tasks.tasks import unconditional
from diffusax.samplers import DDIMScheduler, Scheduler

# `documented` (pipeline/call.py) makes each call from its declaration: it checks the arguments by
# their types (plan/arguments.py), and generates the images.
# fmt: off


class DDPMPipeline(DiffusionPipeline):
    """Generates images from noise alone (Ho et al. 2020)."""

    family = UNCONDITIONAL
    task = staticmethod(unconditional)

    @documented
    def __call__(
        self, batch_size=1, generator=None, num_inference_steps=1000, output_type="pil",
        return_dict=True, *, seed=None, noise="jax", hooks=None,
    ):
        """Generates images of the size that the network was trained at."""


class DDIMPipeline(DiffusionPipeline):
    """Generates images from noise alone in fewer steps (Song et al. 2021)."""

    family = UNCONDITIONAL
    task = staticmethod(unconditional)

    def __init__(self, **components: Any):
        """Makes a pipeline as `DiffusionPipeline` does; the scheduler becomes a DDIMScheduler.

        It keeps the options that both have. A scheduler that is assigned later stays what it is.

        Raises:
            ValueError: a component is missing, unknown, or of the wrong type.
        """
        scheduler = components.get("scheduler")
        if isinstance(scheduler, Scheduler):
            components["scheduler"] = DDIMScheduler.from_config(scheduler.config)
        super().__init__(**components)

    @documented
    def __call__(
        self, batch_size=1, generator=None, eta=0.0, num_inference_steps=50,
        use_clipped_model_output=None, output_type="pil", return_dict=True, *, seed=None,
        noise="jax", hooks=None,
    ):
        """Generates images of the size that the network was trained at."""
