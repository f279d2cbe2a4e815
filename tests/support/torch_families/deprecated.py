"""Pipelines that diffusers keeps as deprecated and that build on Stable Diffusion."""

from typing import Any

import diffusers
import torch

from support.tiny_tokenizers import clip_tokenizer

from .pictures import mask, picture, tensor
from .registry import IMAGE, INPAINT, TEXT, VIDEO, add
from .shared import REPAINT, START
from .stable_diffusion import PLAIN, SIZE, components, unet
from .stable_diffusion_xl import PLAIN as XL
from .stable_diffusion_xl import xl_unet
from .text import clip_images, clip_text_projected
from .weights import network, parts, randomize, scheduler

add("CycleDiffusionPipeline", IMAGE, PLAIN, source_prompt="a green pear", eta=1.0, **START)
add("StableDiffusionInpaintPipelineLegacy", INPAINT, PLAIN, **REPAINT)
add("StableDiffusionModelEditingPipeline", TEXT, PLAIN, **SIZE)
add("StableDiffusionPipelineSafe", TEXT, PLAIN, sld_warmup_steps=0, **SIZE)
add("StableDiffusionSAGPipeline", TEXT, components("sd1"), **SIZE)
add("StableDiffusionPanoramaPipeline", TEXT, PLAIN, height=64, width=128)
add(
    "SemanticStableDiffusionPipeline",
    TEXT,
    PLAIN,
    editing_prompt=["green"],
    edit_warmup_steps=0,
    **SIZE,
)
add(
    "StableDiffusionParadigmsPipeline",
    TEXT,
    parts(PLAIN, scheduler=scheduler("DDIMParallelScheduler", clip_sample=False)),
    num_inference_steps=4,
    parallel=2,
    **SIZE,
)
add(
    "StableDiffusionAttendAndExcitePipeline",
    TEXT,
    PLAIN,
    token_indices=[2, 4],
    max_iter_to_alter=1,
    thresholds={0: 0.5},
    attn_res=(8, 8),
    **SIZE,
)
add(
    "StableDiffusionLDM3DPipeline",
    TEXT,
    parts(PLAIN, vae=lambda: rgb_and_depth(), image_encoder=None),
    **SIZE,
)


def rgb_and_depth() -> Any:
    """An autoencoder of pictures with depths."""
    from .autoencoders import autoencoder

    return autoencoder(in_channels=6, out_channels=6)


add(
    "StableDiffusionDiffEditPipeline",
    INPAINT,
    parts(PLAIN, inverse_scheduler=scheduler("DDIMInverseScheduler", clip_sample=False)),
    mask_image=lambda: (torch.arange(64).reshape(1, 8, 8) % 8 > 3).float(),
    image_latents=lambda: tensor(1, 2, 4, 8, 8),
    num_inference_steps=3,
)
add(
    "TextToVideoZeroPipeline",
    VIDEO,
    PLAIN,
    video_length=2,
    t0=1,
    t1=2,
    num_inference_steps=4,
    **SIZE,
)
add(
    "TextToVideoZeroSDXLPipeline",
    VIDEO,
    XL,
    video_length=2,
    t0=1,
    t1=2,
    num_inference_steps=4,
    **SIZE,
)

PHRASES = {
    "gligen_phrases": ["an apple"],
    "gligen_boxes": [[0.1, 0.2, 0.6, 0.8]],
    "gligen_scheduled_sampling_beta": 0.6,
}
gligen = parts(PLAIN, unet=lambda: unet(attention_type="gated", attention_head_dim=8))
add("StableDiffusionGLIGENPipeline", TEXT, gligen, **PHRASES, **SIZE)


def cross_control(base: Any, **config: Any) -> Any:
    """A ControlNet-XS for a UNet."""
    return randomize(
        diffusers.ControlNetXSAdapter.from_unet(
            base, conditioning_embedding_out_channels=(4, 8, 8, 16), **config
        )
    )


def cross() -> dict[str, Any]:
    """Components of Stable Diffusion with a ControlNet-XS."""
    base = unet(layers_per_block=2)
    return {**PLAIN(), "unet": base, "controlnet": cross_control(base, block_out_channels=[8, 16])}


def cross_xl() -> dict[str, Any]:
    """Components of SDXL with a ControlNet-XS."""
    base = xl_unet(layers_per_block=2)
    return {**XL(), "unet": base, "controlnet": cross_control(base, block_out_channels=[8, 16])}


add("StableDiffusionControlNetXSPipeline", TEXT, cross, image=picture)
add("StableDiffusionXLControlNetXSPipeline", TEXT, cross_xl, image=picture)


def example_encoder() -> Any:
    """The image encoder of `PaintByExamplePipeline`."""
    from diffusers.pipelines.deprecated.paint_by_example import PaintByExampleImageEncoder
    from transformers import CLIPVisionConfig

    from .text import VISION

    return randomize(PaintByExampleImageEncoder(CLIPVisionConfig(**VISION), proj_size=32))


add(
    "PaintByExamplePipeline",
    INPAINT,
    parts(
        PLAIN,
        unet=lambda: unet(in_channels=9),
        image_encoder=example_encoder,
        feature_extractor=clip_images,
    ),
    image=picture,
    mask_image=mask,
    example_image=lambda: picture(5, 32),
    **SIZE,
)

amused_parts = parts(
    text_encoder=clip_text_projected,
    tokenizer=clip_tokenizer,
    vqvae=network(
        "VQModel",
        block_out_channels=(16, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=16,
        norm_num_groups=8,
        num_vq_embeddings=32,
        sample_size=32,
        mid_block_add_attention=False,
        lookup_from_codebook=True,
    ),
    transformer=network(
        "UVit2DModel",
        hidden_size=32,
        cond_embed_dim=32,
        micro_cond_encode_dim=2,
        micro_cond_embed_dim=10,
        encoder_hidden_size=32,
        vocab_size=33,
        codebook_size=32,
        in_channels=32,
        block_out_channels=32,
        num_res_blocks=1,
        block_num_heads=2,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        downsample=True,
        upsample=True,
        layer_norm_eps=1e-6,
        ln_elementwise_affine=True,
    ),
    scheduler=scheduler("AmusedScheduler", mask_token_id=32),
)
add("AmusedPipeline", TEXT, amused_parts, height=32, width=32, guidance_scale=3.0)
add("AmusedImg2ImgPipeline", IMAGE, amused_parts, image=lambda: picture(0, 32), guidance_scale=3.0)
add(
    "AmusedInpaintPipeline",
    INPAINT,
    amused_parts,
    image=lambda: picture(0, 32),
    mask_image=lambda: mask(0, 32),
    guidance_scale=3.0,
)
