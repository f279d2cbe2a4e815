"""The configs of the transformers in single files, as far as the shapes of their tensors say them.

The values are those of the Hub's repositories: Tongyi-MAI/Z-Image and -Turbo, krea/Krea-2-Raw,
Qwen/Qwen-Image, Qwen/Qwen-Image-2.1, Black Forest Labs' FLUX.1-dev, -schnell, -Fill-dev and
FLUX.2-klein-4B, and Wan-AI's of Wan 2.1 and 2.2.
"""

import math
from collections.abc import Callable
from typing import Any

from diffusax.checkpoints.original.layout import original_modules
from diffusax.checkpoints.original.transformers import ORIGINALS
from diffusax.checkpoints.single_file.contents import Part

Config = dict[str, Any]

_HEAD = 128
_REPOSITORIES = {
    "FluxTransformer2DModel": "black-forest-labs/FLUX.1-dev",
    "Flux2Transformer2DModel": "black-forest-labs/FLUX.2-klein-4B",
    "Krea2Transformer2DModel": "krea/Krea-2-Raw",
    "QwenImage21Transformer2DModel": "Qwen/Qwen-Image-2.1",
    "Flux3Transformer2DModel": "black-forest-labs/flux-3-image-klein-base",
    "QwenImageTransformer2DModel": "Qwen/Qwen-Image",
    "ZImageTransformer2DModel": "Tongyi-MAI/Z-Image-Turbo",
}
_WAN_BY_CHANNELS = {
    36: "Wan-AI/Wan2.2-I2V-A14B-Diffusers",
    48: "Wan-AI/Wan2.2-TI2V-5B-Diffusers",
}
_PLACES = ("img_emb.emb_pos", "image_embedder.pos_embed")
"""The ends of the names of the embeddings of a first and a last image's places."""


def repository(part: Part) -> str:
    """Returns a repository that has the configs and tokenizers for a transformer."""
    if part.class_name == "FluxTransformer2DModel":
        inputs = _shape(part, "x_embedder")
        if inputs is not None and inputs[1:] == (384,):
            return "black-forest-labs/FLUX.1-Fill-dev"
        if _shape(part, "time_text_embed.guidance_embedder.linear_1") is None:
            return "black-forest-labs/FLUX.1-schnell"
    of_flux3 = part.class_name == "Flux3Transformer2DModel"
    if of_flux3 and _shape(part, "target_timestep_embedder.linear_1") is not None:
        return "black-forest-labs/flux-3-image-klein"
    of_qwen_image = part.class_name == "QwenImageTransformer2DModel"
    if of_qwen_image and any(_flags(part).values()):
        return "Qwen/Qwen-Image-Edit-2511"
    if part.class_name == "WanVACETransformer3DModel":
        small = (part.shape("patch_embedding.weight") or ())[:1] == (1536,)
        return f"Wan-AI/Wan2.1-VACE-{'1.3B' if small else '14B'}-diffusers"
    if part.class_name == "WanTransformer3DModel":
        return _wan_repository(part)
    return _REPOSITORIES[part.class_name]


def _wan_repository(part: Part) -> str:
    """Returns a repository of Wan's; the two of 2.2 A14B have the shapes of others of 2.1."""
    width, channels = (part.shape("patch_embedding.weight") or (0, 0))[:2]
    if _shape(part, "condition_embedder.image_embedder.norm1") is not None:
        last = any(name.endswith(_PLACES) for name in part.entries)
        return f"Wan-AI/Wan2.1-{'FLF2V-14B-720P-diffusers' if last else 'I2V-14B-480P-Diffusers'}"
    if channels in _WAN_BY_CHANNELS:
        return _WAN_BY_CHANNELS[channels]
    return f"Wan-AI/Wan2.1-T2V-{'1.3B' if width == 1536 else '14B'}-Diffusers"


def transformer_config(part: Part) -> Config:
    """Returns the config of a transformer.

    Raises:
        ValueError: its tensors are not those of a model that the package has a config for.
    """
    config = _CONFIGS[part.class_name](part)
    if config is None:
        raise ValueError(
            f"{part.path}: the transformer is a {part.class_name} of other widths than any that "
            "the package has a config for; pass config= with the folder of its config.json"
        )
    return {"_class_name": part.class_name, **config}


def _z_image(part: Part) -> Config | None:
    embedder = _shape(part, "all_x_embedder.2-1")
    caption = _shape(part, "cap_embedder.1")
    if not embedder or not caption or _shape(part, "layers.0.attention.norm_q") != (_HEAD,):
        return None
    dim, channels = embedder
    heads = dim // _HEAD
    return {
        "in_channels": channels // 4,
        "dim": dim,
        "n_layers": part.count("layers."),
        "n_refiner_layers": part.count("noise_refiner."),
        "n_heads": heads,
        "n_kv_heads": heads,
        "cap_feat_dim": caption[1],
        "axes_dims": [32, 48, 48],
        "axes_lens": [1536, 512, 512],
    }


