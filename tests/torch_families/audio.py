"""Pipelines of sounds, and Marigold, which estimates from pictures."""

from typing import Any

from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from .pictures import picture
from .registry import AUDIO, OTHER, add
from .stable_diffusion import PLAIN, ddim, unet
from .text import t5
from .tokenizers import t5_tokenizer
from .weights import network, parts, randomize, scheduler


def projection() -> Any:
    """What turns prompts and lengths into conditions of Stable Audio."""
    return randomize(
        StableAudioProjectionModel(
            text_encoder_dim=32, conditioning_dim=32, min_value=0, max_value=32
        )
    )


stable_audio = parts(
    text_encoder=t5,
    tokenizer=lambda: t5_tokenizer(model_max_length=25),
    projection_model=projection,
    vae=network(
        "AutoencoderOobleck",
        encoder_hidden_size=6,
        downsampling_ratios=[1, 2],
        decoder_channels=3,
        decoder_input_channels=3,
        audio_channels=2,
        channel_multiples=[2, 4],
        sampling_rate=16,
    ),
    scheduler=scheduler("EDMDPMSolverMultistepScheduler", prediction_type="v_prediction"),
    transformer=network(
        "StableAudioDiTModel",
        sample_size=32,
        in_channels=3,
        out_channels=3,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=4,
        num_key_value_attention_heads=2,
        cross_attention_dim=32,
        time_proj_dim=8,
        global_states_input_dim=64,
        cross_attention_input_dim=32,
    ),
)
add("StableAudioPipeline", AUDIO, stable_audio, audio_end_in_s=3.0)

sounds = network(
    "UNet1DModel",
    block_out_channels=(32, 32, 64),
    extra_in_channels=64,
    sample_size=256,
    sample_rate=256,
    in_channels=2,
    out_channels=2,
    flip_sin_to_cos=True,
    use_timestep_embedding=False,
    time_embedding_type="fourier",
    mid_block_type="UNetMidBlock1D",
    down_block_types=("DownBlock1DNoSkip", "DownBlock1D", "AttnDownBlock1D"),
    up_block_types=("AttnUpBlock1D", "UpBlock1D", "UpBlock1DNoSkip"),
)
add(
    "DanceDiffusionPipeline",
    AUDIO,
    parts(unet=sounds, scheduler=scheduler("IPNDMScheduler")),
    num_inference_steps=4,
)

marigold = parts(
    PLAIN,
    unet=lambda: unet(in_channels=8),
    scheduler=lambda: ddim(prediction_type="v_prediction"),
    default_denoising_steps=2,
    default_processing_resolution=64,
)
LOOK = {"image": picture, "processing_resolution": 64}
depth = parts(marigold, prediction_type="depth", scale_invariant=True, shift_invariant=True)
normals = parts(marigold, prediction_type="normals", use_full_z_range=True)
intrinsics = parts(
    marigold,
    unet=lambda: unet(in_channels=12, out_channels=8),
    prediction_type="intrinsics",
    target_properties={
        "target_names": ["albedo", "roughness"],
        "albedo": {"up_to_scale": True, "space": "srgb"},
    },
)
add("MarigoldDepthPipeline", OTHER, depth, **LOOK)
add("MarigoldNormalsPipeline", OTHER, normals, **LOOK)
add("MarigoldIntrinsicsPipeline", OTHER, intrinsics, **LOOK)
