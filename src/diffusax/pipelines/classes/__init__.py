"""The pipelines under diffusers' names: each declares the arguments of a task for a family."""

from diffusax.pipelines.classes.controlnet import (
    StableDiffusionControlNetImg2ImgPipeline,
    StableDiffusionControlNetInpaintPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionXLControlNetImg2ImgPipeline,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLControlNetPipeline,
)
from diffusax.pipelines.classes.flux import (
    FluxControlNetPipeline,
    FluxFillPipeline,
    FluxImg2ImgPipeline,
    FluxInpaintPipeline,
    FluxKontextPipeline,
    FluxPipeline,
)
from diffusax.pipelines.classes.flux2 import (
    Flux2KleinInpaintPipeline,
    Flux2KleinKVPipeline,
    Flux2KleinPipeline,
)
from diffusax.pipelines.classes.flux3 import Flux3KleinInpaintPipeline, Flux3KleinPipeline
from diffusax.pipelines.classes.krea2 import Krea2EditPipeline, Krea2Pipeline
from diffusax.pipelines.classes.qwen_image import (
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImageImg2ImgPipeline,
    QwenImageInpaintPipeline,
    QwenImagePipeline,
)
from diffusax.pipelines.classes.qwen_image21 import QwenImage21Pipeline
from diffusax.pipelines.classes.stable_diffusion import (
    LatentConsistencyModelImg2ImgPipeline,
    LatentConsistencyModelPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPipeline,
)
from diffusax.pipelines.classes.stable_diffusion_xl import (
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLInstructPix2PixPipeline,
    StableDiffusionXLPipeline,
)
from diffusax.pipelines.classes.t2i_adapter import (
    StableDiffusionAdapterPipeline,
    StableDiffusionXLAdapterPipeline,
)
from diffusax.pipelines.classes.unconditional import DDIMPipeline, DDPMPipeline
from diffusax.pipelines.classes.wan import (
    WanImageToVideoPipeline,
    WanPipeline,
    WanVACEPipeline,
    WanVideoToVideoPipeline,
)
from diffusax.pipelines.classes.z_image import (
    ZImageEditPipeline,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
    ZImagePipeline,
)

__all__ = [
    "DDIMPipeline",
    "DDPMPipeline",
    "Flux2KleinInpaintPipeline",
    "Flux2KleinKVPipeline",
    "Flux2KleinPipeline",
    "Flux3KleinInpaintPipeline",
    "Flux3KleinPipeline",
    "FluxControlNetPipeline",
    "FluxFillPipeline",
    "FluxImg2ImgPipeline",
    "FluxInpaintPipeline",
    "FluxKontextPipeline",
    "FluxPipeline",
    "Krea2EditPipeline",
    "Krea2Pipeline",
    "LatentConsistencyModelImg2ImgPipeline",
    "LatentConsistencyModelPipeline",
    "QwenImage21Pipeline",
    "QwenImageEditPipeline",
    "QwenImageEditPlusPipeline",
    "QwenImageImg2ImgPipeline",
    "QwenImageInpaintPipeline",
    "QwenImagePipeline",
    "StableDiffusionAdapterPipeline",
    "StableDiffusionControlNetImg2ImgPipeline",
    "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionControlNetPipeline",
    "StableDiffusionImg2ImgPipeline",
    "StableDiffusionInpaintPipeline",
    "StableDiffusionInstructPix2PixPipeline",
    "StableDiffusionPipeline",
    "StableDiffusionXLAdapterPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline",
    "StableDiffusionXLControlNetInpaintPipeline",
    "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLImg2ImgPipeline",
    "StableDiffusionXLInpaintPipeline",
    "StableDiffusionXLInstructPix2PixPipeline",
    "StableDiffusionXLPipeline",
    "WanImageToVideoPipeline",
    "WanPipeline",
    "WanVACEPipeline",
    "WanVideoToVideoPipeline",
    "ZImageEditPipeline",
    "ZImageImg2ImgPipeline",
    "ZImageInpaintPipeline",
    "ZImagePipeline",
]
