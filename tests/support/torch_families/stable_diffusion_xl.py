"""SDXL and what builds on its UNet."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.tiny_tokenizers import clip_tokenizer

from .autoencoders import autoencoder
from .pictures import picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import CONTROLLED, REPAINT, START
from .stable_diffusion import LEVELS, SIZE, control_network, unet
from .text import clip_text, clip_text_projected
from .weights import extended

WIDTHS = {"cross_attention_dim": 64, "projection_class_embeddings_input_dim": 32 + 6 * 8}


def xl_unet(**changes: Any) -> Any:
    """SDXL's UNet for text encoders of 32 channels each."""
    return unet("xl", **{**WIDTHS, **changes})


def xl_control_network(**changes: Any) -> Any:
    """A ControlNet for `xl_unet`."""
    return control_network("xl", **{**WIDTHS, **changes})


def components(in_channels: int = 4, **extra: Any) -> Callable[[], Any]:
    """The components of a pipeline, with `extra`; functions among those are called."""

    def base() -> dict[str, Any]:
        return {
            "vae": autoencoder(),
            "text_encoder": clip_text(),
            "text_encoder_2": clip_text_projected(hidden_act="gelu"),
            "tokenizer": clip_tokenizer(),
            "tokenizer_2": clip_tokenizer(pad_token="!"),
            "unet": xl_unet(in_channels=in_channels),
            "scheduler": diffusers.EulerDiscreteScheduler(**LEVELS, steps_offset=1),
        }

    return extended(base, extra)


PLAIN = components()
CONTROL = components(controlnet=xl_control_network)
add("StableDiffusionXLPipeline", TEXT, PLAIN, **SIZE)
add("StableDiffusionXLImg2ImgPipeline", IMAGE, PLAIN, **START)
add("StableDiffusionXLInpaintPipeline", INPAINT, PLAIN, **REPAINT, **SIZE)
add("StableDiffusionXLInstructPix2PixPipeline", IMAGE, components(8), image=picture, **SIZE)
add("StableDiffusionXLControlNetPipeline", TEXT, CONTROL, image=picture)
add("StableDiffusionXLControlNetImg2ImgPipeline", IMAGE, CONTROL, **START, **CONTROLLED)
add(
    "StableDiffusionXLControlNetInpaintPipeline", INPAINT, CONTROL, control_image=picture, **REPAINT
)
