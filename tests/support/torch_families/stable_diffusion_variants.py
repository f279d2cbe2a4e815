"""Stable Diffusion with other inputs, and SD3 and PixArt with perturbed attention."""

from typing import Any

import transformers
from diffusers.pipelines.stable_diffusion import StableUnCLIPImageNormalizer

from support.tiny import UNET
from support.tiny_tokenizers import clip_tokenizer

from .autoencoders import autoencoder
from .pictures import mask, picture, tensor
from .registry import IMAGE, INPAINT, TEXT, add
from .shared import CONTROLLED, PRIOR, REPAINT, START
from .stable_diffusion import CONTROL, LEVELS, PLAIN, SIZE, ddim, unet
from .stable_diffusion_xl import CONTROL as XL_CONTROL
from .stable_diffusion_xl import PLAIN as XL
from .stable_diffusion_xl import WIDTHS
from .text import clip_images, clip_text_projected, clip_vision
from .transformers_t5 import SD3, SD3_INPUTS, pixart, sd3
from .weights import network, parts, randomize, scheduler

# Perturbed attention guidance.
add("StableDiffusionPAGPipeline", TEXT, PLAIN, **SIZE)
add("StableDiffusionPAGImg2ImgPipeline", IMAGE, PLAIN, **START)
add("StableDiffusionPAGInpaintPipeline", INPAINT, PLAIN, **REPAINT, **SIZE)
add("StableDiffusionControlNetPAGPipeline", TEXT, CONTROL, image=picture)
add("StableDiffusionControlNetPAGInpaintPipeline", INPAINT, CONTROL, **REPAINT, **CONTROLLED)
add("StableDiffusionXLPAGPipeline", TEXT, XL, **SIZE)
add("StableDiffusionXLPAGImg2ImgPipeline", IMAGE, XL, **START)
add("StableDiffusionXLPAGInpaintPipeline", INPAINT, XL, **REPAINT, **SIZE)
add("StableDiffusionXLControlNetPAGPipeline", TEXT, XL_CONTROL, image=picture)
add("StableDiffusionXLControlNetPAGImg2ImgPipeline", IMAGE, XL_CONTROL, **START, **CONTROLLED)
add("StableDiffusion3PAGPipeline", TEXT, parts(sd3(), pag_applied_layers="blocks.1"), **SD3_INPUTS)
add(
    "StableDiffusion3PAGImg2ImgPipeline",
    IMAGE,
    parts(sd3(), pag_applied_layers="blocks.1"),
    **START,
    **SD3_INPUTS,
)
add("PixArtSigmaPAGPipeline", TEXT, pixart, use_resolution_binning=False, **SIZE)

# SD3's ControlNet.
SD3_CONTROL = {k: v for k, v in SD3.items() if k != "out_channels"}
add(
    "StableDiffusion3ControlNetPipeline",
    TEXT,
    sd3(controlnet=network("SD3ControlNetModel", **{**SD3_CONTROL, "num_layers": 1})),
    **CONTROLLED,
    **SD3_INPUTS,
)
add(
    "StableDiffusion3ControlNetInpaintingPipeline",
    INPAINT,
    sd3(
        controlnet=network(
            "SD3ControlNetModel", **{**SD3_CONTROL, "extra_conditioning_channels": 1}
        )
    ),
    control_mask=mask,
    **CONTROLLED,
    **SD3_INPUTS,
)

# ControlNets of one network for all kinds of control.
UNION = {k: v for k, v in UNET["xl"].items() if k not in ("sample_size", "up_block_types")}
union = parts(
    XL,
    controlnet=network(
        "ControlNetUnionModel",
        **{**UNION, **WIDTHS},
        conditioning_embedding_out_channels=(4, 8, 8, 16),
        num_control_type=6,
        num_trans_channel=16,
        num_proj_channel=16,
        num_trans_head=4,
        num_trans_layer=1,
    ),
)
MODE = {"control_image": lambda: [picture(3)], "control_mode": [2]}
add("StableDiffusionXLControlNetUnionPipeline", TEXT, union, **MODE, **SIZE)
add("StableDiffusionXLControlNetUnionImg2ImgPipeline", IMAGE, union, **START, **MODE)
add("StableDiffusionXLControlNetUnionInpaintPipeline", INPAINT, union, **REPAINT, **MODE)

# T2I adapters.
add(
    "StableDiffusionAdapterPipeline",
    TEXT,
    parts(PLAIN, adapter=network("T2IAdapter", channels=[32, 64], num_res_blocks=1)),
    image=picture,
    **SIZE,
)
add(
    "StableDiffusionXLAdapterPipeline",
    TEXT,
    parts(
        XL,
        adapter=network(
            "T2IAdapter",
            channels=[16, 32],
            num_res_blocks=1,
            downscale_factor=16,
            adapter_type="full_adapter_xl",
        ),
    ),
    image=picture,
    **SIZE,
)

