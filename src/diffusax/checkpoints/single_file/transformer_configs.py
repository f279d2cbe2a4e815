"""The configs of the transformers in single files, as far as the shapes of their tensors say them.

The values are those of the Hub's repositories: Tongyi-MAI/Z-Image and -Turbo, krea/Krea-2-Raw,
Qwen/Qwen-Image, Qwen/Qwen-Image-2.1 and Black Forest Labs' FLUX.1-dev, -schnell, -Fill-dev and
FLUX.2-klein-4B, with their text encoders.
"""

from collections.abc import Callable
from typing import Any

from diffusax.checkpoints.original.layout import original_modules
from diffusax.checkpoints.original.transformers import ORIGINALS
from diffusax.checkpoints.single_file.contents import Part
from diffusax.models.autoencoders.qwen_image import AutoencoderKLQwenImageConfig
from diffusax.models.autoencoders.qwen_image21 import AutoencoderKLQwenImage21Config

Config = dict[str, Any]

_WIDTHS = [128, 256, 512, 512]
_T5_XXL: Config = {
    "architectures": ["T5EncoderModel"],
    "vocab_size": 32128,
    "d_model": 4096,
    "d_kv": 64,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
_QWEN3: Config = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151936,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1e6,
}
_QWEN3_INNER = {(2560,): 9728, (4096,): 12288}
"""The inner channels of the feed-forward layers of Qwen3-4B and 8B, by its width."""
_QWEN3_VL: Config = {**_QWEN3, "max_position_embeddings": 262144, "rope_theta": 5e6}
_DEEP = {24: [5, 11, 17], 27: [8, 16, 24]}
"""The blocks of Qwen3-VL's vision network, by how many there are, that the language model reads."""
_HEAD = 128
_QWEN_IMAGE, _QWEN_IMAGE21 = AutoencoderKLQwenImageConfig(), AutoencoderKLQwenImage21Config()
_REPOSITORIES = {
    "FluxTransformer2DModel": "black-forest-labs/FLUX.1-dev",
    "Flux2Transformer2DModel": "black-forest-labs/FLUX.2-klein-4B",
    "Krea2Transformer2DModel": "krea/Krea-2-Raw",
    "QwenImage21Transformer2DModel": "Qwen/Qwen-Image-2.1",
    "Flux3Transformer2DModel": "black-forest-labs/flux-3-image-klein-base",
    "QwenImageTransformer2DModel": "Qwen/Qwen-Image",
    "ZImageTransformer2DModel": "Tongyi-MAI/Z-Image-Turbo",
}


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
    return _REPOSITORIES[part.class_name]


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


def flux2_autoencoder(part: Part) -> Config:
    """Returns the config of FLUX.2's autoencoder, of which there is one with a smaller decoder."""
    levels = range(4)
    kind = "block.0.conv2" if part.layout == "original" else "resnets.0.conv2"
    start = "decoder.up" if part.layout == "original" else "decoder.up_blocks"
    shapes = [part.shape(f"{start}.{i}.{kind}.weight") for i in levels]
    widths = [shape[0] for shape in shapes if shape]
    # diffusers counts the decoder's levels from the smallest maps on.
    widths = widths if part.layout == "original" else widths[::-1]
    decoder = {} if widths == _WIDTHS else {"decoder_block_out_channels": widths}
    return {
        "_class_name": "AutoencoderKLFlux2",
        "block_out_channels": _WIDTHS,
        "latent_channels": 32,
        "batch_norm_eps": 1e-4,
        **decoder,
    }


def qwen_image_autoencoder(part: Part) -> Config | None:
    """Returns the config of Qwen-Image's autoencoders; None for one with other latents."""
    original, second = part.layout == "original", part.class_name == "AutoencoderKLQwenImage21"
    latents = part.shape("conv2.weight" if original else "post_quant_conv.weight")
    width = part.shape("decoder.head.0.gamma" if original else "decoder.norm_out.gamma")
    images = part.shape(f"decoder.{'head.2' if original else 'conv_out'}.weight")
    known = _QWEN_IMAGE21 if second else _QWEN_IMAGE
    if not latents or not width or not images or latents[0] != len(known.latents_mean):
        return None
    if second:
        first = part.shape(f"encoder.{'conv1' if original else 'conv_in'}.weight") or (0, 0)
        return {
            "_class_name": part.class_name,
            "base_dim": first[0],
            "decoder_base_dim": width[0],
            "z_dim": latents[0],
            "in_channels": first[1],
            "out_channels": images[0],
        }
    return {
        "_class_name": part.class_name,
        "base_dim": width[0],
        "z_dim": latents[0],
        "input_channels": images[0],
    }


