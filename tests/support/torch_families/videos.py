"""Pipelines of videos: AnimateDiff, CogVideoX, LTX, Wan, Latte, Allegro, Mochi."""

from typing import Any

import torch
from diffusers.pipelines.ltx.modeling_latent_upsampler import LTXLatentUpsamplerModel
from diffusers.pipelines.ltx.pipeline_ltx_condition import LTXVideoCondition

from support.tiny_tokenizers import t5_tokenizer

from .autoencoders import autoencoder, wan_autoencoder
from .language_models import umt5
from .pictures import picture, unit, video
from .registry import VIDEO, add
from .shared import FLOW, READ_T5
from .stable_diffusion import components as stable_diffusion
from .stable_diffusion import control_network
from .stable_diffusion_xl import components as xl
from .text import clip_images, clip_vision
from .weights import network, parts, randomize, scheduler

DDIM = scheduler("DDIMScheduler", clip_sample=False)
SMALL = {"height": 32, "width": 32, "max_sequence_length": 16}


def still() -> Any:
    """A picture of 32x32."""
    return picture(0, 32)


MOTION = {
    "motion_layers_per_block": 1,
    "motion_norm_num_groups": 8,
    "motion_num_attention_heads": 4,
    "use_motion_mid_block": False,
}
adapter = network("MotionAdapter", block_out_channels=(32, 64), **MOTION)
adapter_xl = network("MotionAdapter", block_out_channels=(16, 32), **MOTION)
OPTIONAL = {"feature_extractor": None, "image_encoder": None}
animate = stable_diffusion("sd1", motion_adapter=adapter, **OPTIONAL)
animate_control = parts(animate, controlnet=lambda: control_network("sd1"))
sparse = parts(
    animate,
    controlnet=network(
        "SparseControlNetModel",
        block_out_channels=(32, 64),
        layers_per_block=1,
        in_channels=4,
        conditioning_channels=4,
        down_block_types=("CrossAttnDownBlockMotion", "DownBlockMotion"),
        cross_attention_dim=32,
        attention_head_dim=4,
        motion_num_attention_heads=4,
        norm_num_groups=8,
        use_simplified_condition_embedding=True,
    ),
)
FRAMES = {"num_frames": 2, "height": 32, "width": 32}
CLIP = {"video": lambda: video(2), "strength": 0.6, "num_inference_steps": 4}
CONDITION = {"conditioning_frames": lambda: video(2)}
add("AnimateDiffPipeline", VIDEO, animate, **FRAMES)
add("AnimateDiffPAGPipeline", VIDEO, animate, **FRAMES)
add("AnimateDiffControlNetPipeline", VIDEO, animate_control, **CONDITION, **FRAMES)
add(
    "AnimateDiffSparseControlNetPipeline",
    VIDEO,
    sparse,
    conditioning_frames=lambda: video(1),
    controlnet_frame_indices=[1],
    **FRAMES,
)
add("AnimateDiffVideoToVideoPipeline", VIDEO, animate, **CLIP)
add("AnimateDiffVideoToVideoControlNetPipeline", VIDEO, animate_control, **CLIP, **CONDITION)
add("AnimateDiffSDXLPipeline", VIDEO, xl(motion_adapter=adapter_xl, **OPTIONAL), **FRAMES)

COG = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "out_channels": 4,
    "time_embed_dim": 4,
    "text_embed_dim": 32,
    "num_layers": 2,
    "sample_width": 4,
    "sample_height": 4,
    "sample_frames": 9,
    "patch_size": 2,
    "temporal_compression_ratio": 4,
    "max_text_seq_length": 16,
}
cog = parts(
    READ_T5,
    vae=network(
        "AutoencoderKLCogVideoX",
        down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
        scaling_factor=4.0,
    ),
    scheduler=scheduler("CogVideoXDDIMScheduler"),
    transformer=network("CogVideoXTransformer3DModel", in_channels=4, **COG),
)
cog_image = parts(
    cog,
    transformer=network(
        "CogVideoXTransformer3DModel",
        in_channels=8,
        use_rotary_positional_embeddings=True,
        use_learned_positional_embeddings=True,
        **COG,
    ),
)
cog_control = parts(cog, transformer=network("CogVideoXTransformer3DModel", in_channels=8, **COG))
add("CogVideoXPipeline", VIDEO, cog, num_frames=9, **SMALL)
add("CogVideoXImageToVideoPipeline", VIDEO, cog_image, image=still, num_frames=9, **SMALL)
add("CogVideoXVideoToVideoPipeline", VIDEO, cog, **{**CLIP, "video": lambda: video(9)}, **SMALL)
add("CogVideoXFunControlPipeline", VIDEO, cog_control, control_video=lambda: video(9), **SMALL)

ltx_autoencoder = network(
    "AutoencoderKLLTXVideo",
    latent_channels=8,
    block_out_channels=(8, 8, 8, 8),
    decoder_block_out_channels=(8, 8, 8, 8),
    layers_per_block=(1, 1, 1, 1, 1),
    decoder_layers_per_block=(1, 1, 1, 1, 1),
    spatio_temporal_scaling=(True, True, False, False),
    decoder_spatio_temporal_scaling=(True, True, False, False),
    decoder_inject_noise=(False,) * 5,
    upsample_residual=(False,) * 4,
    upsample_factor=(1,) * 4,
    timestep_conditioning=False,
    patch_size=1,
    patch_size_t=1,
    encoder_causal=True,
    decoder_causal=False,
)
ltx = parts(
    READ_T5,
    vae=ltx_autoencoder,
    scheduler=FLOW,
    transformer=network(
        "LTXVideoTransformer3DModel",
        in_channels=8,
        out_channels=8,
        patch_size=1,
        patch_size_t=1,
        num_attention_heads=4,
        attention_head_dim=8,
        cross_attention_dim=32,
        num_layers=1,
        caption_channels=32,
    ),
)
upsampler = parts(
    vae=ltx_autoencoder,
    latent_upsampler=lambda: randomize(
        LTXLatentUpsamplerModel(in_channels=8, mid_channels=32, num_blocks_per_stage=1)
    ),
)


