"""Full-size models without weights or with random ones, and the operations that they need."""

import functools
import math
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import full_size
import jax
import jax.numpy as jnp
import numpy as np

import diffusax
from diffusax.boundary.files import write_json
from diffusax.models.parameter_tree import fill, ordered_leaves
from diffusax.pipelines.pipeline import ahead
from diffusax.runtime.programs.program import Request

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.clip_vocabulary import write_clip_vocabulary


class Architecture(NamedTuple):
    """What a checkpoint's configs say."""

    pipeline: str
    """diffusers' class."""
    size: int | tuple[int, int]
    """Pixels of a picture's side, or of its height and its width."""
    scheduler: dict[str, Any]
    unet: dict[str, Any]
    """The config of the denoiser."""
    vae: dict[str, Any]
    encoders: dict[str, dict[str, Any]]
    """Text encoders by their names in the checkpoint."""
    denoiser: tuple[str, str] = ("unet", "UNet2DConditionModel")
    """Its name and class."""
    encoder_class: str | None = None
    """The class of the only text encoder, where it is not CLIP's."""
    vae_class: str = "AutoencoderKL"
    options: tuple[tuple[str, Any], ...] = ()
    """What model_index.json says besides the components."""
    second: str | None = None
    """The name of a second denoiser like the first; None without one."""


LEVELS = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
}
DDIM = {"_class_name": "DDIMScheduler", **LEVELS, "clip_sample": False, "set_alpha_to_one": False}
EULER = {"_class_name": "EulerDiscreteScheduler", **LEVELS, "timestep_spacing": "leading"}


def _wan(
    transformer: dict[str, Any],
    size: tuple[int, int],
    shift: float = 3.0,
    vae: dict[str, Any] | None = None,
) -> Architecture:
    """Returns one of Wan's models, 81 frames of which are a call's usual length."""
    return Architecture(
        "WanPipeline",
        size,
        {
            "_class_name": "UniPCMultistepScheduler",
            "prediction_type": "flow_prediction",
            "use_flow_sigmas": True,
            "flow_shift": shift,
        },
        transformer,
        vae or {},
        {"text_encoder": full_size.UMT5_XXL},
        ("transformer", "WanTransformer3DModel"),
        "UMT5EncoderModel",
        "AutoencoderKLWan",
    )


MODELS = {
    "sd1": Architecture(
        "StableDiffusionPipeline",
        512,
        DDIM,
        full_size.SD1,
        full_size.VAE,
        {"text_encoder": full_size.VIT_L},
    ),
    "sd2": Architecture(
        "StableDiffusionPipeline",
        512,
        DDIM,
        full_size.SD2,
        full_size.VAE,
        {"text_encoder": full_size.VIT_H},
    ),
    "xl": Architecture(
        "StableDiffusionXLPipeline",
        1024,
        EULER,
        full_size.SDXL,
        full_size.VAE,
        {"text_encoder": full_size.VIT_L, "text_encoder_2": full_size.BIG_G},
    ),
    "z-image": Architecture(
        "ZImagePipeline",
        1024,
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
        full_size.Z_IMAGE,
        full_size.KL16,
        {"text_encoder": full_size.QWEN3_4B},
        ("transformer", "ZImageTransformer2DModel"),
        "Qwen3Model",
    ),
    "flux": Architecture(
        "FluxPipeline",
        1024,
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "shift": 3.0,
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 1.15,
        },
        full_size.FLUX_DEV,
        full_size.KL16,
        {"text_encoder": full_size.VIT_L, "text_encoder_2": full_size.T5_XXL},
        ("transformer", "FluxTransformer2DModel"),
    ),
    "klein": Architecture(
        "Flux2KleinPipeline",
        1024,
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "shift": 3.0,
            "use_dynamic_shifting": True,
        },
        full_size.KLEIN_4B,
        {},
        {"text_encoder": full_size.QWEN3_4B},
        ("transformer", "Flux2Transformer2DModel"),
        "Qwen3ForCausalLM",
        "AutoencoderKLFlux2",
    ),
    "flux3": Architecture(
        "Flux3KleinPipeline",
        1024,
        {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 6.93},
        {},
        {},
        {"text_encoder": full_size.QWEN3_VL_4B},
        ("transformer", "Flux3Transformer2DModel"),
        "Qwen3VLForConditionalGeneration",
        "AutoencoderKLFlux2",
    ),
    "krea2": Architecture(
        "Krea2Pipeline",
        1024,
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 6400,
        },
        {},
        {},
        {"text_encoder": full_size.QWEN3_VL_4B},
        ("transformer", "Krea2Transformer2DModel"),
        "Qwen3VLModel",
        "AutoencoderKLQwenImage",
    ),
    "qwen-image21": Architecture(
        "QwenImage21Pipeline",
        1024,
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 1.15,
            "base_image_seq_len": 256,
            "max_image_seq_len": 4096,
        },
        {},
        {},
        {"text_encoder": full_size.QWEN3_VL_8B},
        ("transformer", "QwenImage21Transformer2DModel"),
        "Qwen3VLForConditionalGeneration",
        "AutoencoderKLQwenImage21",
    ),
    "qwen-image-edit": Architecture(
        "QwenImageEditPlusPipeline",
        1024,
        {
            "_class_name": "FlowMatchEulerDiscreteScheduler",
            "use_dynamic_shifting": True,
            "base_shift": 0.5,
            "max_shift": 0.9,
            "base_image_seq_len": 256,
            "max_image_seq_len": 8192,
        },
        {},
        {},
        {"text_encoder": full_size.QWEN2_5_VL_7B},
        ("transformer", "QwenImageTransformer2DModel"),
        "Qwen2_5_VLForConditionalGeneration",
        "AutoencoderKLQwenImage",
    ),
    "wan-1.3b": _wan(full_size.WAN_1_3B, (480, 832)),
    "wan-14b": _wan({}, (720, 1280)),
    "wan-5b": _wan(full_size.WAN_5B, (704, 1280), 5.0, full_size.WAN_2_2_VAE)._replace(
        options=(("expand_timesteps", True),)
    ),
    "wan-a14b": _wan({}, (720, 1280))._replace(
        options=(("boundary_ratio", 0.875),), second="transformer_2"
    ),
}

