"""DeepFloyd IF, unconditional pipelines, latent diffusion, DiT and unCLIP."""

from typing import Any

from support.tiny_tokenizers import clip_tokenizer, t5_tokenizer

from .autoencoders import autoencoder
from .pictures import mask, picture
from .registry import IMAGE, INPAINT, OTHER, TEXT, add
from .shared import PRIOR
from .stable_diffusion import unet
from .text import clip_images, clip_text, clip_text_projected, clip_vision, t5
from .weights import network, parts, randomize, scheduler

IF = {
    "sample_size": 32,
    "layers_per_block": 1,
    "block_out_channels": (32, 64),
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "out_channels": 6,
    "cross_attention_dim": 32,
    "encoder_hid_dim": 32,
    "attention_head_dim": 8,
    "addition_embed_type": "text",
    "addition_embed_type_num_heads": 2,
    "cross_attention_norm": "group_norm",
    "resnet_time_scale_shift": "scale_shift",
    "act_fn": "gelu",
}
LARGER = {"class_embed_type": "timestep", "time_embedding_act_fn": "gelu", "time_embedding_dim": 32}
floyd = parts(
    text_encoder=t5,
    tokenizer=t5_tokenizer,
    unet=network("UNet2DConditionModel", in_channels=3, **IF),
    scheduler=scheduler(
        "DDPMScheduler",
        beta_schedule="squaredcos_cap_v2",
        thresholding=True,
        dynamic_thresholding_ratio=0.95,
        sample_max_value=1.0,
        variance_type="learned_range",
    ),
    watermarker=None,
    safety_checker=None,
    feature_extractor=None,
    requires_safety_checker=False,
)
floyd_larger = parts(
    floyd,
    unet=network("UNet2DConditionModel", in_channels=6, **IF, **LARGER),
    image_noising_scheduler=scheduler("DDPMScheduler", beta_schedule="squaredcos_cap_v2"),
)


def small() -> Any:
    """A picture of 16x16."""
    return picture(0, 16)


def medium() -> Any:
    """A picture of 32x32."""
    return picture(1, 32)


def medium_mask() -> Any:
    """A mask of 32x32."""
    return mask(0, 32)


RAW = {"clean_caption": False}
FIRST = {"strength": 0.6, "num_inference_steps": 4}
add("IFPipeline", TEXT, floyd, **RAW)
add("IFImg2ImgPipeline", IMAGE, floyd, image=medium, **FIRST, **RAW)
add("IFInpaintingPipeline", INPAINT, floyd, image=medium, mask_image=medium_mask, **FIRST, **RAW)
add("IFSuperResolutionPipeline", IMAGE, floyd_larger, image=small, height=32, width=32, **RAW)
add(
    "IFImg2ImgSuperResolutionPipeline",
    IMAGE,
    floyd_larger,
    image=small,
    original_image=medium,
    **FIRST,
    **RAW,
)
add(
    "IFInpaintingSuperResolutionPipeline",
    INPAINT,
    floyd_larger,
    image=small,
    original_image=medium,
    mask_image=medium_mask,
    **FIRST,
    **RAW,
)

