"""diffusers' Flax classes, which it removed in 0.40, over diffusax's own programs.

An old program runs with its import line changed: `from diffusax.interop.flax import FlaxX`. A
pipeline or network holds no parameters; they are plain dicts of arrays that go into every call.
"""

from diffusax.interop.flax.models import (
    FlaxAutoencoderKL,
    FlaxControlNetModel,
    FlaxModelMixin,
    FlaxUNet2DConditionModel,
)
from diffusax.interop.flax.pipeline import FlaxDiffusionPipeline
from diffusax.interop.flax.scheduler import FlaxSchedulerMixin
from diffusax.interop.flax.schedulers import (
    FlaxDDIMScheduler,
    FlaxDDPMScheduler,
    FlaxDPMSolverMultistepScheduler,
    FlaxEulerDiscreteScheduler,
    FlaxLMSDiscreteScheduler,
    FlaxPNDMScheduler,
)
from diffusax.interop.flax.stable_diffusion import (
    FlaxStableDiffusionControlNetPipeline,
    FlaxStableDiffusionPipeline,
)
from diffusax.interop.flax.stable_diffusion_images import (
    FlaxStableDiffusionImg2ImgPipeline,
    FlaxStableDiffusionInpaintPipeline,
    FlaxStableDiffusionInstructPix2PixPipeline,
)
from diffusax.interop.flax.stable_diffusion_xl import FlaxStableDiffusionXLPipeline
from diffusax.interop.flax.text import FlaxCLIPTextModel, FlaxCLIPTextModelWithProjection
from diffusax.interop.flax.ve_schedulers import FlaxKarrasVeScheduler, FlaxScoreSdeVeScheduler

__all__ = [
    "FlaxAutoencoderKL",
    "FlaxCLIPTextModel",
    "FlaxCLIPTextModelWithProjection",
    "FlaxControlNetModel",
    "FlaxDDIMScheduler",
    "FlaxDDPMScheduler",
    "FlaxDPMSolverMultistepScheduler",
    "FlaxDiffusionPipeline",
    "FlaxEulerDiscreteScheduler",
    "FlaxKarrasVeScheduler",
    "FlaxLMSDiscreteScheduler",
    "FlaxModelMixin",
    "FlaxPNDMScheduler",
    "FlaxSchedulerMixin",
    "FlaxScoreSdeVeScheduler",
    "FlaxStableDiffusionControlNetPipeline",
    "FlaxStableDiffusionImg2ImgPipeline",
    "FlaxStableDiffusionInpaintPipeline",
    "FlaxStableDiffusionInstructPix2PixPipeline",
    "FlaxStableDiffusionPipeline",
    "FlaxStableDiffusionXLPipeline",
    "FlaxUNet2DConditionModel",
]
