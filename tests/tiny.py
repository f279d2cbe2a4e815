"""Tiny real PyTorch checkpoints with all weights random, zero-initialised ones too."""

from pathlib import Path
from typing import Any

import torch
from clip_vocabulary import write_clip_vocabulary
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

UNET: dict[str, dict[str, Any]] = {
    "sd1": {
        "block_out_channels": (32, 64),
        "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
        "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
        "layers_per_block": 1,
        "attention_head_dim": 4,
        "norm_num_groups": 8,
        "cross_attention_dim": 32,
        "sample_size": 16,
    },
}
UNET["sd2"] = {**UNET["sd1"], "attention_head_dim": (2, 4), "use_linear_projection": True}
VAE: dict[str, Any] = {
    "block_out_channels": (16, 16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 64,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 16,
}
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "skip_prk_steps": True,
}


def randomize(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Draws every parameter: weights of unit gain, norms around one, biases around zero."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        values = torch.randn(parameter.shape, generator=generator)
        if "embedding" in name and parameter.ndim == 2:
            values *= 0.3
        elif parameter.ndim > 1:
            values *= (parameter.shape[0] / parameter.numel()) ** 0.5
        elif name.endswith("weight"):
            values = 1 + 0.2 * values
        else:
            values *= 0.2
        parameter.data = values
    return module.eval()


def build_stable_diffusion(
    folder: Path,
    *,
    style: str = "sd1",
    seed: int = 0,
    unet: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    text: dict[str, Any] | None = None,
    scheduler: Any = None,
    **save: Any,
) -> StableDiffusionPipeline:
    """A tiny pipeline in the style of SD 1.x or 2.x, saved in `folder`."""
    vocabulary = folder.with_name(folder.name + "-vocabulary")
    write_clip_vocabulary(vocabulary, pad="<|endoftext|>" if style == "sd1" else "!")
    activation = "quick_gelu" if style == "sd1" else "gelu"
    text_config = CLIPTextConfig(**{**TEXT, "hidden_act": activation, **(text or {})})
    pipe = StableDiffusionPipeline(
        vae=randomize(AutoencoderKL(**{**VAE, **(vae or {})}), seed),
        text_encoder=randomize(CLIPTextModel(text_config), seed + 1),
        tokenizer=CLIPTokenizer.from_pretrained(vocabulary),
        unet=randomize(UNet2DConditionModel(**{**UNET[style], **(unet or {})}), seed + 2),
        scheduler=scheduler or PNDMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder, **save)
    return pipe
