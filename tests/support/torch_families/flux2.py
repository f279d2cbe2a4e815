"""Flux 2 and other transformers of pictures with large language models as readers."""

from typing import Any

import torch

from support.processors import qwen2_processor, qwen3_processor
from support.tiny_tokenizers import clip_tokenizer, mistral_tokenizer, qwen_tokenizer, t5_tokenizer

from .areas import small_area, small_resolution
from .autoencoders import flow_autoencoder, flux2_autoencoder, qwen_autoencoder, wan_autoencoder
from .language_models import (
    mistral3,
    mistral3_model,
    qwen2_5_vl,
    qwen3,
    qwen3_causal,
    qwen3_vl,
    qwen3_vl_model,
)
from .pictures import picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import FLOW, REPAINT, SHIFTING
from .stable_diffusion import SIZE
from .text import clip_text, t5
from .weights import network, parts, scheduler

FLUX2 = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 96,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}
LAYERS = {"text_encoder_out_layers": (0, 1, 2), "max_sequence_length": 512}
flux2 = parts(
    text_encoder=mistral3,
    tokenizer=mistral_tokenizer,
    vae=flux2_autoencoder,
    scheduler=SHIFTING,
    transformer=network("Flux2Transformer2DModel", **FLUX2),
)
klein = parts(
    flux2,
    text_encoder=qwen3_causal,
    tokenizer=qwen_tokenizer,
    transformer=network("Flux2Transformer2DModel", guidance_embeds=False, **FLUX2),
)
add("Flux2Pipeline", TEXT, flux2, **LAYERS, **SIZE)
add("Flux2KleinPipeline", TEXT, klein, **LAYERS, **SIZE)
add("Flux2KleinInpaintPipeline", INPAINT, klein, **REPAINT, **LAYERS, **SIZE)
add("Flux2KleinKVPipeline", IMAGE, klein, image=picture, **LAYERS, **SIZE)

ovis = parts(
    text_encoder=qwen3,
    tokenizer=qwen_tokenizer,
    vae=lambda: flow_autoencoder(4),
    scheduler=SHIFTING,
    transformer=network(
        "OvisImageTransformer2DModel",
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 4, 8),
    ),
)
add("OvisImagePipeline", TEXT, ovis, max_sequence_length=256, **SIZE)

longcat = parts(
    text_encoder=qwen2_5_vl,
    tokenizer=qwen_tokenizer,
    text_processor=qwen2_processor,
    vae=flow_autoencoder,
    scheduler=SHIFTING,
    transformer=network(
        "LongCatImageTransformer2DModel",
        in_channels=64,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=[4, 4, 8],
    ),
)
add("LongCatImagePipeline", TEXT, longcat, enable_prompt_rewrite=False, **SIZE)
add("LongCatImageEditPipeline", IMAGE, longcat, prepare=small_area, image=picture)

krea2 = parts(
    text_encoder=qwen3_vl_model,
    tokenizer=qwen_tokenizer,
    vae=qwen_autoencoder,
    scheduler=SHIFTING,
    text_encoder_select_layers=(0, 1, 2),
    transformer=network(
        "Krea2Transformer2DModel",
        in_channels=16,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=8,
        text_hidden_dim=32,
        num_text_layers=3,
        text_num_attention_heads=2,
        text_num_key_value_heads=1,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 2, 2),
    ),
)
add("Krea2Pipeline", TEXT, krea2, **SIZE)

ernie = parts(
    text_encoder=mistral3_model,
    tokenizer=mistral_tokenizer,
    vae=flux2_autoencoder,
    scheduler=FLOW,
    transformer=network(
        "ErnieImageTransformer2DModel",
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=64,
        in_channels=16,
        out_channels=16,
        text_in_dim=32,
        rope_axes_dim=(4, 6, 6),
    ),
)
add("ErnieImagePipeline", TEXT, ernie, use_pe=False, **SIZE)

nucleus = parts(
    text_encoder=qwen3_vl,
    processor=qwen3_processor,
    vae=qwen_autoencoder,
    scheduler=SHIFTING,
    transformer=network(
        "NucleusMoEImageTransformer2DModel",
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=4,
        joint_attention_dim=32,
        axes_dims_rope=(8, 4, 4),
        num_experts=4,
        capacity_factors=2.0,
        moe_intermediate_dim=32,
    ),
)
add("NucleusMoEImagePipeline", TEXT, nucleus, return_index=-1, **SIZE)

kandinsky5 = parts(
    text_encoder=qwen2_5_vl,
    tokenizer=qwen2_processor,
    text_encoder_2=clip_text,
    tokenizer_2=clip_tokenizer,
    vae=flow_autoencoder,
    scheduler=FLOW,
)
KANDINSKY5 = {
    "in_visual_dim": 16,
    "in_text_dim": 32,
    "in_text_dim2": 32,
    "time_dim": 16,
    "out_visual_dim": 16,
    "patch_size": (1, 2, 2),
    "model_dim": 16,
    "ff_dim": 32,
    "num_text_blocks": 1,
    "num_visual_blocks": 2,
    "axes_dims": (2, 2, 4),
    "attention_type": "regular",
}
image5 = parts(
    kandinsky5, transformer=network("Kandinsky5Transformer3DModel", visual_cond=False, **KANDINSKY5)
)
edit5 = parts(
    kandinsky5, transformer=network("Kandinsky5Transformer3DModel", visual_cond=True, **KANDINSKY5)
)
add("Kandinsky5T2IPipeline", TEXT, image5, prepare=small_resolution, **SIZE)
add("Kandinsky5I2IPipeline", IMAGE, edit5, prepare=small_resolution, image=picture, **SIZE)


class Harmless(torch.nn.Module):
    """Takes the place of the checks of Cosmos, which need a package of their own."""

    device = torch.device("cpu")
    dtype = torch.float32

    def check_text_safety(self, prompt: str) -> bool:
        """Lets every prompt pass."""
        return True

    def check_video_safety(self, video: Any) -> Any:
        """Lets every video pass as it is."""
        return video


COSMOS = {
    "out_channels": 16,
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "num_layers": 2,
    "mlp_ratio": 2,
    "text_embed_dim": 32,
    "adaln_lora_dim": 4,
    "max_size": (4, 32, 32),
    "patch_size": (1, 2, 2),
    "rope_scale": (2.0, 1.0, 1.0),
    "concat_padding_mask": True,
    "extra_pos_embed_type": "learnable",
}
cosmos = parts(
    text_encoder=t5,
    tokenizer=t5_tokenizer,
    vae=wan_autoencoder,
    scheduler=scheduler("FlowMatchEulerDiscreteScheduler", use_karras_sigmas=True),
    safety_checker=lambda: Harmless(),
    transformer=network("CosmosTransformer3DModel", in_channels=16, **COSMOS),
)
add(
    "Cosmos2TextToImagePipeline",
    TEXT,
    cosmos,
    needs=("torchvision",),
    max_sequence_length=32,
    **SIZE,
)
