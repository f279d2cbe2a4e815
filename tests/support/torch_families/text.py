"""Tiny text encoders and image encoders with random weights."""

from typing import Any

from transformers import (
    CLIPImageProcessor,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModelWithProjection,
    T5Config,
    T5EncoderModel,
)

from support.tiny_tokenizers import CLIP_TOKENS, T5_TOKENS

from .weights import randomize

CLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "vocab_size": len(CLIP_TOKENS),
    "bos_token_id": len(CLIP_TOKENS) - 2,
    "eos_token_id": len(CLIP_TOKENS) - 1,
    "pad_token_id": len(CLIP_TOKENS) - 1,
}
T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": len(T5_TOKENS),
    "feed_forward_proj": "gated-gelu",
}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "projection_dim": 32,
    "image_size": 32,
    "patch_size": 8,
}


def clip_text(**changes: Any) -> Any:
    """CLIP's text encoder, 32 channels."""
    return randomize(CLIPTextModel(CLIPTextConfig(**{**CLIP, **changes})))


def clip_text_projected(**changes: Any) -> Any:
    """CLIP's text encoder with a pooled embedding of 32 channels."""
    return randomize(CLIPTextModelWithProjection(CLIPTextConfig(**{**CLIP, **changes})))


def t5(**changes: Any) -> Any:
    """T5's encoder, 32 channels."""
    return randomize(T5EncoderModel(T5Config(**{**T5, **changes})))


def clip_vision(**changes: Any) -> Any:
    """CLIP's image encoder, 32 channels, for pictures of 32x32."""
    return randomize(CLIPVisionModelWithProjection(CLIPVisionConfig(**{**VISION, **changes})))


def clip_images(side: int = 32) -> Any:
    """What prepares pictures for CLIP's image encoder."""
    return CLIPImageProcessor(
        crop_size={"height": side, "width": side}, size={"shortest_edge": side}
    )
