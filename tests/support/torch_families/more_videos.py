"""Pipelines of videos: Hunyuan, Stable Video Diffusion, Sana, SkyReels, Kandinsky 5."""

from typing import Any

import transformers
from diffusers.guiders import ClassifierFreeGuidance

from support.tiny_tokenizers import (
    clip_tokenizer,
    gemma_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)

from .autoencoders import wan_autoencoder
from .flux2 import KANDINSKY5, kandinsky5
from .language_models import LLAMA, gemma2, qwen2_5_vl, umt5
from .pictures import video
from .registry import VIDEO, add
from .shared import FLOW
from .stable_diffusion import PLAIN, unet
from .text import clip_images, clip_text, clip_vision, t5
from .videos import CLIP, FRAMES, SMALL, WAN, still
from .weights import network, parts, randomize, scheduler


def llama_model() -> Any:
    """Llama without its last layer."""
    return randomize(transformers.LlamaModel(transformers.LlamaConfig(**LLAMA)))


HUNYUAN = {
    "out_channels": 4,
    "num_attention_heads": 2,
    "attention_head_dim": 10,
    "num_layers": 1,
    "num_single_layers": 1,
    "num_refiner_layers": 1,
    "patch_size": 1,
    "patch_size_t": 1,
    "text_embed_dim": 32,
    "pooled_projection_dim": 32,
    "rope_axes_dim": (2, 4, 4),
}
hunyuan_autoencoder = network(
    "AutoencoderKLHunyuanVideo",
    latent_channels=4,
    down_block_types=("HunyuanVideoDownBlock3D",) * 4,
    up_block_types=("HunyuanVideoUpBlock3D",) * 4,
    block_out_channels=(8, 8, 8, 8),
    layers_per_block=1,
    norm_num_groups=4,
    scaling_factor=0.476986,
    spatial_compression_ratio=8,
    temporal_compression_ratio=4,
    mid_block_add_attention=True,
)
hunyuan = parts(
    text_encoder=llama_model,
    tokenizer=llama_tokenizer,
    text_encoder_2=clip_text,
    tokenizer_2=clip_tokenizer,
    vae=hunyuan_autoencoder,
    scheduler=FLOW,
    transformer=network(
        "HunyuanVideoTransformer3DModel", in_channels=4, guidance_embeds=True, **HUNYUAN
    ),
)
skyreels_hunyuan = parts(
    hunyuan,
    transformer=network(
        "HunyuanVideoTransformer3DModel", in_channels=8, guidance_embeds=True, **HUNYUAN
    ),
)
PROMPT = {"prompt_template": {"template": "{}", "crop_start": 0}, "num_frames": 9}
add("HunyuanVideoPipeline", VIDEO, hunyuan, true_cfg_scale=3.0, **PROMPT, **SMALL)
add(
    "HunyuanSkyreelsImageToVideoPipeline",
    VIDEO,
    skyreels_hunyuan,
    image=still,
    true_cfg_scale=3.0,
    **PROMPT,
    **SMALL,
)

svd = parts(
    image_encoder=lambda: clip_vision(image_size=224, patch_size=56),
    feature_extractor=lambda: clip_images(224),
    vae=network(
        "AutoencoderKLTemporalDecoder",
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=32,
    ),
    unet=network(
        "UNetSpatioTemporalConditionModel",
        block_out_channels=(32, 64),
        layers_per_block=1,
        sample_size=16,
        in_channels=8,
        out_channels=4,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
        cross_attention_dim=32,
        num_attention_heads=(4, 4),
        projection_class_embeddings_input_dim=96,
        addition_time_embed_dim=32,
    ),
    scheduler=scheduler(
        "EulerDiscreteScheduler",
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type="v_prediction",
        sigma_max=700.0,
        sigma_min=0.002,
        timestep_type="continuous",
        use_karras_sigmas=True,
    ),
)
add("StableVideoDiffusionPipeline", VIDEO, svd, image=still, **FRAMES)