def _krea2(part: Part) -> Config | None:
    block, of_text = "transformer_blocks.0", "text_fusion.refiner_blocks.0"
    names = {
        "image": "img_in",
        "time": "time_embed.linear_1",
        "text": "txt_in.linear_1",
        "layers": "text_fusion.projector",
        "head": f"{block}.attn.norm_q",
        "keys": f"{block}.attn.to_k",
        "inner": f"{block}.ff.gate",
        "text_head": f"{of_text}.attn.norm_q",
        "text_keys": f"{of_text}.attn.to_k",
        "text_inner": f"{of_text}.ff.gate",
    }
    found = {key: _shape(part, path) or () for key, path in names.items()}
    if not all(found.values()) or found["head"] != (_HEAD,):
        return None
    (head,), (text_head,) = found["head"], found["text_head"]
    original = part.layout == "original"
    fusion = "txtfusion." if original else "text_fusion."
    return {
        "in_channels": found["image"][1],
        "num_layers": part.count("blocks." if original else "transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": found["image"][0] // head,
        "num_key_value_heads": found["keys"][0] // head,
        "intermediate_size": found["inner"][0],
        "timestep_embed_dim": found["time"][1],
        "text_hidden_dim": found["text"][1],
        "num_text_layers": found["layers"][1],
        "text_num_attention_heads": found["text"][1] // text_head,
        "text_num_key_value_heads": found["text_keys"][0] // text_head,
        "text_intermediate_size": found["text_inner"][0],
        "num_layerwise_text_blocks": part.count(f"{fusion}layerwise_blocks."),
        "num_refiner_text_blocks": part.count(f"{fusion}refiner_blocks."),
        "axes_dims_rope": [32, 48, 48],
        "rope_theta": 1000.0,
    }


def _qwen_image21(part: Part) -> Config | None:
    image, text = _shape(part, "img_in"), _shape(part, "txt_in.in_layer")
    head, out = _shape(part, "transformer_blocks.0.attn.norm_q"), _shape(part, "proj_out")
    inner = _shape(part, "transformer_blocks.0.img_mlp.out")
    if not image or not text or not out or not inner or head != (_HEAD,):
        return None
    return {
        "in_channels": image[1],
        "out_channels": out[0],
        "num_layers": part.count("transformer_blocks."),
        "attention_head_dim": _HEAD,
        "num_attention_heads": image[0] // _HEAD,
        "context_in_dim": text[1],
        "mlp_ratio": inner[1] // inner[0],
        "axes_dims_rope": [16, 56, 56],
    }


def _flux(part: Part) -> Config | None:
    pooled = _shape(part, "time_text_embed.text_embedder.linear_1")
    found = _of_both(part)
    if not pooled or found is None:
        return None
    guidance = _shape(part, "time_text_embed.guidance_embedder.linear_1") is not None
    return {
        **found,
        "pooled_projection_dim": pooled[1],
        "guidance_embeds": guidance,
        "axes_dims_rope": [16, 56, 56],
    }


def _flux2(part: Part) -> Config | None:
    found = _of_both(part)
    times = _shape(part, "time_guidance_embed.timestep_embedder.linear_1")
    inner = _shape(part, "transformer_blocks.0.ff.linear_out")
    if not times or not inner or found is None:
        return None
    guidance = _shape(part, "time_guidance_embed.guidance_embedder.linear_1") is not None
    return {
        **found,
        "timestep_guidance_channels": times[1],
        "mlp_ratio": inner[1] / inner[0],
        "guidance_embeds": guidance,
        "axes_dims_rope": [32] * 4,
        "rope_theta": 2000.0,
    }


def _flux3(part: Part) -> Config | None:
    inputs, seen = _shape(part, "x_embedders.image"), _shape(part, "x_embedders.image_cond")
    text, times = _shape(part, "context_embedder"), _shape(part, "timestep_embedder.linear_1")
    inner = _shape(part, "single_transformer_blocks.0.ff.linear_out")
    head = _shape(part, "single_transformer_blocks.0.attn.norm_q")
    if not inputs or not seen or not text or not times or not inner or head != (_HEAD,):
        return None
    blocks = "single_blocks." if part.layout == "original" else "single_transformer_blocks."
    return {
        "in_channels": inputs[1],
        "cond_in_channels": seen[1],
        "num_layers": part.count("txt_mode_blocks."),
        "num_single_layers": part.count(blocks),
        "attention_head_dim": _HEAD,
        "num_attention_heads": inputs[0] // _HEAD,
        "joint_attention_dim": text[1],
        "timestep_channels": times[1],
        "mlp_ratio": inner[1] / inner[0],
        "axes_dims_rope": [32] * 4,
        "flow_map": _shape(part, "target_timestep_embedder.linear_1") is not None,
    }


def _qwen_image(part: Part) -> Config | None:
    inputs, text, outputs = (_shape(part, path) for path in ("img_in", "txt_in", "proj_out"))
    if not inputs or not text or not outputs:
        return None
    if _shape(part, "transformer_blocks.0.attn.norm_q") != (_HEAD,):
        return None
    return {
        "in_channels": inputs[1],
        "out_channels": outputs[0] // 4,
        "num_layers": part.count("transformer_blocks."),
        "attention_head_dim": _HEAD,
        "num_attention_heads": inputs[0] // _HEAD,
        "joint_attention_dim": text[1],
        "axes_dims_rope": [16, 56, 56],
        **_flags(part),
    }


def _wan(part: Part) -> Config | None:
    patch, out = part.shape("patch_embedding.weight") or (), _shape(part, "proj_out")
    text, times = (
        _shape(part, f"condition_embedder.{name}.linear_1")
        for name in ("text_embedder", "time_embedder")
    )
    inner = _shape(part, "blocks.0.ffn.net.0.proj")
    if len(patch) != 5 or not out or not text or not times or not inner or patch[0] % _HEAD:
        return None
    seen = _shape(part, "condition_embedder.image_embedder.ff.net.0.proj")
    added = _shape(part, "blocks.0.attn2.add_k_proj")
    places = next((part.shape(name) for name in part.entries if name.endswith(_PLACES)), None)
    return {
        "patch_size": list(patch[2:]),
        "num_attention_heads": patch[0] // _HEAD,
        "attention_head_dim": _HEAD,
        "in_channels": patch[1],
        "out_channels": out[0] // math.prod(patch[2:]),
        "text_dim": text[1],
        "freq_dim": times[1],
        "ffn_dim": inner[0],
        "num_layers": part.count("blocks."),
        "cross_attn_norm": _shape(part, "blocks.0.norm2") is not None,
        "image_dim": seen[1] if seen else None,
        "added_kv_proj_dim": added[1] if added else None,
        "pos_embed_seq_len": places[1] if places else None,
    }


def _wan_vace(part: Part) -> Config | None:
    found, shown = _wan(part), part.shape("vace_patch_embedding.weight")
    layers = part.count("vace_blocks.")
    if found is None or not shown or found["num_layers"] % layers:
        return None
    every = range(0, found["num_layers"], found["num_layers"] // layers)
    return {**found, "vace_layers": list(every), "vace_in_channels": shown[1]}


def _flags(part: Part) -> Config:
    """Returns the options that a file has tensors without numbers for."""
    flags = ORIGINALS[part.class_name].flags
    return {option: name in part.entries for name, option in flags.items()}


def _of_both(part: Part) -> Config | None:
    """Returns the options that FLUX.1 and FLUX.2 have in common."""
    inputs, text = _shape(part, "x_embedder"), _shape(part, "context_embedder")
    outputs = _shape(part, "proj_out")
    head = _shape(part, "transformer_blocks.0.attn.norm_q")
    if not inputs or not text or not outputs or head != (_HEAD,):
        return None
    original = part.layout == "original"
    return {
        "in_channels": inputs[1],
        "out_channels": None if outputs[0] == inputs[1] else outputs[0],
        "num_layers": part.count("double_blocks." if original else "transformer_blocks."),
        "num_single_layers": part.count(
            "single_blocks." if original else "single_transformer_blocks."
        ),
        "attention_head_dim": _HEAD,
        "num_attention_heads": inputs[0] // _HEAD,
        "joint_attention_dim": text[1],
    }


def _shape(part: Part, path: str) -> tuple[int, ...] | None:
    """Returns the shape of the weight of a module that has this path in diffusers."""
    if part.layout == "diffusers":
        return part.shape(f"{path}.weight")
    (name,) = original_modules(ORIGINALS[part.class_name], [path])
    return part.shape(f"{name}.weight") or part.shape(f"{name}.scale")


_CONFIGS: dict[str, Callable[[Part], Config | None]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "Krea2Transformer2DModel": _krea2,
    "Flux3Transformer2DModel": _flux3,
    "QwenImage21Transformer2DModel": _qwen_image21,
    "QwenImageTransformer2DModel": _qwen_image,
    "ZImageTransformer2DModel": _z_image,
    "WanTransformer3DModel": _wan,
    "WanVACETransformer3DModel": _wan_vace,
}
