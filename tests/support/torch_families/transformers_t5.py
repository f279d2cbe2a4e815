"""Diffusion transformers that read their prompts with T5: PixArt, SD3, Flux."""

from collections.abc import Callable
from typing import Any

import diffusers

from support.tiny_tokenizers import clip_tokenizer, t5_tokenizer

from .autoencoders import autoencoder, flow_autoencoder
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import REPAINT, START
from .stable_diffusion import SIZE, ddim
from .text import clip_text_projected, t5
from .weights import extended, randomize

PIXART = {
    "sample_size": 8,
    "num_layers": 2,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "caption_channels": 32,
    "in_channels": 4,
    "cross_attention_dim": 24,
    "out_channels": 8,
}
SD3 = {
    "sample_size": 8,
    "patch_size": 2,
    "in_channels": 16,
    "out_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 4,
    "caption_projection_dim": 32,
    "joint_attention_dim": 32,
    "pooled_projection_dim": 64,
    "pos_embed_max_size": 16,
}


def pixart() -> dict[str, Any]:
    """PixArt's components, the transformer with learned variances."""
    return {
        "vae": autoencoder(),
        "text_encoder": t5(),
        "tokenizer": t5_tokenizer(),
        "transformer": randomize(diffusers.PixArtTransformer2DModel(**PIXART)),
        "scheduler": ddim(),
    }


def sd3(**extra: Any) -> Callable[[], Any]:
    """SD3's components, with `extra`; functions among those are called."""

    def base() -> dict[str, Any]:
        return {
            "vae": flow_autoencoder(),
            "text_encoder": clip_text_projected(),
            "text_encoder_2": clip_text_projected(hidden_act="gelu"),
            "text_encoder_3": t5(),
            "tokenizer": clip_tokenizer(),
            "tokenizer_2": clip_tokenizer(),
            "tokenizer_3": t5_tokenizer(),
            "transformer": randomize(diffusers.SD3Transformer2DModel(**SD3)),
            "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        }

    return extended(base, extra)


add("PixArtAlphaPipeline", TEXT, pixart, use_resolution_binning=False, **SIZE)
add("PixArtSigmaPipeline", TEXT, pixart, use_resolution_binning=False, **SIZE)
SD3_INPUTS = {**SIZE, "max_sequence_length": 32}
add("StableDiffusion3Pipeline", TEXT, sd3(), **SD3_INPUTS)
add("StableDiffusion3Img2ImgPipeline", IMAGE, sd3(), **START, **SD3_INPUTS)
add("StableDiffusion3InpaintPipeline", INPAINT, sd3(), **REPAINT, **SD3_INPUTS)
