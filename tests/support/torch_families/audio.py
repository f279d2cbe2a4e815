"""Pipelines of sounds, and Marigold, which estimates from pictures."""

from typing import Any

import transformers
from diffusers import AudioLDM2ProjectionModel, AudioLDM2UNet2DConditionModel
from diffusers.pipelines.stable_audio import StableAudioProjectionModel

from support.tiny_tokenizers import BYTES, t5_tokenizer

from .autoencoders import autoencoder
from .pictures import picture
from .registry import AUDIO, OTHER, add
from .stable_diffusion import PLAIN, ddim, unet
from .text import t5
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


CLAP_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 300,
    "projection_dim": 32,
}


def clap_text() -> Any:
    """CLAP's text encoder with its projection."""
    config = transformers.ClapTextConfig(**CLAP_TEXT)
    return randomize(transformers.ClapTextModelWithProjection(config))


def roberta_words() -> Any:
    """RoBERTa's tokenizer, whose tokens are bytes."""
    tokens = ("<s>", "<pad>", "</s>", "<unk>", "<mask>", *BYTES)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    return transformers.RobertaTokenizer(vocab=vocabulary, merges=[], model_max_length=77)


def vocoder() -> Any:
    """What makes waves of spectrograms of eight channels."""
    config = transformers.SpeechT5HifiGanConfig(
        model_in_dim=8,
        sampling_rate=16000,
        upsample_initial_channel=16,
        upsample_rates=[2, 2],
        upsample_kernel_sizes=[4, 4],
        resblock_kernel_sizes=[3, 7],
        resblock_dilation_sizes=[[1, 3, 5], [1, 3, 5]],
        normalize_before=False,
    )
    return randomize(transformers.SpeechT5HifiGan(config))


audioldm = parts(
    vae=lambda: autoencoder(in_channels=1, out_channels=1, levels=2),
    text_encoder=clap_text,
    tokenizer=roberta_words,
    vocoder=vocoder,
    scheduler=ddim,
    unet=lambda: unet(
        "sd1",
        cross_attention_dim=(32, 64),
        class_embed_type="simple_projection",
        projection_class_embeddings_input_dim=32,
        class_embeddings_concat=True,
    ),
)
add("AudioLDMPipeline", AUDIO, audioldm, audio_length_in_s=0.032)


def clap() -> Any:
    """CLAP, of which the pipelines use the branch of texts."""
    audio = {
        "spec_size": 8,
        "window_size": 4,
        "num_mel_bins": 8,
        "depths": [1, 1],
        "num_attention_heads": [1, 1],
        "num_hidden_layers": 2,
        "hidden_size": 192,
        "projection_dim": 32,
        "patch_size": 2,
        "patch_stride": 2,
        "patch_embed_input_channels": 4,
    }
    config = transformers.ClapConfig(text_config=CLAP_TEXT, audio_config=audio, projection_dim=32)
    return randomize(transformers.ClapModel(config))


def gpt2() -> Any:
    """GPT-2, which continues the embeddings of prompts."""
    config = transformers.GPT2Config(
        n_embd=32, n_head=2, n_layer=2, vocab_size=300, n_ctx=256, n_positions=256
    )
    made = randomize(transformers.GPT2LMHeadModel(config))
    made.config.max_new_tokens = 8
    return made


audioldm2 = parts(
    audioldm,
    text_encoder=clap,
    feature_extractor=lambda: transformers.ClapFeatureExtractor(),
    text_encoder_2=t5,
    tokenizer_2=t5_tokenizer,
    language_model=gpt2,
    projection_model=lambda: randomize(
        AudioLDM2ProjectionModel(text_encoder_dim=32, text_encoder_1_dim=32, langauge_model_dim=32)
    ),
    unet=lambda: randomize(
        AudioLDM2UNet2DConditionModel(
            block_out_channels=(16, 32),
            layers_per_block=1,
            norm_num_groups=8,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            cross_attention_dim=(32, 32),
        )
    ),
)
add("AudioLDM2Pipeline", AUDIO, audioldm2, audio_length_in_s=0.032, max_new_tokens=8)
