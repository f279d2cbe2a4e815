"""Tiny real PyTorch checkpoints with all weights random, zero-initialised ones too.

A checkpoint has a kind (what it is for) and a variation:
    a: two levels, predicts noise, autoencoder of factor 4.
    b: another architecture, predicts v, autoencoder of factor 8; SDXL's with latents_mean and
       latents_std, and without zeros for empty prompts.
    c: the architecture of a, with other weights, another scheduler and other noise levels, whose
       file leaves out what it does not change, as files on the Hub do.
"""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKL, PNDMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
)

from support.clip_vocabulary import write_clip_vocabulary

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
UNET["xl"] = {
    **UNET["sd1"],
    "block_out_channels": (16, 32),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (2, 4),
    "transformer_layers_per_block": (1, 2),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 8,
    "cross_attention_dim": 32 + 24,
    "projection_class_embeddings_input_dim": 16 + 6 * 8,
}
VAE: dict[str, Any] = {
    "block_out_channels": (16, 16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "sample_size": 64,
}
VAE_8: dict[str, Any] = {
    **VAE,
    "block_out_channels": (8, 16, 16, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
}
# One level each, a latent for each pixel: what compiles soonest.
SMALLEST_UNET: dict[str, Any] = {
    "block_out_channels": (8,),
    "down_block_types": ("CrossAttnDownBlock2D",),
    "up_block_types": ("CrossAttnUpBlock2D",),
    "mid_block_type": None,
    "attention_head_dim": 2,
    "transformer_layers_per_block": 1,
    "norm_num_groups": 4,
}
SMALLEST_VAE: dict[str, Any] = {
    "block_out_channels": (8,),
    "down_block_types": ("DownEncoderBlock2D",),
    "up_block_types": ("UpDecoderBlock2D",),
    "mid_block_add_attention": False,
    "norm_num_groups": 4,
}
ASYMMETRIC: dict[str, Any] = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "down_block_out_channels": (16, 16, 32),
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "up_block_out_channels": (16, 32, 48),
    "norm_num_groups": 8,
    "sample_size": 32,
}
TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "projection_dim": 16,
}
TEXT_2 = {**TEXT, "hidden_size": 24, "hidden_act": "gelu"}
SCHEDULER = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "skip_prk_steps": True,
}
SPARSE = {
    "beta_end": 0.015,
    "beta_schedule": "linear",
    "steps_offset": 1,
    "timestep_spacing": "trailing",
}
LEVELS = {k: v for k, v in SCHEDULER.items() if k.startswith("beta")}
LATENT_STATISTICS = {
    "latents_mean": [-1.6, 1.1, 0.3, -0.2],
    "latents_std": [1.9, 1.3, 0.9, 1.2],
    "scaling_factor": 0.5,
    "force_upcast": True,
}

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    # diffusers' class, changes of the UNet, constructor arguments
    "sd": ("StableDiffusionPipeline", {}, {}),
    "sd-inpaint": ("StableDiffusionInpaintPipeline", {"in_channels": 9}, {}),
    "sd-instruct": ("StableDiffusionInstructPix2PixPipeline", {"in_channels": 8}, {}),
    "lcm": ("LatentConsistencyModelPipeline", {"time_cond_proj_dim": 16}, {}),
    "xl": ("StableDiffusionXLPipeline", {}, {}),
    "xl-refiner": (
        "StableDiffusionXLImg2ImgPipeline",
        {"cross_attention_dim": 24, "projection_class_embeddings_input_dim": 16 + 5 * 8},
        {"requires_aesthetics_score": True, "force_zeros_for_empty_prompt": False},
    ),
    "xl-inpaint": ("StableDiffusionXLInpaintPipeline", {"in_channels": 9}, {}),
    "xl-instruct": ("StableDiffusionXLInstructPix2PixPipeline", {"in_channels": 8}, {}),
    "xl-cosxl": (
        "StableDiffusionXLInstructPix2PixPipeline",
        {"in_channels": 8},
        {"is_cosxl_edit": True},
    ),
}
SEEDS = {"a": 0, "b": 100, "c": 200}


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
    pipeline_class: Any = StableDiffusionPipeline,
    **save: Any,
) -> Any:
    """A tiny pipeline in the style of SD 1.x or 2.x, saved in `folder`."""
    vocabulary = folder.with_name(folder.name + "-vocabulary")
    write_clip_vocabulary(vocabulary, pad="<|endoftext|>" if style == "sd1" else "!")
    activation = "quick_gelu" if style == "sd1" else "gelu"
    text_config = CLIPTextConfig(**{**TEXT, "hidden_act": activation, **(text or {})})
    pipe = pipeline_class(
        vae=randomize(AutoencoderKL(**{**VAE, **(vae or {})}), seed),
        text_encoder=randomize(CLIPTextModel(text_config), seed + 1),
        tokenizer=CLIPTokenizer.from_pretrained(vocabulary),
        unet=randomize(UNet2DConditionModel(**{**UNET[style], **(unet or {})}), seed + 2),
        scheduler=scheduler or PNDMScheduler(**SCHEDULER),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    return _saved(pipe, folder, save)


def build_stable_diffusion_xl(
    folder: Path,
    *,
    seed: int = 0,
    unet: dict[str, Any] | None = None,
    vae: dict[str, Any] | None = None,
    scheduler: Any = None,
    refiner: bool = False,
    pipeline_class: Any = diffusers.StableDiffusionXLPipeline,
    **options: Any,
) -> Any:
    """A tiny pipeline in the style of SDXL, saved in `folder`.

    A refiner has the second text encoder only.
    """
    vocabulary = folder.with_name(folder.name + "-vocabulary")
    first = write_clip_vocabulary(vocabulary / "1")
    second = write_clip_vocabulary(vocabulary / "2", pad="!")
    text = randomize(CLIPTextModel(CLIPTextConfig(**TEXT, hidden_act="quick_gelu")), seed + 1)
    text_2 = randomize(CLIPTextModelWithProjection(CLIPTextConfig(**TEXT_2)), seed + 3)
    pipe = pipeline_class(
        vae=randomize(AutoencoderKL(**{**VAE, **(vae or {})}), seed),
        text_encoder=None if refiner else text,
        text_encoder_2=text_2,
        tokenizer=None if refiner else CLIPTokenizer.from_pretrained(first),
        tokenizer_2=CLIPTokenizer.from_pretrained(second),
        unet=randomize(UNet2DConditionModel(**{**UNET["xl"], **(unet or {})}), seed + 2),
        scheduler=scheduler or diffusers.EulerDiscreteScheduler(**LEVELS, steps_offset=1),
        **options,
    )
    return _saved(pipe, folder, {})


def build_checkpoint(folder: Path, kind: str, variation: str) -> Any:
    """The checkpoint of a kind and a variation (see above), saved in `folder`."""
    pipe = _build(folder, kind, variation)
    if variation == "c":
        path = folder / "scheduler" / "scheduler_config.json"
        kept = {"_class_name", "_diffusers_version", *SPARSE}
        config = {k: v for k, v in json.loads(path.read_text()).items() if k in kept}
        path.write_text(json.dumps(config))
    return pipe


def _build(folder: Path, kind: str, variation: str) -> Any:
    class_name, unet, options = KINDS[kind]
    given = {
        "pipeline_class": getattr(diffusers, class_name),
        "seed": SEEDS[variation],
        "scheduler": _scheduler(kind, variation),
    }
    if variation == "b":
        unet = {**unet, "sample_size": 8}
    if not kind.startswith("xl"):
        style = "sd2" if variation == "b" else "sd1"
        return build_stable_diffusion(
            folder, style=style, unet=unet, vae=VAE_8 if variation == "b" else None, **given
        )
    if variation == "b":
        unet["attention_head_dim"] = (4, 2)
        unet["norm_num_groups"] = 4
        options = {**options, "force_zeros_for_empty_prompt": False}
    vae = {**VAE_8, **LATENT_STATISTICS} if variation == "b" else None
    return build_stable_diffusion_xl(
        folder, unet=unet, vae=vae, refiner=kind == "xl-refiner", **given, **options
    )


def build_controlnet(folder: Path, family: str, variation: str, seed: int = 0) -> Any:
    """A tiny ControlNet for the UNets of a family ("sd", "xl") and variation, saved in `folder`."""
    style = "xl" if family == "xl" else "sd2" if variation == "b" else "sd1"
    config = {k: v for k, v in UNET[style].items() if k not in ("sample_size", "up_block_types")}
    if style == "xl" and variation == "b":
        config |= {"attention_head_dim": (4, 2), "norm_num_groups": 4}
    channels = (4, 8, 8, 16) if variation == "b" else (4, 8, 16)
    config["conditioning_embedding_out_channels"] = channels
    controlnet = diffusers.ControlNetModel(**config)
    randomize(controlnet, SEEDS[variation] + 50 + seed)
    controlnet.save_pretrained(folder)
    return controlnet


T2I_ADAPTER: dict[str, dict[str, Any]] = {
    "sd": {"channels": [32, 64], "num_res_blocks": 1, "downscale_factor": 4},
    "light": {
        "channels": [32, 64],
        "num_res_blocks": 2,
        "downscale_factor": 4,
        "adapter_type": "light_adapter",
        "in_channels": 1,
    },
    "xl": {
        "channels": [16, 32, 32],
        "num_res_blocks": 1,
        "downscale_factor": 8,
        "adapter_type": "full_adapter_xl",
    },
}
T2I_ADAPTER["xl-b"] = {**T2I_ADAPTER["xl"], "downscale_factor": 16}
"""Those for the UNets of variation a: sd, sd with a light adapter of one channel, and xl; xl-b is
for variation b."""


def build_t2i_adapter(folder: Path, kind: str, seed: int = 0) -> Any:
    """A tiny T2I-Adapter of T2I_ADAPTER, saved in `folder`."""
    adapter = diffusers.T2IAdapter(**T2I_ADAPTER[kind])
    randomize(adapter, 70 + seed)
    adapter.save_pretrained(folder)
    return adapter


def build_asymmetric(folder: Path) -> Any:
    """A tiny autoencoder for inpainting in the place of a variation's a or c, saved in `folder`."""
    vae = randomize(diffusers.AsymmetricAutoencoderKL(**ASYMMETRIC)).requires_grad_(False)
    vae.save_pretrained(folder)
    return vae


@contextlib.contextmanager
def own_numbers() -> Iterator[None]:
    """What is drawn inside changes nothing outside. (torchax breaks torch.random.fork_rng.)"""
    state = torch.get_rng_state()
    try:
        yield
    finally:
        torch.set_rng_state(state)


class TinyCheckpoints:
    """Checkpoints that are built once, when they are first asked for, in folders of `root`."""

    def __init__(self, root: Path):
        self.root = root
        self.pipeline = functools.cache(self._pipeline)
        self.controlnet = functools.cache(self._controlnet)
        self.t2i_adapter = functools.cache(self._t2i_adapter)

    def _pipeline(self, kind: str, variation: str = "a") -> tuple[Path, Any]:
        folder = self.root / f"{kind}-{variation}"
        # A test goes on with the same numbers, whether it is the first to ask or not.
        with own_numbers():
            return folder, build_checkpoint(folder, kind, variation)

    def _controlnet(self, family: str, variation: str = "a", seed: int = 0) -> tuple[Path, Any]:
        folder = self.root / f"controlnet-{family}-{variation}-{seed}"
        with own_numbers():
            return folder, build_controlnet(folder, family, variation, seed)

    def _t2i_adapter(self, kind: str, seed: int = 0) -> tuple[Path, Any]:
        folder = self.root / f"t2i-{kind}-{seed}"
        with own_numbers():
            return folder, build_t2i_adapter(folder, kind, seed)


def _scheduler(kind: str, variation: str) -> Any:
    if kind == "lcm":
        options = {"original_inference_steps": 40} if variation == "c" else {}
        prediction = "v_prediction" if variation == "b" else "epsilon"
        return diffusers.LCMScheduler(**LEVELS, prediction_type=prediction, **options)
    if variation == "b":
        return diffusers.DDIMScheduler(
            **LEVELS,
            prediction_type="v_prediction",
            clip_sample=False,
            set_alpha_to_one=False,
            steps_offset=1,
        )
    if variation == "c":
        return diffusers.EulerDiscreteScheduler(**SPARSE)
    if kind.startswith("xl"):
        return diffusers.EulerDiscreteScheduler(
            **LEVELS, steps_offset=1, timestep_spacing="leading"
        )
    return PNDMScheduler(**SCHEDULER)


def _saved(pipe: Any, folder: Path, save: dict[str, Any]) -> Any:
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder, **save)
    return pipe
