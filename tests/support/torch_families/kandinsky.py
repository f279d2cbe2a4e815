"""Kandinsky 2.1, 2.2 and 3."""

from typing import Any

from diffusers.pipelines.kandinsky.text_encoder import MCLIPConfig, MultilingualCLIP

from support.tiny_tokenizers import clip_tokenizer, roberta_tokenizer, t5_tokenizer

from .pictures import mask, picture, tensor, unit
from .registry import IMAGE, INPAINT, OTHER, TEXT, add
from .shared import PRIOR as PRIOR_NETWORK
from .shared import START
from .stable_diffusion import SIZE
from .text import clip_images, clip_text_projected, clip_vision, t5
from .weights import network, parts, randomize, scheduler

UNET = {
    "in_channels": 4,
    "out_channels": 8,
    "sample_size": 8,
    "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
    "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
    "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
    "block_out_channels": (32, 64),
    "layers_per_block": 1,
    "encoder_hid_dim": 32,
    "cross_attention_dim": 32,
    "attention_head_dim": 4,
    "resnet_time_scale_shift": "scale_shift",
}
WITH_TEXT = {"addition_embed_type": "text_image", "encoder_hid_dim_type": "text_image_proj"}
WITH_IMAGE = {"addition_embed_type": "image", "encoder_hid_dim_type": "image_proj"}
WITH_HINT = {"addition_embed_type": "image_hint", "encoder_hid_dim_type": "image_proj"}
MOVQ = {
    "block_out_channels": (32, 32, 32, 32),
    "down_block_types": (*("DownEncoderBlock2D",) * 3, "AttnDownEncoderBlock2D"),
    "up_block_types": ("AttnUpDecoderBlock2D", *("UpDecoderBlock2D",) * 3),
    "latent_channels": 4,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "norm_type": "spatial",
    "num_vq_embeddings": 12,
    "vq_embed_dim": 4,
}
LEVELS = {"beta_schedule": "linear", "beta_start": 0.00085, "beta_end": 0.012}
ddim = scheduler(
    "DDIMScheduler", **LEVELS, clip_sample=False, set_alpha_to_one=False, steps_offset=1
)
ddpm = scheduler("DDPMScheduler", **LEVELS, variance_type="learned_range", clip_sample=False)


def movq() -> Any:
    """Kandinsky's autoencoder, whose pictures are grey enough not to be clipped."""
    made = network("VQModel", **MOVQ)()
    made.decoder.conv_out.weight.mul_(0.3)
    return made


def multilingual_clip() -> Any:
    """The text encoder of Kandinsky 2.1."""
    config = MCLIPConfig(
        transformerDimSize=32,
        imageDimSize=32,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_hidden_layers=2,
        vocab_size=100,
    )
    return randomize(MultilingualCLIP(config))


PRIOR = {
    "prior": PRIOR_NETWORK,
    "image_encoder": clip_vision,
    "text_encoder": clip_text_projected,
    "tokenizer": clip_tokenizer,
    "scheduler": scheduler(
        "UnCLIPScheduler",
        variance_type="fixed_small_log",
        prediction_type="sample",
        clip_sample_range=10.0,
    ),
    "image_processor": clip_images,
}
COMBINED = {f"prior_{name}": part for name, part in PRIOR.items()}
prior = parts(PRIOR)
first = parts(
    text_encoder=multilingual_clip,
    tokenizer=roberta_tokenizer,
    unet=network("UNet2DConditionModel", **UNET, **WITH_TEXT),
    scheduler=ddim,
    movq=movq,
)
first_inpaint = parts(
    first, unet=network("UNet2DConditionModel", **{**UNET, "in_channels": 9}, **WITH_TEXT)
)
second = parts(
    unet=network("UNet2DConditionModel", **UNET, **WITH_IMAGE), scheduler=ddpm, movq=movq
)
second_inpaint = parts(
    second, unet=network("UNet2DConditionModel", **{**UNET, "in_channels": 9}, **WITH_IMAGE)
)
second_hint = parts(
    second, unet=network("UNet2DConditionModel", **{**UNET, "in_channels": 8}, **WITH_HINT)
)

EMBEDDINGS = {
    "image_embeds": lambda: tensor(1, 32, seed=1),
    "negative_image_embeds": lambda: tensor(1, 32, seed=2),
}
REPAINT = {"image": picture, "mask_image": mask}
HINT = {"hint": lambda: unit(1, 3, 64, 64)}
FEW = {"prior_num_inference_steps": 2}
add("KandinskyPriorPipeline", OTHER, prior)
add("KandinskyPipeline", TEXT, first, **EMBEDDINGS, **SIZE)
add("KandinskyImg2ImgPipeline", IMAGE, first, **START, **EMBEDDINGS, **SIZE)
add("KandinskyInpaintPipeline", INPAINT, first_inpaint, **REPAINT, **EMBEDDINGS, **SIZE)
add("KandinskyCombinedPipeline", TEXT, parts(first, COMBINED), **FEW, **SIZE)
add("KandinskyImg2ImgCombinedPipeline", IMAGE, parts(first, COMBINED), **START, **FEW, **SIZE)
add(
    "KandinskyInpaintCombinedPipeline",
    INPAINT,
    parts(first_inpaint, COMBINED),
    **REPAINT,
    **FEW,
    **SIZE,
)
add("KandinskyV22PriorPipeline", OTHER, prior)
add("KandinskyV22PriorEmb2EmbPipeline", OTHER, prior, **START)
add("KandinskyV22Pipeline", TEXT, second, **EMBEDDINGS, **SIZE)
add("KandinskyV22Img2ImgPipeline", IMAGE, second, **START, **EMBEDDINGS, **SIZE)
add("KandinskyV22InpaintPipeline", INPAINT, second_inpaint, **REPAINT, **EMBEDDINGS, **SIZE)
add("KandinskyV22ControlnetPipeline", TEXT, second_hint, **HINT, **EMBEDDINGS, **SIZE)
add(
    "KandinskyV22ControlnetImg2ImgPipeline",
    IMAGE,
    second_hint,
    **START,
    **HINT,
    **EMBEDDINGS,
    **SIZE,
)
add("KandinskyV22CombinedPipeline", TEXT, parts(second, COMBINED), **FEW, **SIZE)
add("KandinskyV22Img2ImgCombinedPipeline", IMAGE, parts(second, COMBINED), **START, **FEW, **SIZE)
add(
    "KandinskyV22InpaintCombinedPipeline",
    INPAINT,
    parts(second_inpaint, COMBINED),
    **REPAINT,
    **FEW,
    **SIZE,
)

third = parts(
    unet=network(
        "Kandinsky3UNet",
        in_channels=4,
        time_embedding_dim=8,
        groups=2,
        attention_head_dim=4,
        layers_per_block=3,
        block_out_channels=(16, 32),
        cross_attention_dim=8,
        encoder_hid_dim=32,
    ),
    scheduler=scheduler("DDPMScheduler", beta_schedule="squaredcos_cap_v2"),
    movq=movq,
    text_encoder=t5,
    tokenizer=t5_tokenizer,
)
add("Kandinsky3Pipeline", TEXT, third, **SIZE)
add("Kandinsky3Img2ImgPipeline", IMAGE, third, **START)