SANA = {
    "in_channels": 16,
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "num_layers": 2,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 12,
    "cross_attention_dim": 24,
    "caption_channels": 32,
    "sample_size": 8,
    "patch_size": (1, 2, 2),
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
sana = parts(
    text_encoder=gemma2,
    tokenizer=gemma_tokenizer,
    vae=wan_autoencoder,
    scheduler=FLOW,
    transformer=network("SanaVideoTransformer3DModel", **SANA),
)
EXACT = {"frames": 5, "complex_human_instruction": [], "use_resolution_binning": False}
add("SanaVideoPipeline", VIDEO, sana, **EXACT, **SMALL)
add("SanaImageToVideoPipeline", VIDEO, sana, image=still, **EXACT, **SMALL)

sky = parts(
    text_encoder=umt5,
    tokenizer=t5_tokenizer,
    vae=wan_autoencoder,
    scheduler=scheduler("UniPCMultistepScheduler", flow_shift=5.0, use_flow_sigmas=True),
    transformer=network("SkyReelsV2Transformer3DModel", in_channels=16, **WAN),
)
sky_image = parts(
    sky,
    transformer=network("SkyReelsV2Transformer3DModel", in_channels=36, image_dim=32, **WAN),
    image_encoder=clip_vision,
    image_processor=clip_images,
)
NEEDS = {"needs": ("ftfy",)}
add("SkyReelsV2Pipeline", VIDEO, sky, num_frames=5, **NEEDS, **SMALL)
add("SkyReelsV2ImageToVideoPipeline", VIDEO, sky_image, image=still, num_frames=5, **NEEDS, **SMALL)
add(
    "SkyReelsV2DiffusionForcingPipeline",
    VIDEO,
    sky,
    num_frames=5,
    base_num_frames=5,
    **NEEDS,
    **SMALL,
)

SPAN = {"num_frames": 5, "base_num_frames": 5, **NEEDS, **SMALL}
add("SkyReelsV2DiffusionForcingImageToVideoPipeline", VIDEO, sky, image=still, **SPAN)
add(
    "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
    VIDEO,
    sky,
    video=lambda: video(5),
    overlap_history=5,
    **{**SPAN, "num_frames": 9, "base_num_frames": 9},
)


def qwen_text() -> Any:
    """The part of Qwen 2.5 VL for texts."""
    return qwen2_5_vl().model.language_model


hunyuan15 = parts(
    text_encoder=qwen_text,
    tokenizer=qwen_tokenizer,
    text_encoder_2=lambda: t5(vocab_size=384),
    tokenizer_2=lambda: transformers.ByT5Tokenizer(),
    scheduler=FLOW,
    guider=lambda: ClassifierFreeGuidance(guidance_scale=3.0),
    vae=network(
        "AutoencoderKLHunyuanVideo15",
        latent_channels=4,
        block_out_channels=(16, 16),
        layers_per_block=1,
        spatial_compression_ratio=4,
        temporal_compression_ratio=2,
        downsample_match_channel=False,
        upsample_match_channel=False,
    ),
    transformer=network(
        "HunyuanVideo15Transformer3DModel",
        in_channels=9,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        num_refiner_layers=1,
        mlp_ratio=2.0,
        patch_size=1,
        patch_size_t=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
        image_embed_dim=12,
        rope_axes_dim=(2, 2, 4),
        target_size=16,
        task_type="t2v",
    ),
)
add("HunyuanVideo15Pipeline", VIDEO, hunyuan15, num_frames=5, height=32, width=32)

short5 = parts(kandinsky5, vae=lambda: hunyuan16())


def hunyuan16() -> Any:
    """Hunyuan's autoencoder with 16 channels of latents."""
    return network(
        "AutoencoderKLHunyuanVideo",
        latent_channels=16,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
    )()


def small_videos(pipe: Any) -> None:
    """Sets the only resolution that the pipeline makes."""
    pipe.resolutions = [(32, 32)]


TO_VIDEO = parts(
    short5, transformer=network("Kandinsky5Transformer3DModel", visual_cond=False, **KANDINSKY5)
)
FROM_IMAGE = parts(
    short5, transformer=network("Kandinsky5Transformer3DModel", visual_cond=True, **KANDINSKY5)
)
SIZES = {"height": 32, "width": 32, "num_frames": 17}
add("Kandinsky5T2VPipeline", VIDEO, TO_VIDEO, **SIZES)
add("Kandinsky5I2VPipeline", VIDEO, FROM_IMAGE, image=still, **SIZES)

synthesis = parts(
    PLAIN,
    unet=network(
        "UNet3DConditionModel",
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        norm_num_groups=8,
    ),
)
add("TextToVideoSDPipeline", VIDEO, synthesis, **FRAMES)
add("VideoToVideoSDPipeline", VIDEO, synthesis, **CLIP)
i2vgen = parts(
    PLAIN,
    image_encoder=clip_vision,
    feature_extractor=clip_images,
    unet=network(
        "I2VGenXLUNet",
        sample_size=8,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
        attention_head_dim=4,
        num_attention_heads=None,
        norm_num_groups=8,
    ),
)


def old_names(pipe: Any) -> None:
    """Gives the text encoder the part `text_model`, which it is itself in transformers 5."""
    object.__setattr__(pipe.text_encoder, "text_model", pipe.text_encoder)


add("I2VGenXLPipeline", VIDEO, i2vgen, prepare=old_names, image=still, target_fps=8, **FRAMES)
pia = parts(
    PLAIN,
    unet=lambda: unet("sd1"),
    motion_adapter=network(
        "MotionAdapter",
        block_out_channels=(32, 64),
        motion_layers_per_block=1,
        motion_norm_num_groups=8,
        motion_num_attention_heads=4,
        use_motion_mid_block=False,
        conv_in_channels=9,
    ),
    image_encoder=None,
)
add("PIAPipeline", VIDEO, pia, image=still, **FRAMES)