_TINY_VAE = {
    **full_size.VAE,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 8,
}
_TINY_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "projection_dim": 32,
}
_TINY_UNET = {
    "sample_size": 8,
    "layers_per_block": 1,
    "norm_num_groups": 8,
    "block_out_channels": (16, 32),
    "attention_head_dim": (1, 2),
}
TINY = {
    "sd2": MODELS["sd2"]._replace(
        size=16,
        unet={
            **full_size.SD2,
            **_TINY_UNET,
            "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
            "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
            "cross_attention_dim": 32,
        },
        vae=_TINY_VAE,
        encoders={"text_encoder": full_size.VIT_H | _TINY_TEXT},
    ),
    "xl": MODELS["xl"]._replace(
        size=16,
        unet={
            **full_size.SDXL,
            **_TINY_UNET,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "transformer_layers_per_block": (1, 2),
            "cross_attention_dim": 64,
            "addition_time_embed_dim": 8,
            "projection_class_embeddings_input_dim": 32 + 6 * 8,
        },
        vae=_TINY_VAE,
        encoders={
            "text_encoder": full_size.VIT_L | _TINY_TEXT,
            "text_encoder_2": full_size.BIG_G | _TINY_TEXT,
        },
    ),
    "z-image": MODELS["z-image"]._replace(
        size=16,
        unet={
            **full_size.Z_IMAGE,
            "dim": 48,
            "n_heads": 2,
            "n_layers": 2,
            "n_refiner_layers": 1,
            "cap_feat_dim": 32,
            "axes_dims": (12, 8, 4),
        },
        vae=full_size.KL16 | _TINY_VAE,
        encoders={
            "text_encoder": {
                **full_size.QWEN3_4B,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
            }
        },
    ),
    "flux": MODELS["flux"]._replace(
        size=16,
        unet={
            **full_size.FLUX_DEV,
            "num_layers": 2,
            "num_single_layers": 2,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 32,
            "pooled_projection_dim": 32,
            "axes_dims_rope": (4, 6, 6),
        },
        vae=full_size.KL16 | _TINY_VAE,
        encoders={
            "text_encoder": full_size.VIT_L | _TINY_TEXT,
            "text_encoder_2": {
                **full_size.T5_XXL,
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": 2,
                "num_heads": 2,
            },
        },
    ),
    "klein": MODELS["klein"]._replace(
        size=32,
        unet={
            **full_size.KLEIN_4B,
            "num_layers": 1,
            "num_single_layers": 2,
            "num_attention_heads": 2,
            "attention_head_dim": 16,
            "axes_dims_rope": (4, 4, 4, 4),
            "in_channels": 16,
            "joint_attention_dim": 96,
        },
        vae={**_TINY_VAE, "latent_channels": 4},
        encoders={
            "text_encoder": {
                **full_size.QWEN3_4B,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 28,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "head_dim": 16,
            }
        },
    ),
}
"""The same with shrunken networks, to try a script."""


