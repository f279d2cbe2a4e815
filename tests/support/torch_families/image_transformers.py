"""Transformers of pictures with one text encoder each, or several: AuraFlow to Z-Image."""

from typing import Any

from support.tiny_tokenizers import (
    bert_tokenizer,
    clip_tokenizer,
    llama_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)

from .areas import small_sample
from .autoencoders import autoencoder, flow_autoencoder, wan_autoencoder
from .language_models import bert, glm, llama, qwen3, smollm3, umt5
from .pictures import picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import FLOW, READ_T5, REPAINT, START
from .stable_diffusion import SIZE
from .text import clip_text_projected, t5
from .weights import network, parts, scheduler

SHORT = {**SIZE, "max_sequence_length": 32}

aura_flow = parts(
    text_encoder=umt5,
    tokenizer=t5_tokenizer,
    vae=autoencoder,
    scheduler=FLOW,
    transformer=network(
        "AuraFlowTransformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        out_channels=4,
        pos_embed_max_size=64,
    ),
)
add("AuraFlowPipeline", TEXT, aura_flow, **SHORT)

HUNYUAN = {
    "sample_size": 8,
    "patch_size": 2,
    "attention_head_dim": 8,
    "num_attention_heads": 3,
    "in_channels": 4,
    "cross_attention_dim": 32,
    "cross_attention_dim_t5": 32,
    "pooled_projection_dim": 16,
    "hidden_size": 24,
    "text_len": 77,
    "text_len_t5": 256,
    "activation_fn": "gelu-approximate",
}
hunyuan = parts(
    text_encoder=bert,
    tokenizer=bert_tokenizer,
    text_encoder_2=t5,
    tokenizer_2=lambda: t5_tokenizer(model_max_length=256),
    vae=autoencoder,
    transformer=network("HunyuanDiT2DModel", num_layers=4, **HUNYUAN),
    scheduler=scheduler("DDPMScheduler"),
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
)
hunyuan_control = parts(
    hunyuan, controlnet=network("HunyuanDiT2DControlNetModel", transformer_num_layers=4, **HUNYUAN)
)
EXACT = {**SIZE, "use_resolution_binning": False}
add("HunyuanDiTPipeline", TEXT, hunyuan, **EXACT)
add("HunyuanDiTPAGPipeline", TEXT, parts(hunyuan, pag_applied_layers=["blocks.1"]), **EXACT)
add("HunyuanDiTControlNetPipeline", TEXT, hunyuan_control, control_image=picture, **EXACT)

chroma = parts(
    READ_T5,
    vae=lambda: flow_autoencoder(4),
    scheduler=FLOW,
    transformer=network(
        "ChromaTransformer2DModel",
        patch_size=1,
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
        approximator_hidden_dim=32,
        approximator_layers=1,
        approximator_num_channels=16,
    ),
)
add("ChromaPipeline", TEXT, chroma, **SHORT)
add("ChromaImg2ImgPipeline", IMAGE, chroma, **START, **SHORT)


def no_guidance_embedding(pipe: Any) -> None:
    """Sets an option of Flux's transformer that the pipeline reads and Chroma's has not."""
    pipe.transformer.register_to_config(guidance_embeds=False)


add(
    "ChromaInpaintPipeline",
    INPAINT,
    chroma,
    prepare=no_guidance_embedding,
    true_cfg_scale=3.0,
    **REPAINT,
    **SHORT,
)