PLAIN = {
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "attention_head_dim": 8,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
pixels = network("UNet2DModel", sample_size=32, in_channels=3, out_channels=3, **PLAIN)
add("DDPMPipeline", OTHER, parts(unet=pixels, scheduler=scheduler("DDPMScheduler")))
add("DDIMPipeline", OTHER, parts(unet=pixels, scheduler=scheduler("DDIMScheduler")))
add(
    "PNDMPipeline",
    OTHER,
    parts(unet=pixels, scheduler=scheduler("PNDMScheduler", skip_prk_steps=True, beta_end=0.002)),
)
add("KarrasVePipeline", OTHER, parts(unet=pixels, scheduler=lambda: karras_ve()))
add(
    "ScoreSdeVePipeline",
    OTHER,
    parts(unet=pixels, scheduler=scheduler("ScoreSdeVeScheduler", sigma_max=0.2)),
)
add(
    "RePaintPipeline",
    INPAINT,
    parts(unet=pixels, scheduler=scheduler("RePaintScheduler")),
    image=medium,
    mask_image=medium_mask,
    num_inference_steps=4,
    jump_length=2,
    jump_n_sample=2,
)


def karras_ve() -> Any:
    """The scheduler of `KarrasVePipeline`, which diffusers keeps among the deprecated."""
    from diffusers.schedulers.deprecated import KarrasVeScheduler

    return KarrasVeScheduler(sigma_max=0.5)


add(
    "ConsistencyModelPipeline",
    TEXT,
    parts(
        unet=network(
            "UNet2DModel",
            sample_size=32,
            in_channels=3,
            out_channels=3,
            num_class_embeds=10,
            resnet_time_scale_shift="scale_shift",
            **PLAIN,
        ),
        scheduler=scheduler("CMStochasticIterativeScheduler", num_train_timesteps=40),
    ),
    class_labels=3,
    num_inference_steps=2,
)

vq = network(
    "VQModel",
    block_out_channels=(16, 16),
    down_block_types=("DownEncoderBlock2D",) * 2,
    up_block_types=("UpDecoderBlock2D",) * 2,
    latent_channels=3,
    norm_num_groups=8,
    num_vq_embeddings=32,
)
ddim = scheduler(
    "DDIMScheduler",
    beta_start=0.00085,
    beta_end=0.012,
    beta_schedule="scaled_linear",
    clip_sample=False,
    set_alpha_to_one=False,
)
add(
    "LDMPipeline",
    OTHER,
    parts(
        vqvae=vq,
        scheduler=ddim,
        unet=network("UNet2DModel", sample_size=16, in_channels=3, out_channels=3, **PLAIN),
    ),
)
add(
    "LDMSuperResolutionPipeline",
    IMAGE,
    parts(
        vqvae=vq,
        scheduler=ddim,
        unet=network("UNet2DModel", sample_size=32, in_channels=6, out_channels=3, **PLAIN),
    ),
    image=medium,
)
add(
    "LDMTextToImagePipeline",
    TEXT,
    parts(vqvae=autoencoder, bert=clip_text, tokenizer=clip_tokenizer, unet=unet, scheduler=ddim),
    guidance_scale=6.0,
    height=64,
    width=64,
)
add(
    "DiTPipeline",
    TEXT,
    parts(
        vae=autoencoder,
        scheduler=scheduler("DDIMScheduler", clip_sample=False),
        transformer=network(
            "DiTTransformer2DModel",
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=2,
            in_channels=4,
            out_channels=8,
            attention_bias=True,
            activation_fn="gelu-approximate",
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_zero",
            norm_elementwise_affine=False,
        ),
    ),
    class_labels=[1],
)


def text_projection() -> Any:
    """What takes embeddings into unCLIP's decoder."""
    from diffusers.pipelines.deprecated.unclip.text_proj import UnCLIPTextProjModel

    return randomize(
        UnCLIPTextProjModel(clip_embeddings_dim=32, time_embed_dim=128, cross_attention_dim=32)
    )


LEARNED = {"variance_type": "learned_range", "prediction_type": "epsilon"}
unclip = parts(
    prior=PRIOR,
    decoder=network(
        "UNet2DConditionModel",
        sample_size=16,
        in_channels=3,
        out_channels=6,
        down_block_types=("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
        up_block_types=("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
        mid_block_type="UNetMidBlock2DSimpleCrossAttn",
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=4,
        resnet_time_scale_shift="scale_shift",
        class_embed_type="identity",
    ),
    text_encoder=clip_text_projected,
    tokenizer=clip_tokenizer,
    text_proj=text_projection,
    image_encoder=clip_vision,
    feature_extractor=clip_images,
    super_res_first=network("UNet2DModel", sample_size=32, in_channels=6, out_channels=3, **PLAIN),
    super_res_last=network("UNet2DModel", sample_size=32, in_channels=6, out_channels=3, **PLAIN),
    prior_scheduler=scheduler(
        "UnCLIPScheduler",
        variance_type="fixed_small_log",
        prediction_type="sample",
        clip_sample_range=5.0,
    ),
    decoder_scheduler=scheduler("UnCLIPScheduler", **LEARNED),
    super_res_scheduler=scheduler(
        "UnCLIPScheduler", variance_type="fixed_small_log", prediction_type="epsilon"
    ),
)
STEPS = {"decoder_num_inference_steps": 2, "super_res_num_inference_steps": 2}
add("UnCLIPPipeline", TEXT, unclip, prior_num_inference_steps=2, **STEPS)
add("UnCLIPImageVariationPipeline", IMAGE, unclip, image=picture, **STEPS)
