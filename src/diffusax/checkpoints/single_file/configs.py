"""The configs of the models that single files hold, as the files in diffusers' layout have them.

The values are those of the Hub's repositories: stable-diffusion-v1-5/stable-diffusion-v1-5,
stabilityai/stable-diffusion-2-1 and -base, stable-diffusion-xl-base-1.0 and -refiner-1.0,
timbrooks/instruct-pix2pix, lllyasviel/sd-controlnet-canny.
"""

from collections.abc import Sequence
from typing import Any

from diffusax.checkpoints.single_file import autoencoder_configs, text_encoder_configs
from diffusax.checkpoints.single_file.contents import Contents, Family, Part

Config = dict[str, Any]

_SD1_UNET: Config = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": [*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *("CrossAttnUpBlock2D",) * 3],
    "block_out_channels": [320, 640, 1280, 1280],
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
}
_SD2_UNET = {
    **_SD1_UNET,
    "cross_attention_dim": 1024,
    "attention_head_dim": [5, 10, 20, 20],
    "use_linear_projection": True,
}
_SDXL_UNET = {
    **_SD1_UNET,
    "sample_size": 128,
    "down_block_types": ["DownBlock2D", *("CrossAttnDownBlock2D",) * 2],
    "up_block_types": [*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "cross_attention_dim": 2048,
    "attention_head_dim": [5, 10, 20],
    "transformer_layers_per_block": [1, 2, 10],
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
_REFINER_UNET = {
    **_SDXL_UNET,
    "down_block_types": ["DownBlock2D", *("CrossAttnDownBlock2D",) * 2, "DownBlock2D"],
    "up_block_types": ["UpBlock2D", *("CrossAttnUpBlock2D",) * 2, "UpBlock2D"],
    "block_out_channels": [384, 768, 1536, 1536],
    "cross_attention_dim": 1280,
    "attention_head_dim": [6, 12, 24, 24],
    "transformer_layers_per_block": 4,
    "projection_class_embeddings_input_dim": 2560,
}
UNETS: dict[Family, Config] = {
    "sd1": _SD1_UNET,
    "sd2": _SD2_UNET,
    "sdxl": _SDXL_UNET,
    "refiner": _REFINER_UNET,
}
_CONTROL = ("sample_size", "out_channels", "up_block_types")
"""The options of UNets that ControlNets do not have."""

AUTOENCODER: Config = {
    "_class_name": "AutoencoderKL",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "block_out_channels": [128, 256, 512, 512],
    "layers_per_block": 2,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
_SDXL_AUTOENCODER = {
    **AUTOENCODER,
    "sample_size": 1024,
    "scaling_factor": 0.13025,
}
_FLUX_AUTOENCODER = {
    **AUTOENCODER,
    "latent_channels": 16,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
"""That of FLUX.1 and Z-Image."""

_CLIP_L: Config = {
    "architectures": ["CLIPTextModel"],
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "projection_dim": 768,
}
_CLIP_H = {
    **_CLIP_L,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    # OpenCLIP's has one more, whose output these models do not use.
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
    "hidden_act": "gelu",
    "projection_dim": 512,
}
_CLIP_BIG_G = {
    **_CLIP_L,
    "architectures": ["CLIPTextModelWithProjection"],
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "hidden_act": "gelu",
    "projection_dim": 1280,
}
TEXT_ENCODERS: dict[Family, dict[str, Config]] = {
    "sd1": {"text_encoder": _CLIP_L},
    "sd2": {"text_encoder": _CLIP_H},
    "sdxl": {"text_encoder": _CLIP_L, "text_encoder_2": _CLIP_BIG_G},
    "refiner": {"text_encoder_2": _CLIP_BIG_G},
}

_LEVELS: Config = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
}
_PNDM: Config = {
    "_class_name": "PNDMScheduler",
    **_LEVELS,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
}
_DDIM: Config = {
    "_class_name": "DDIMScheduler",
    **_LEVELS,
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
_EULER: Config = {
    "_class_name": "EulerDiscreteScheduler",
    **_LEVELS,
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
_EULER_ANCESTRAL: Config = {
    "_class_name": "EulerAncestralDiscreteScheduler",
    **_LEVELS,
    "steps_offset": 1,
}
_PLAYGROUND: Config = {"_class_name": "EDMDPMSolverMultistepScheduler"}
# CosXL's, as diffusers' pipeline_stable_diffusion_xl_instruct_pix2pix.py is run with it.
_EDM: Config = {
    "_class_name": "EDMEulerScheduler",
    "sigma_data": 1.0,
    "sigma_schedule": "exponential",
    "prediction_type": "v_prediction",
}


def unet_config(contents: Contents, prediction_type: str | None = None) -> Config:
    """Returns the config of the UNet in a file.

    prediction_type: the UNet's; SD 2 models that predict v were trained at 768 pixels.

    Raises:
        ValueError: the package has no config for such a UNet.
    """
    part = contents.parts["unet"]
    family = _known_family(part)
    if part.in_channels not in (4, 8, 9):
        raise ValueError(
            f"{part.path}: the UNet has {part.in_channels} input channels, which no pipeline of "
            "diffusax gives it (4, 8 for InstructPix2Pix, 9 for inpainting)"
        )
    config = {**UNETS[family], "in_channels": part.in_channels}
    if family == "sd2" and prediction_type == "v_prediction":
        config["sample_size"] = 96
    return config


def controlnet_config(part: Part) -> Config:
    """Returns the config of a ControlNet.

    Raises:
        ValueError: the package has no config for such a ControlNet.
    """
    if part.layout == "diffusers" and part.shape("add_embedding.linear_1.weight"):
        return _sdxl_controlnet(part)
    return controlnet_like(UNETS[_known_family(part)])


def controlnet_like(unet: Config) -> Config:
    """Returns the config of the ControlNet of a UNet."""
    config = {name: value for name, value in unet.items() if name not in _CONTROL}
    return {**config, "_class_name": "ControlNetModel"}


def autoencoder_config(
    part: Part, family: Family | None, statistics: Sequence[list[float] | None] = (None, None)
) -> Config:
    """Returns the config of an autoencoder; SDXL's differs from others in its scaling factor.

    Args:
        part: the autoencoder.
        family: the family of the UNet beside it; None where it is alone.
        statistics: the mean and the deviation of each channel of the latents, where the file names
            them, as Playground 2.5's does.

    Raises:
        ValueError: the package has no config for such an autoencoder.
    """
    if part.class_name == "AutoencoderKLFlux2":
        return autoencoder_configs.flux2_autoencoder(part)
    if part.class_name in autoencoder_configs.OF_FRAMES:
        return autoencoder_configs.autoencoder_of_frames(part)
    channels = part.shape("decoder.conv_in.weight")
    if channels is not None and channels[1:2] == (16,):
        return _FLUX_AUTOENCODER
    if channels is None or channels[1:2] != (4,):
        raise ValueError(
            f"{part.path}: the autoencoder's decoder.conv_in.weight has the shape {channels}, that "
            "of no Stable Diffusion; pass config= with the folder of its config.json"
        )
    mean, deviation = statistics
    if mean and deviation:
        own = {"latents_mean": mean, "latents_std": deviation, "scaling_factor": 0.5}
        return {**_SDXL_AUTOENCODER, **own}
    return _SDXL_AUTOENCODER if family in ("sdxl", "refiner") else AUTOENCODER


def text_encoder_config(part: Part) -> Config | None:
    """Returns the config of a text encoder alone, or of a model with a transformer; None without.

    It is CLIP's, T5-XXL's, UMT5-XXL's or that of Qwen3.
    """
    if part.shape("text_model.embeddings.token_embedding.weight") == (49408, 768):
        return _CLIP_L
    return text_encoder_configs.text_encoder_config(part)


def scheduler_config(
    contents: Contents, prediction_type: str | None, levels: tuple[float, float] | None = None
) -> Config:
    """Returns the config of the scheduler that suits a model.

    Args:
        contents: the file with the model's UNet.
        prediction_type: the UNet's prediction type; None for the usual one, epsilon.
        levels: sigma_min and sigma_max, where the file names continuous noise levels.
    """
    if levels is not None:
        return {**_EDM, "sigma_min": levels[0], "sigma_max": levels[1]}
    part, zero = contents.parts["unet"], contents.has_zero_terminal_snr
    if "edm_mean" in contents.entries:
        return _PLAYGROUND
    if part.family in ("sdxl", "refiner"):
        config = _EULER
    elif part.in_channels == 8:
        config = _EULER_ANCESTRAL
    else:
        config = _DDIM if zero or prediction_type == "v_prediction" else _PNDM
    rescaled = {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"} if zero else {}
    return {**config, "prediction_type": prediction_type or "epsilon", **rescaled}


def pipeline_class(part: Part) -> str:
    """Returns the class of pipelines for a UNet by its family and its number of input channels."""
    xl = "XL" if part.family in ("sdxl", "refiner") else ""
    task = {8: "InstructPix2Pix", 9: "Inpaint"}.get(part.in_channels or 4, "")
    if part.family == "refiner":
        task = "Img2Img"
    return f"StableDiffusion{xl}{task}Pipeline"


def pipeline_options(contents: Contents) -> dict[str, bool]:
    """Returns the options of model_index.json."""
    part = contents.parts["unet"]
    if part.family in ("sd1", "sd2"):
        return {"requires_safety_checker": False}
    if part.family == "refiner":
        return {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False}
    if part.family == "sdxl" and part.in_channels == 8:
        return {"is_cosxl_edit": contents.has_continuous_levels}
    return {}


def _known_family(part: Part) -> Family:
    if part.family is None:
        raise ValueError(
            f"{part.path}: the {part.name} attends to texts of width {part.context_dim}, that of "
            "no Stable Diffusion; pass config= with a folder or Hub repository in diffusers' layout"
        )
    return part.family


def _sdxl_controlnet(part: Part) -> Config:
    """Returns the config of a ControlNet of SDXL, of which there are smaller ones."""
    names = part.entries
    levels = range(3)
    attends = [f"down_blocks.{i}.attentions.0.norm.weight" in names for i in levels]
    middle = "mid_block.attentions.0.norm.weight" in names
    return {
        **controlnet_like(_SDXL_UNET),
        "down_block_types": ["CrossAttnDownBlock2D" if a else "DownBlock2D" for a in attends],
        "mid_block_type": "UNetMidBlock2DCrossAttn" if middle else "UNetMidBlock2D",
        "transformer_layers_per_block": [_depth(part, f"down_blocks.{i}") for i in levels],
    }


def _depth(part: Part, block: str) -> int:
    """Returns the number of transformer blocks in the first transformer of a block."""
    name = f"{block}.attentions.0.transformer_blocks."
    return len({key[len(name) :].split(".")[0] for key in part.entries if key.startswith(name)})