def text_encoder_config(part: Part) -> Config | None:
    """Returns the config of T5-XXL, or of Qwen3 or Qwen3-VL of 4 or 8 billion parameters; None for
    others.
    """
    if part.shape("shared.weight") == (32128, 4096):
        return _T5_XXL
    inner = "language_model." if part.shape("model.language_model.norm.weight") else ""
    width, size = (part.shape(f"model.{inner}{name}.weight") for name in ("embed_tokens", "norm"))
    if width != (151936, *(size or ())) or size not in _QWEN3_INNER:
        return None
    own = {
        "hidden_size": size[0],
        "intermediate_size": _QWEN3_INNER[size],
        "tie_word_embeddings": part.shape("lm_head.weight") is None,
    }
    vision = _qwen3_vision(part)
    if not inner and vision is None:
        return {**_QWEN3, **own}
    return {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "text_config": {k: v for k, v in {**_QWEN3_VL, **own}.items() if k != "architectures"},
        "vision_config": vision,
        "tie_word_embeddings": own["tie_word_embeddings"],
    }


def _qwen3_vision(part: Part) -> Config | None:
    """Returns the config of Qwen3-VL's vision network; None where a file has none."""
    names = ("model.visual.", "visual.")
    start = next((name for name in names if part.shape(f"{name}pos_embed.weight")), None)
    if start is None:
        return None
    depth, places = _count(part, f"{start}blocks."), part.shape(f"{start}pos_embed.weight")
    inner = part.shape(f"{start}blocks.0.mlp.linear_fc1.weight")
    out = part.shape(f"{start}merger.linear_fc2.weight")
    if not inner or not out or not places or depth not in _DEEP:
        return None
    return {
        "depth": depth,
        "hidden_size": inner[1],
        "intermediate_size": inner[0],
        "out_hidden_size": out[0],
        "num_position_embeddings": places[0],
        "deepstack_visual_indexes": _DEEP[depth],
    }


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
        "n_layers": _count(part, "layers."),
        "n_refiner_layers": _count(part, "noise_refiner."),
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
        "num_layers": _count(part, "blocks." if original else "transformer_blocks."),
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
        "num_layerwise_text_blocks": _count(part, f"{fusion}layerwise_blocks."),
        "num_refiner_text_blocks": _count(part, f"{fusion}refiner_blocks."),
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
        "num_layers": _count(part, "transformer_blocks."),
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
        "num_layers": _count(part, "txt_mode_blocks."),
        "num_single_layers": _count(part, blocks),
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
        "num_layers": _count(part, "transformer_blocks."),
        "attention_head_dim": _HEAD,
        "num_attention_heads": inputs[0] // _HEAD,
        "joint_attention_dim": text[1],
        "axes_dims_rope": [16, 56, 56],
        **_flags(part),
    }


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
        "num_layers": _count(part, "double_blocks." if original else "transformer_blocks."),
        "num_single_layers": _count(
            part, "single_blocks." if original else "single_transformer_blocks."
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


def _count(part: Part, start: str) -> int:
    """Returns the number of blocks whose tensors' names begin so."""
    return len({n[len(start) :].split(".")[0] for n in part.entries if n.startswith(start)})


_CONFIGS: dict[str, Callable[[Part], Config | None]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux2,
    "Krea2Transformer2DModel": _krea2,
    "Flux3Transformer2DModel": _flux3,
    "QwenImage21Transformer2DModel": _qwen_image21,
    "QwenImageTransformer2DModel": _qwen_image,
    "ZImageTransformer2DModel": _z_image,
}
