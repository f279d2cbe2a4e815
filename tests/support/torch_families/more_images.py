"""Flux Fill, VisualCloze, OmniGen, Hunyuan-Image, PRX, Z-Image with control."""

from typing import Any

import transformers

from support.tiny_tokenizers import gemma_tokenizer, llama_tokenizer, qwen_tokenizer

from .autoencoders import autoencoder, flow_autoencoder
from .flux import INPUTS as FLUX_INPUTS
from .flux import LATENTS
from .flux import components as flux
from .image_transformers import Z_IMAGE, z_image
from .language_models import GEMMA, qwen2_5_vl, qwen3
from .pictures import mask, picture
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import FLOW
from .stable_diffusion import SIZE
from .text import t5
from .weights import network, parts, randomize, scheduler

# Latents, masked latents and the mask of 8x8 pixels for each of the four latents of a token.
fill = flux(in_channels=8 * LATENTS + 4 * 64)
add("FluxFillPipeline", INPAINT, fill, image=picture, mask_image=mask, **FLUX_INPUTS)

cloze = parts(flux(in_channels=8 * LATENTS + 4 * 64), resolution=32)
ROWS = {
    "task_prompt": "a picture [IMAGE1] to another [IMAGE2]",
    "content_prompt": "a red apple",
    "image": lambda: [[picture(0, 32), picture(1, 32)], [picture(2, 32), None]],
    "max_sequence_length": 512,
}
add("VisualClozeGenerationPipeline", IMAGE, cloze, **ROWS)
add(
    "VisualClozePipeline",
    IMAGE,
    cloze,
    upsampling_height=32,
    upsampling_width=32,
    upsampling_strength=0.6,
    **{**ROWS, "num_inference_steps": 4},
)

omnigen = parts(
    vae=autoencoder,
    scheduler=scheduler(
        "FlowMatchEulerDiscreteScheduler", invert_sigmas=True, num_train_timesteps=1
    ),
    tokenizer=llama_tokenizer,
    transformer=network(
        "OmniGenTransformer2DModel",
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_layers=2,
        in_channels=4,
        time_step_dim=8,
        vocab_size=128,
        pad_token_id=3,
        pos_embed_max_size=16,
        rope_scaling={"long_factor": [1, 1.5, 2, 3], "short_factor": [1, 1, 1, 1]},
    ),
)
add("OmniGenPipeline", TEXT, omnigen, needs=("torchvision",), **SIZE)

hunyuan_image = parts(
    text_encoder=qwen2_5_vl,
    tokenizer=qwen_tokenizer,
    text_encoder_2=lambda: t5(vocab_size=384),
    tokenizer_2=lambda: transformers.ByT5Tokenizer(),
    scheduler=FLOW,
    guider=None,
    ocr_guider=None,
    vae=network(
        "AutoencoderKLHunyuanImage",
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32, 32, 32),
        layers_per_block=1,
        scaling_factor=0.476986,
        spatial_compression_ratio=8,
        sample_size=64,
    ),
    transformer=network(
        "HunyuanImageTransformer2DModel",
        in_channels=4,
        out_channels=4,
        num_attention_heads=4,
        attention_head_dim=8,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=(1, 1),
        guidance_embeds=True,
        text_embed_dim=32,
        text_embed_2_dim=32,
        rope_axes_dim=(4, 4),
    ),
)
add("HunyuanImagePipeline", TEXT, hunyuan_image, prompt='a red apple with the word "sweet"', **SIZE)


def t5_gemma() -> Any:
    """The encoder of T5 Gemma."""
    sizes = {**GEMMA, "query_pre_attn_scalar": 8}
    module = transformers.models.t5gemma.T5GemmaModuleConfig(**sizes)
    config = transformers.T5GemmaConfig(encoder=module, is_encoder_decoder=False, **sizes)
    return randomize(transformers.models.t5gemma.modeling_t5gemma.T5GemmaEncoder(config.encoder))


PRX = {
    "context_in_dim": 32,
    "hidden_size": 32,
    "mlp_ratio": 2.0,
    "num_heads": 2,
    "depth": 2,
    "axes_dim": [8, 8],
}
prx = parts(
    text_encoder=t5_gemma,
    tokenizer=lambda: gemma_tokenizer(model_max_length=64),
    vae=lambda: flow_autoencoder(4),
    scheduler=FLOW,
    transformer=network("PRXTransformer2DModel", patch_size=2, in_channels=4, **PRX),
)
prx_pixel = parts(
    text_encoder=qwen3,
    tokenizer=qwen_tokenizer,
    scheduler=FLOW,
    prompt_max_tokens=32,
    transformer=network(
        "PRXTransformer2DModel",
        patch_size=8,
        in_channels=3,
        bottleneck_size=16,
        resolution_embeds=True,
        **PRX,
    ),
)
add(
    "PRXPipeline",
    TEXT,
    prx,
    needs=("ftfy",),
    use_resolution_binning=False,
    skip_text_cleaning=True,
    **SIZE,
)
add("PRXPixelPipeline", TEXT, prx_pixel, needs=("ftfy",), use_resolution_binning=False, **SIZE)

CONTROL = {k: v for k, v in Z_IMAGE.items() if k.startswith(("all_", "dim", "n_heads", "n_kv"))}
CONTROL |= {"n_refiner_layers": 1, "qk_norm": True, "control_layers_places": [0]}
CONTROL |= {"control_refiner_layers_places": [0]}
z_control = parts(
    z_image, controlnet=network("ZImageControlNetModel", control_in_dim=16, **CONTROL)
)
z_inpaint = parts(
    z_image,
    controlnet=network(
        "ZImageControlNetModel",
        control_in_dim=33,
        add_control_noise_refiner="control_noise_refiner",
        **CONTROL,
    ),
)
add("ZImageControlNetPipeline", TEXT, z_control, control_image=picture, **SIZE)
add(
    "ZImageControlNetInpaintPipeline",
    INPAINT,
    z_inpaint,
    image=picture,
    mask_image=mask,
    control_image=picture,
    **SIZE,
)
