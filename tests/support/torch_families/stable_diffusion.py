"""Stable Diffusion 1 and 2 and what builds on their UNet."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.tiny import UNET
from support.tiny_tokenizers import clip_tokenizer

from .autoencoders import autoencoder
from .pictures import picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import CONTROLLED, REPAINT, START
from .text import clip_text
from .weights import extended, randomize

LEVELS = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SIZE = {"height": 64, "width": 64}


def unet(style: str = "sd2", **changes: Any) -> Any:
    """A UNet of two levels."""
    return randomize(diffusers.UNet2DConditionModel(**{**UNET[style], "sample_size": 8, **changes}))


def control_network(style: str = "sd2", **changes: Any) -> Any:
    """A ControlNet for `unet`."""
    config = {k: v for k, v in UNET[style].items() if k not in ("sample_size", "up_block_types")}
    config["conditioning_embedding_out_channels"] = (4, 8, 8, 16)
    return randomize(diffusers.ControlNetModel(**{**config, **changes}))


def ddim(**changes: Any) -> Any:
    """DDIM with Stable Diffusion's noise levels."""
    options = {"clip_sample": False, "set_alpha_to_one": False, "steps_offset": 1}
    return diffusers.DDIMScheduler(**{**LEVELS, **options, **changes})


def components(style: str = "sd2", in_channels: int = 4, **extra: Any) -> Callable[[], Any]:
    """The components of a pipeline, with `extra`; functions among those are called."""

    def base() -> dict[str, Any]:
        return {
            "vae": autoencoder(),
            "text_encoder": clip_text(),
            "tokenizer": clip_tokenizer(),
            "unet": unet(style, in_channels=in_channels),
            "scheduler": ddim(),
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }

    return extended(base, extra)


PLAIN = components()
CONTROL = components(controlnet=control_network)
add(
    "StableDiffusionPipeline",
    TEXT,
    components(scheduler=lambda: ddim(prediction_type="v_prediction")),
    **SIZE,
)
add("StableDiffusionImg2ImgPipeline", IMAGE, PLAIN, **START)
add("StableDiffusionInpaintPipeline", INPAINT, components(in_channels=9), **REPAINT, **SIZE)
add("StableDiffusionInstructPix2PixPipeline", IMAGE, components(in_channels=8), image=picture)
add("StableDiffusionControlNetPipeline", TEXT, CONTROL, image=picture)
add("StableDiffusionControlNetImg2ImgPipeline", IMAGE, CONTROL, **START, **CONTROLLED)
add("StableDiffusionControlNetInpaintPipeline", INPAINT, CONTROL, **REPAINT, **CONTROLLED)