# Latent consistency models.
consistent = parts(
    PLAIN, unet=lambda: unet(time_cond_proj_dim=16), scheduler=scheduler("LCMScheduler", **LEVELS)
)
add("LatentConsistencyModelPipeline", TEXT, consistent, original_inference_steps=20, **SIZE)
add(
    "LatentConsistencyModelImg2ImgPipeline", IMAGE, consistent, original_inference_steps=20, **START
)


def depth_estimator() -> Any:
    """A tiny network of depths."""
    config = transformers.DPTConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8,
    )
    return randomize(transformers.DPTForDepthEstimation(config))


depth = parts(
    PLAIN,
    unet=lambda: unet(in_channels=5),
    depth_estimator=depth_estimator,
    feature_extractor=lambda: transformers.DPTImageProcessor(size={"height": 32, "width": 32}),
)
add("StableDiffusionDepth2ImgPipeline", IMAGE, depth, **START)

variation = parts(PLAIN, image_encoder=clip_vision, feature_extractor=clip_images)
add("StableDiffusionImageVariationPipeline", IMAGE, variation, image=picture, **SIZE)

upscale = parts(
    PLAIN,
    vae=lambda: autoencoder(levels=3),
    unet=lambda: unet(in_channels=7, num_class_embeds=100),
    low_res_scheduler=scheduler("DDPMScheduler"),
    max_noise_level=50,
)
add("StableDiffusionUpscalePipeline", IMAGE, upscale, image=lambda: picture(0, 32))

latent_upscale = parts(
    PLAIN,
    unet=network(
        "UNet2DConditionModel",
        act_fn="gelu",
        attention_head_dim=8,
        norm_num_groups=None,
        block_out_channels=(32, 32, 64, 64),
        time_cond_proj_dim=32 + 128,
        conv_in_kernel=1,
        conv_out_kernel=1,
        cross_attention_dim=32,
        down_block_types=("KDownBlock2D", *("KCrossAttnDownBlock2D",) * 3),
        up_block_types=(*("KCrossAttnUpBlock2D",) * 3, "KUpBlock2D"),
        in_channels=8,
        layers_per_block=1,
        mid_block_type=None,
        only_cross_attention=False,
        out_channels=5,
        resnet_time_scale_shift="scale_shift",
        time_embedding_type="fourier",
        timestep_post_act="gelu",
    ),
    scheduler=scheduler("EulerDiscreteScheduler", prediction_type="sample"),
)
add("StableDiffusionLatentUpscalePipeline", IMAGE, latent_upscale, image=lambda: tensor(1, 4, 8, 8))


def image_normalizer() -> Any:
    """What scales embeddings of pictures, with a positive deviation."""
    normalizer = randomize(StableUnCLIPImageNormalizer(embedding_dim=32))
    normalizer.std.data.abs_().add_(0.5)
    return normalizer


noised = parts(
    PLAIN,
    image_normalizer=image_normalizer,
    image_noising_scheduler=scheduler("DDPMScheduler", beta_schedule="squaredcos_cap_v2"),
    unet=lambda: unet(class_embed_type="projection", projection_class_embeddings_input_dim=64),
    scheduler=lambda: ddim(prediction_type="v_prediction"),
)
unclip = parts(
    noised,
    prior_tokenizer=clip_tokenizer,
    prior_text_encoder=clip_text_projected,
    prior=PRIOR,
    prior_scheduler=scheduler(
        "DDPMScheduler",
        variance_type="fixed_small_log",
        prediction_type="sample",
        clip_sample_range=5.0,
        beta_schedule="squaredcos_cap_v2",
    ),
)
unclip_image = parts(noised, image_encoder=clip_vision, feature_extractor=clip_images)
add("StableUnCLIPPipeline", TEXT, unclip, prior_num_inference_steps=2, noise_level=10, **SIZE)
add("StableUnCLIPImg2ImgPipeline", IMAGE, unclip_image, image=picture, noise_level=10, **SIZE)


def invert(pipe: Any) -> None:
    """Inverts a picture, as must be done before LEdits++ edits it."""
    import torch

    with torch.no_grad():
        pipe.invert(
            image=picture(),
            num_inversion_steps=4,
            skip=0.3,
            generator=torch.Generator().manual_seed(1),
        )


EDIT = {"editing_prompt": ["a red apple"], "negative_prompt": None, "prepare": invert}
ledits = parts(
    PLAIN,
    scheduler=scheduler(
        "DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++", solver_order=2, **LEVELS
    ),
)
ledits_xl = parts(
    XL,
    scheduler=scheduler(
        "DPMSolverMultistepScheduler", algorithm_type="sde-dpmsolver++", solver_order=2, **LEVELS
    ),
)
add("LEditsPPPipelineStableDiffusion", IMAGE, ledits, use_intersect_mask=False, **EDIT)
add("LEditsPPPipelineStableDiffusionXL", IMAGE, ledits_xl, **EDIT)