def write_checkpoint(folder: Path, model: Architecture) -> None:
    """A checkpoint of configs and of tokenizers, without weights."""
    index: dict[str, Any] = {"_class_name": model.pipeline, **dict(model.options)}
    name, kind = model.denoiser
    configs = {
        **{own: {"_class_name": kind, **model.unet} for own in (name, model.second) if own},
        "vae": {"_class_name": model.vae_class, **model.vae},
    }
    if model.vae_class == "AutoencoderKL":
        configs["vae"]["sample_size"] = model.size
    index |= {name: ["diffusers", config["_class_name"]] for name, config in configs.items()}
    family = getattr(diffusax, model.pipeline).family
    read_by = {e.name: e.tokenizer for e in family.text_encoders}
    for other in {c.name for c in family.components if c.role == "tokenizer"} - {*read_by.values()}:
        index[other] = ["transformers", _write_tokenizer(folder / other, "Qwen3Model")]
    for encoder, config in model.encoders.items():
        clip = "CLIPTextModel" if encoder == "text_encoder" else "CLIPTextModelWithProjection"
        kind = model.encoder_class or ("T5EncoderModel" if "d_ff" in config else clip)
        configs[encoder] = {"architectures": [kind], **config}
        index[encoder] = ["transformers", kind]
        tokenizer = read_by[encoder]
        index[tokenizer] = ["transformers", _write_tokenizer(folder / tokenizer, kind)]
    for component, config in configs.items():
        (folder / component).mkdir()
        write_json(folder / component / "config.json", config)
    (folder / "scheduler").mkdir()
    write_json(folder / "scheduler" / "scheduler_config.json", model.scheduler)
    index["scheduler"] = ["diffusers", model.scheduler["_class_name"]]
    write_json(folder / "model_index.json", index)


def _write_tokenizer(folder: Path, encoder: str) -> str:
    """Writes a tokenizer for a class of text encoders, and returns the tokenizer's class."""
    if encoder.startswith("CLIP"):
        write_clip_vocabulary(folder)
        return "CLIPTokenizer"
    from support.tiny_tokenizers import qwen_tokenizer, t5_tokenizer
    from support.tiny_vision_language import write_processor

    if encoder.startswith("Qwen2_5_VL"):
        write_processor(folder, "Qwen2VLProcessor", patch=14, most=1280)
        return "Qwen2VLProcessor"
    if encoder in ("T5EncoderModel", "UMT5EncoderModel"):
        t5_tokenizer().save_pretrained(folder)
        return "T5Tokenizer"
    qwen_tokenizer().save_pretrained(folder)
    return "Qwen2Tokenizer"


def random_params(shapes: Any, *, seed: int = 0) -> Any:
    """As `diffusax.models.initialize_params`, drawn on the device and one by one.

    Neither the host nor the device ever holds more than the parameters and one of them in float32.
    """
    leaves = enumerate(ordered_leaves(shapes))
    return fill(shapes, [_draw(seed, i, *leaf) for i, leaf in leaves])


def _draw(seed: int, i: int, path: tuple[Any, ...], leaf: Any) -> jax.Array:
    kind = path[-1].key
    if kind in ("scale", "bias", "running_mean", "running_var"):
        one = kind in ("scale", "running_var")
        return jax.device_put(np.full(leaf.shape, one, leaf.dtype))
    deviation = 0.02 if kind == "embedding" else math.prod(leaf.shape[:-1]) ** -0.5
    return _normal(seed, i, deviation, leaf.shape, leaf.dtype)


@functools.partial(jax.jit, static_argnums=(3, 4))
def _normal(seed: Any, i: Any, deviation: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    key = jax.random.fold_in(jax.random.key(seed), i)
    return (deviation * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def random_pipeline(folder: Path, *, only: Collection[str] = (), dtype: str = "bfloat16") -> Any:
    """The pipeline of a checkpoint without weights, with random ones.

    only: the networks that get some; the others keep shapes. By default all.
    """
    pipe = ahead.shapes_only(diffusax.DiffusionPipeline, folder, dtype=dtype)
    for seed, (name, shapes) in enumerate(sorted(pipe.params.items())):
        if not only or name in only:
            pipe.params[name] = random_params(shapes, seed=seed)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def call_programs(
    pipe: Any,
    batch: int,
    *,
    mesh: Any = None,
    size: int | tuple[int, int] | None = None,
    **given: Any,
) -> dict[str, Request]:
    """The programs of a call for so many pictures, by name; parameters may be shapes.

    size: pixels of a picture's side, or of its height and width, by default the pipeline's own.
    """
    sides = (size, size) if isinstance(size, int) else size
    call = ahead.example_call(pipe, batch, sides, {"guidance_scale": 7.5, **given})
    found = ahead.requests(pipe.parts, pipe.task, call, mesh)
    return {request.program.name: request for request in found}
