"""Flux and its variants."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.tiny_tokenizers import clip_tokenizer, t5_tokenizer

from .autoencoders import flow_autoencoder
from .pictures import picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import CONTROLLED, REPAINT, START
from .stable_diffusion import SIZE
from .text import clip_text, t5
from .weights import extended, randomize

FLUX = {
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 32,
    "axes_dims_rope": (4, 4, 8),
    "guidance_embeds": True,
}
LATENTS = 4


def transformer(in_channels: int = 4 * LATENTS, **changes: Any) -> Any:
    """Flux's transformer."""
    config = {**FLUX, "in_channels": in_channels, "out_channels": 4 * LATENTS}
    return randomize(diffusers.FluxTransformer2DModel(**{**config, **changes}))


def control_network() -> Any:
    """A ControlNet for `transformer`."""
    return randomize(diffusers.FluxControlNetModel(in_channels=4 * LATENTS, **FLUX))


def components(in_channels: int = 4 * LATENTS, **extra: Any) -> Callable[[], Any]:
    """The components of a pipeline, with `extra`; functions among those are called."""

    def base() -> dict[str, Any]:
        return {
            "vae": flow_autoencoder(LATENTS),
            "text_encoder": clip_text(),
            "text_encoder_2": t5(),
            "tokenizer": clip_tokenizer(),
            "tokenizer_2": t5_tokenizer(),
            "transformer": transformer(in_channels),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        }

    return extended(base, extra)


PLAIN = components()
WIDE = components(8 * LATENTS)
CONTROL = components(controlnet=control_network)
INPUTS = {**SIZE, "max_sequence_length": 32}
BOTH = {**INPUTS, "true_cfg_scale": 3.0}
add("FluxPipeline", TEXT, PLAIN, **BOTH)
add("FluxImg2ImgPipeline", IMAGE, PLAIN, **START, **BOTH)
add("FluxInpaintPipeline", INPAINT, PLAIN, **REPAINT, **BOTH)
add("FluxControlPipeline", TEXT, WIDE, **CONTROLLED, **INPUTS)
add("FluxControlImg2ImgPipeline", IMAGE, WIDE, **START, **CONTROLLED, **INPUTS)
add("FluxControlInpaintPipeline", INPAINT, WIDE, **REPAINT, **CONTROLLED, **INPUTS)
add("FluxControlNetPipeline", TEXT, CONTROL, **CONTROLLED, **BOTH)
add("FluxControlNetImg2ImgPipeline", IMAGE, CONTROL, **START, **CONTROLLED, **INPUTS)
add("FluxControlNetInpaintPipeline", INPAINT, CONTROL, **REPAINT, **CONTROLLED, **INPUTS)
add(
    "FluxKontextPipeline", IMAGE, PLAIN, image=picture, max_area=64 * 64, _auto_resize=False, **BOTH
)
add(
    "FluxKontextInpaintPipeline",
    INPAINT,
    PLAIN,
    max_area=64 * 64,
    _auto_resize=False,
    **REPAINT,
    **BOTH,
)
