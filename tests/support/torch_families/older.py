"""Older pipelines of diffusers with networks of their own: AltDiffusion to Versatile Diffusion."""

from typing import Any

import transformers
from diffusers.pipelines.deprecated.alt_diffusion.modeling_roberta_series import (
    RobertaSeriesConfig,
    RobertaSeriesModelWithTransformation,
)
from diffusers.pipelines.deprecated.vq_diffusion.pipeline_vq_diffusion import (
    LearnedClassifierFreeSamplingEmbeddings,
)
from diffusers.pipelines.stable_diffusion import CLIPImageProjection

from support.tiny_tokenizers import clip_tokenizer, roberta_tokenizer

from .pictures import picture, tensor
from .registry import IMAGE, TEXT, add
from .shared import START
from .stable_diffusion import PLAIN, SIZE, ddim, unet
from .text import clip_images, clip_text, clip_text_projected, clip_vision
from .weights import network, parts, randomize, scheduler


def roberta() -> Any:
    """AltDiffusion's text encoder."""
    config = RobertaSeriesConfig(
        hidden_size=32,
        project_dim=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=100,
    )
    return randomize(RobertaSeriesModelWithTransformation(config))


alt = parts(PLAIN, text_encoder=roberta, tokenizer=roberta_tokenizer)
add("AltDiffusionPipeline", TEXT, alt, **SIZE)
add("AltDiffusionImg2ImgPipeline", IMAGE, alt, **START)

vq = parts(
    text_encoder=clip_text,
    tokenizer=clip_tokenizer,
    vqvae=network(
        "VQModel",
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=3,
        norm_num_groups=8,
        num_vq_embeddings=12,
        vq_embed_dim=3,
    ),
    transformer=network(
        "Transformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        cross_attention_dim=32,
        attention_bias=True,
        num_vector_embeds=13,
        sample_size=16,
        activation_fn="geglu-approximate",
        num_embeds_ada_norm=12,
    ),
    scheduler=scheduler("VQDiffusionScheduler", num_vec_classes=13, num_train_timesteps=12),
    learned_classifier_free_sampling_embeddings=lambda: LearnedClassifierFreeSamplingEmbeddings(
        learnable=False
    ),
)
add("VQDiffusionPipeline", TEXT, vq)

versatile = parts(
    image_unet=lambda: unet("sd1"),
    vae=lambda: PLAIN()["vae"],
    scheduler=ddim,
    tokenizer=clip_tokenizer,
    text_encoder=clip_text_projected,
    text_unet=None,
    image_encoder=clip_vision,
    image_feature_extractor=clip_images,
)

add("VersatileDiffusionTextToImagePipeline", TEXT, versatile, **SIZE)
add(
    "VersatileDiffusionImageVariationPipeline",
    IMAGE,
    versatile,
    image=picture,
    negative_prompt=None,
    **SIZE,
)
zero = parts(
    PLAIN,
    inverse_scheduler=scheduler("DDIMInverseScheduler"),
    caption_generator=None,
    caption_processor=None,
)
add(
    "StableDiffusionPix2PixZeroPipeline",
    IMAGE,
    zero,
    source_embeds=lambda: tensor(2, 77, 32, seed=1),
    target_embeds=lambda: tensor(2, 77, 32, seed=2),
    **SIZE,
)


def image_projection() -> Any:
    """What takes GLIGEN's pictures into the space of texts."""
    return randomize(CLIPImageProjection(hidden_size=32))


gligen = parts(
    PLAIN,
    unet=lambda: unet(attention_type="gated-text-image", attention_head_dim=8),
    processor=lambda: transformers.CLIPProcessor(clip_images(), clip_tokenizer()),
    image_encoder=clip_vision,
    image_project=image_projection,
)
add(
    "StableDiffusionGLIGENTextImagePipeline",
    TEXT,
    gligen,
    gligen_phrases=["an apple"],
    gligen_images=lambda: [picture(3, 32)],
    gligen_boxes=[[0.1, 0.2, 0.6, 0.8]],
    gligen_scheduled_sampling_beta=0.6,
    **SIZE,
)
