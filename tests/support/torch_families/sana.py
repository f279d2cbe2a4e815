"""Sana, Sana Sprint and the two Luminas, which read their prompts with Gemma."""

from support.tiny_tokenizers import gemma_tokenizer

from .autoencoders import autoencoder, deep_compression, flow_autoencoder
from .language_models import gemma, gemma2
from .pictures import picture
from .registry import IMAGE, TEXT, add
from .shared import FLOW
from .weights import network, parts, scheduler

SANA = {
    "patch_size": 1,
    "in_channels": 4,
    "out_channels": 4,
    "num_layers": 2,
    "num_attention_heads": 2,
    "attention_head_dim": 4,
    "num_cross_attention_heads": 2,
    "cross_attention_head_dim": 4,
    "cross_attention_dim": 8,
    "caption_channels": 32,
    "sample_size": 8,
}
SPRINT = {**SANA, "qk_norm": "rms_norm_across_heads", "guidance_embeds": True}
READER = {"text_encoder": gemma2, "tokenizer": gemma_tokenizer, "vae": deep_compression}

sana = parts(READER, transformer=network("SanaTransformer2DModel", **SANA), scheduler=FLOW)
sana_control = parts(
    READER,
    transformer=network("SanaTransformer2DModel", **SANA),
    controlnet=network("SanaControlNetModel", **SANA),
    scheduler=FLOW,
)
sprint = parts(
    READER,
    transformer=network("SanaTransformer2DModel", **SPRINT),
    scheduler=scheduler("SCMScheduler"),
)
lumina = parts(
    vae=autoencoder,
    text_encoder=gemma,
    tokenizer=gemma_tokenizer,
    scheduler=FLOW,
    transformer=network(
        "LuminaNextDiT2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        learn_sigma=True,
        qk_norm=True,
        cross_attention_dim=32,
    ),
)
lumina2 = parts(
    vae=lambda: flow_autoencoder(4),
    text_encoder=gemma2,
    tokenizer=gemma_tokenizer,
    scheduler=FLOW,
    transformer=network(
        "Lumina2Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=4,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(400, 64, 64),
        cap_feat_dim=32,
    ),
)

SMALL = {"height": 32, "width": 32}
SANA_INPUTS = {**SMALL, "use_resolution_binning": False, "max_sequence_length": 32}
add("SanaPipeline", TEXT, sana, complex_human_instruction=None, **SANA_INPUTS)
add("SanaControlNetPipeline", TEXT, sana_control, control_image=picture, **SANA_INPUTS)
add("SanaPAGPipeline", TEXT, parts(sana, pag_applied_layers=["blocks.1"]), **SANA_INPUTS)
add("SanaSprintPipeline", TEXT, sprint, **SANA_INPUTS)
add("SanaSprintImg2ImgPipeline", IMAGE, sprint, image=picture, strength=0.5, **SANA_INPUTS)
add("LuminaPipeline", TEXT, lumina, height=64, width=64)
add("Lumina2Pipeline", TEXT, lumina2, height=64, width=64)