BRIA = {
    "patch_size": 1,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 8,
    "num_attention_heads": 2,
    "pooled_projection_dim": None,
    "axes_dims_rope": (0, 4, 4),
}
bria = parts(
    READ_T5,
    vae=lambda: autoencoder(levels=3, shift_factor=0, scaling_factor=1.0),
    scheduler=FLOW,
    transformer=network("BriaTransformer2DModel", in_channels=16, joint_attention_dim=32, **BRIA),
)
fibo = parts(
    text_encoder=smollm3,
    tokenizer=llama_tokenizer,
    vae=lambda: wan_autoencoder(
        8,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        is_residual=True,
        decoder_base_dim=4,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    ),
    scheduler=FLOW,
    transformer=network(
        "BriaFiboTransformer2DModel",
        in_channels=8,
        joint_attention_dim=64,
        text_encoder_dim=32,
        **BRIA,
    ),
)
JSON_PROMPT = '{"text": "a red apple", "edit_instruction": "make it green"}'
add("BriaPipeline", TEXT, bria, **SHORT)
add("BriaFiboPipeline", TEXT, fibo, **SIZE)
add("BriaFiboEditPipeline", IMAGE, fibo, image=picture, prompt=JSON_PROMPT, **SIZE)

hidream = parts(
    text_encoder=lambda: clip_text_projected(max_position_embeddings=128),
    text_encoder_2=lambda: clip_text_projected(max_position_embeddings=128, hidden_act="gelu"),
    text_encoder_3=t5,
    text_encoder_4=llama,
    tokenizer=clip_tokenizer,
    tokenizer_2=clip_tokenizer,
    tokenizer_3=t5_tokenizer,
    tokenizer_4=llama_tokenizer,
    vae=lambda: flow_autoencoder(4),
    scheduler=FLOW,
    transformer=network(
        "HiDreamImageTransformer2DModel",
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_channels=[32, 32],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
    ),
)
add("HiDreamImagePipeline", TEXT, hidream, prepare=small_sample, **SHORT)

cogview3 = parts(
    READ_T5,
    vae=autoencoder,
    scheduler=scheduler("CogVideoXDDIMScheduler"),
    transformer=network(
        "CogView3PlusTransformer2DModel",
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=2,
        out_channels=4,
        text_embed_dim=32,
        time_embed_dim=8,
        condition_dim=2,
        pos_embed_max_size=8,
        sample_size=8,
    ),
)
COGVIEW4 = {
    "patch_size": 2,
    "num_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "out_channels": 4,
    "text_embed_dim": 32,
    "time_embed_dim": 8,
    "condition_dim": 4,
    "rope_axes_dim": (16, 16),
}
cogview4 = parts(
    text_encoder=glm,
    tokenizer=lambda: llama_tokenizer(padding_side="left"),
    vae=autoencoder,
    scheduler=scheduler(
        "FlowMatchEulerDiscreteScheduler",
        base_shift=0.25,
        max_shift=0.75,
        base_image_seq_len=256,
        use_dynamic_shifting=True,
        time_shift_type="linear",
    ),
    transformer=network("CogView4Transformer2DModel", in_channels=4, **COGVIEW4),
)
cogview4_control = parts(
    cogview4, transformer=network("CogView4Transformer2DModel", in_channels=8, **COGVIEW4)
)
add("CogView3PlusPipeline", TEXT, cogview3, **SHORT)
add("CogView4Pipeline", TEXT, cogview4, **SHORT)
add("CogView4ControlPipeline", TEXT, cogview4_control, control_image=picture, **SHORT)

Z_IMAGE = {
    "all_patch_size": (2,),
    "all_f_patch_size": (1,),
    "in_channels": 16,
    "dim": 32,
    "n_layers": 2,
    "n_refiner_layers": 1,
    "n_heads": 2,
    "n_kv_heads": 2,
    "qk_norm": True,
    "cap_feat_dim": 32,
    "axes_dims": [8, 4, 4],
    "axes_lens": [512, 32, 32],
}
z_image = parts(
    text_encoder=qwen3,
    tokenizer=qwen_tokenizer,
    vae=flow_autoencoder,
    scheduler=FLOW,
    transformer=network("ZImageTransformer2DModel", **Z_IMAGE),
)
add("ZImagePipeline", TEXT, z_image, **SIZE)
add("ZImageImg2ImgPipeline", IMAGE, z_image, **START, **SIZE)
add("ZImageInpaintPipeline", INPAINT, z_image, **REPAINT, **SIZE)