def condition() -> Any:
    """A picture that a video begins with."""
    return LTXVideoCondition(image=picture(0, 32), frame_index=0)


add("LTXPipeline", VIDEO, ltx, num_frames=9, **SMALL)
add("LTXImageToVideoPipeline", VIDEO, ltx, image=still, num_frames=9, **SMALL)
add("LTXConditionPipeline", VIDEO, ltx, conditions=condition, num_frames=9, **SMALL)
add(
    "LTXLatentUpsamplePipeline",
    VIDEO,
    upsampler,
    video=lambda: unit(5, 3, 32, 32),
    height=32,
    width=32,
)

WAN = {
    "patch_size": (1, 2, 2),
    "num_attention_heads": 2,
    "attention_head_dim": 12,
    "out_channels": 16,
    "text_dim": 32,
    "freq_dim": 32,
    "ffn_dim": 32,
    "num_layers": 2,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 32,
}
wan = parts(
    text_encoder=umt5,
    tokenizer=t5_tokenizer,
    vae=wan_autoencoder,
    scheduler=FLOW,
    transformer=network("WanTransformer3DModel", in_channels=16, **WAN),
    transformer_2=None,
)
wan_image = parts(
    wan,
    transformer=network("WanTransformer3DModel", in_channels=36, image_dim=32, **WAN),
    image_encoder=clip_vision,
    image_processor=clip_images,
)
vace = parts(
    wan,
    transformer=network(
        "WanVACETransformer3DModel", in_channels=16, vace_layers=[0, 1], vace_in_channels=96, **WAN
    ),
)
NEEDS = {"needs": ("ftfy",)}
add("WanPipeline", VIDEO, wan, num_frames=5, **NEEDS, **SMALL)
add("WanImageToVideoPipeline", VIDEO, wan_image, image=still, num_frames=5, **NEEDS, **SMALL)
add("WanVideoToVideoPipeline", VIDEO, wan, **{**CLIP, "video": lambda: video(5)}, **NEEDS, **SMALL)
add("WanVACEPipeline", VIDEO, vace, video=lambda: video(5), num_frames=5, **NEEDS, **SMALL)

lucy = parts(wan, transformer=network("WanTransformer3DModel", in_channels=32, **WAN))
add("LucyEditPipeline", VIDEO, lucy, video=lambda: video(5), num_frames=5, **NEEDS, **SMALL)

latte = parts(
    READ_T5,
    vae=autoencoder,
    scheduler=DDIM,
    transformer=network(
        "LatteTransformer3DModel",
        sample_size=8,
        video_length=2,
        num_layers=1,
        patch_size=2,
        attention_head_dim=8,
        num_attention_heads=3,
        caption_channels=32,
        in_channels=4,
        cross_attention_dim=24,
        out_channels=8,
        attention_bias=True,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
    ),
)
add("LattePipeline", VIDEO, latte, video_length=2, height=64, width=64, clean_caption=False)


def tiled() -> Any:
    """Allegro's autoencoder, which decodes in tiles only."""
    made = network(
        "AutoencoderKLAllegro",
        down_block_types=("AllegroDownBlock3D",) * 4,
        up_block_types=("AllegroUpBlock3D",) * 4,
        block_out_channels=(8, 8, 8, 8),
        latent_channels=4,
        layers_per_block=1,
        norm_num_groups=2,
        temporal_compression_ratio=4,
    )()
    made.enable_tiling()
    made.kernel, made.stride = (8, 32, 32), (4, 16, 16)
    return made


allegro = parts(
    READ_T5,
    vae=tiled,
    scheduler=DDIM,
    transformer=network(
        "AllegroTransformer3DModel",
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        cross_attention_dim=24,
        sample_width=8,
        sample_height=8,
        sample_frames=8,
        caption_channels=32,
    ),
)
add("AllegroPipeline", VIDEO, allegro, num_frames=8, clean_caption=False, **SMALL)


def mochi_transformer() -> Any:
    """Mochi's transformer, its frequencies of positions small as trained ones are."""
    made = network(
        "MochiTransformer3DModel",
        patch_size=2,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=12,
        qk_norm="rms_norm",
        text_embed_dim=32,
        time_embed_dim=4,
        activation_fn="swiglu",
        max_sequence_length=16,
    )()
    made.pos_frequencies.data = 0.1 * torch.randn(made.pos_frequencies.shape)
    return made


mochi = parts(
    READ_T5,
    vae=network(
        "AutoencoderKLMochi",
        latent_channels=12,
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        layers_per_block=(1, 1, 1, 1, 1),
        scaling_factor=8.0,
    ),
    scheduler=scheduler("FlowMatchEulerDiscreteScheduler"),
    transformer=mochi_transformer,
)
add("MochiPipeline", VIDEO, mochi, num_frames=7, **SMALL)
