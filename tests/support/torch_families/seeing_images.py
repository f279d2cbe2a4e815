"""Transformers of pictures whose reader sees pictures: JoyImage, DreamLite, Qwen-Image 2.1."""

from typing import Any

import torch
import transformers

from support.processors import qwen3_processor
from support.tiny_tokenizers import qwen_tokenizer

from .areas import small_buckets
from .autoencoders import autoencoder, flux2_autoencoder, wan_autoencoder
from .image_transformers import Z_IMAGE, z_image
from .language_models import qwen2_5_vl, qwen3_vl, qwen3_vl_model
from .pictures import picture
from .registry import IMAGE, TEXT, add
from .shared import FLOW, SHIFTING
from .stable_diffusion import SIZE
from .text import t5
from .weights import network, parts, randomize

READER = {"text_encoder": qwen3_vl, "tokenizer": qwen_tokenizer, "processor": qwen3_processor}
JOY = {
    "patch_size": [1, 2, 2],
    "in_channels": 16,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "text_dim": 32,
    "num_layers": 2,
    "rope_dim_list": [4, 6, 6],
    "theta": 256,
}
joy = parts(
    READER,
    vae=wan_autoencoder,
    scheduler=FLOW,
    transformer=network("JoyImageEditTransformer3DModel", **JOY),
)
joy_plus = parts(joy, transformer=network("JoyImageEditPlusTransformer3DModel", **JOY))
add("JoyImageEditPipeline", IMAGE, joy, prepare=small_buckets, image=picture, **SIZE)
add(
    "JoyImageEditPlusPipeline",
    IMAGE,
    joy_plus,
    prepare=small_buckets,
    images=lambda: [picture(0), picture(1)],
    **SIZE,
)

dream = parts(
    READER,
    vae=network(
        "AutoencoderTiny",
        encoder_block_out_channels=(16, 16, 16, 16),
        decoder_block_out_channels=(16, 16, 16, 16),
        num_encoder_blocks=(1, 1, 1, 1),
        num_decoder_blocks=(1, 1, 1, 1),
        latent_channels=4,
    ),
    scheduler=FLOW,
    unet=network(
        "DreamLiteUNetModel",
        sample_size=8,
        down_block_types=(
            "DreamLiteCrossAttnNoSelfAttnDownBlock2D",
            "DreamLiteCrossAttnDownBlock2D",
        ),
        up_block_types=("DreamLiteCrossAttnUpBlock2D", "DreamLiteUpBlock2D"),
        block_out_channels=(32, 64),
        cross_attention_dim=32,
        attention_head_dim=8,
        layers_per_block=1,
        norm_num_groups=8,
        transformer_layers_per_block=1,
    ),
)
add("DreamLitePipeline", IMAGE, dream, image=picture, max_sequence_length=512, **SIZE)
add("DreamLiteMobilePipeline", IMAGE, dream, image=picture, max_sequence_length=512, **SIZE)

qwen21 = parts(
    READER,
    vae=network(
        "AutoencoderKLQwenImage21",
        base_dim=8,
        decoder_base_dim=8,
        z_dim=8,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
        latents_mean=[0.1 * i for i in range(8)],
        latents_std=[1.0 + 0.1 * i for i in range(8)],
    ),
    scheduler=SHIFTING,
    transformer=network(
        "QwenImage21Transformer2DModel",
        in_channels=8,
        out_channels=8,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(8, 4, 4),
    ),
)
add("QwenImage21Pipeline", TEXT, qwen21, true_cfg_scale=3.0, **SIZE)

refiner = parts(
    text_encoder=qwen2_5_vl,
    tokenizer=qwen_tokenizer,
    scheduler=FLOW,
    guider=None,
    vae=network(
        "AutoencoderKLHunyuanImageRefiner",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    ),
    transformer=network(
        "HunyuanImageTransformer2DModel",
        in_channels=16,
        out_channels=8,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1, 1),
        guidance_embeds=True,
        text_embed_dim=32,
        rope_axes_dim=(2, 2, 4),
    ),
)
add("HunyuanImageRefinerPipeline", IMAGE, refiner, image=picture, **SIZE)


def siglip() -> Any:
    """The image encoder of Z-Image Omni."""
    config = transformers.Siglip2VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        patch_size=16,
        num_patches=16,
    )
    return randomize(transformers.Siglip2VisionModel(config))


omni = parts(
    z_image,
    siglip=siglip,
    siglip_processor=lambda: transformers.Siglip2ImageProcessor(patch_size=16, max_num_patches=16),
    transformer=network("ZImageTransformer2DModel", siglip_feat_dim=32, **Z_IMAGE),
)


def halve(pipe: Any) -> None:
    """Takes the pipeline to bfloat16, as it makes its pictures so whatever its weights are."""
    pipe.to(torch.bfloat16)


add("ZImageOmniPipeline", IMAGE, omni, prepare=halve, image=lambda: [picture()], **SIZE)


ideogram_transformer = network(
    "Ideogram4Transformer2DModel",
    in_channels=16,
    num_layers=2,
    attention_head_dim=16,
    num_attention_heads=2,
    intermediate_size=64,
    adaln_dim=16,
    llm_features_dim=13 * 32,
    mrope_section=(4, 2, 2),
)
ideogram = parts(
    text_encoder=lambda: qwen3_vl_model(num_hidden_layers=36),
    tokenizer=qwen_tokenizer,
    vae=flux2_autoencoder,
    scheduler=FLOW,
    transformer=ideogram_transformer,
    unconditional_transformer=ideogram_transformer,
)
add(
    "Ideogram4Pipeline",
    TEXT,
    ideogram,
    max_sequence_length=64,
    guidance_schedule=(3.0, 2.0),
    **SIZE,
)

fibo2 = parts(
    text_encoder=lambda: qwen3_vl(num_hidden_layers=36),
    processor=qwen3_processor,
    vae=flux2_autoencoder,
    scheduler=SHIFTING,
    transformer=network(
        "BriaFibo2Transformer2DModel",
        in_channels=4,
        patch_size=2,
        dim=32,
        n_layers=6,
        n_refiner_layers=1,
        n_heads=2,
        cap_feat_dim=96,
        injection_layer_ids=(0, 1, 2, 3, 4),
        perceiver_num_layers=1,
        min_num_gist_tokens=8,
        max_num_gist_tokens=16,
        gist_step=4,
        gist_min_text_len=16,
        gist_max_text_len=256,
        axes_dims=(8, 4, 4),
        axes_lens=(2048, 64, 64),
    ),
)
add("BriaFibo2Pipeline", TEXT, fibo2, prompt='{"short_description": "a red apple"}', **SIZE)

glm_image = parts(
    text_encoder=lambda: t5(vocab_size=384),
    tokenizer=lambda: transformers.ByT5Tokenizer(),
    vision_language_encoder=None,
    processor=None,
    vae=lambda: autoencoder(latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[1.0, 1.1, 1.2, 1.3]),
    scheduler=FLOW,
    transformer=network(
        "GlmImageTransformer2DModel",
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=8,
        prior_vq_quantizer_codebook_size=128,
    ),
)
add(
    "GlmImagePipeline",
    TEXT,
    glm_image,
    prompt='a sign that reads "red apple"',
    prior_token_ids=lambda: torch.arange(16).reshape(1, 16) * 7 % 128,
    **SIZE,
)
