"""Tiny transformers and their pipelines in PyTorch: FLUX.1, FLUX.2 [klein], Krea 2 and Z-Image.

All weights are random, and each has two blocks of each kind or more.
"""

import dataclasses
import json
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from diffusax.models.autoencoders.latents import patchify, unpatchify
from support.processors import qwen2_processor, qwen3_processor
from support.tiny import randomize
from support.tiny_tokenizers import (
    CLIP_TOKENS,
    QWEN_TOKENS,
    T5_TOKENS,
    clip_tokenizer,
    qwen_tokenizer,
    t5_tokenizer,
)

FLUX: dict[str, Any] = {
    "in_channels": 64,
    "num_layers": 2,
    "num_single_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "pooled_projection_dim": 16,
    "axes_dims_rope": (4, 2, 6),
    "guidance_embeds": True,
}
WAN = {
    "num_attention_heads": 2,
    "attention_head_dim": 14,
    "in_channels": 5,
    "out_channels": 4,
    "text_dim": 12,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
WAN_VACE = {"num_layers": 3, "vace_layers": (0, 2), "vace_in_channels": 12}
WAN_SMALL_VAE = {
    "base_dim": 4,
    "z_dim": 4,
    "dim_mult": [1, 2],
    "num_res_blocks": 1,
    "temperal_downsample": [True],
    "latents_mean": [0.1, -0.2, 0.3, 0.0],
    "latents_std": [1.5, 2.0, 0.8, 1.1],
    "scale_factor_temporal": 2,
    "scale_factor_spatial": 2,
}
WAN_SCHEDULE = {
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "num_train_timesteps": 1000,
    "flow_shift": 3.0,
}


def flux_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer of PyTorch."""
    network = diffusers.FluxTransformer2DModel(**{**FLUX, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class FluxInputs:
    """What the network reads: an image's tokens b t c with its rows and columns, and a text's.

    text: b s d. pooled: b p. times and scales: b, of noise and guidance.
    """

    tokens: np.ndarray
    size: tuple[int, int]
    text: np.ndarray
    pooled: np.ndarray
    times: np.ndarray
    scales: np.ndarray

    @property
    def ids(self) -> tuple[np.ndarray, np.ndarray]:
        """The positions of the text's and of the image's tokens, n 3 each."""
        rows, columns = np.indices(self.size).reshape(2, -1)
        image = np.stack([np.zeros_like(rows), rows, columns], axis=-1)
        return np.zeros((self.text.shape[1], 3)), image.astype(np.float32)


def flux_inputs(
    b: int = 2,
    size: tuple[int, int] = (3, 5),
    text: int = 7,
    channels: int = 64,
    *,
    text_width: int = 20,
    pooled_width: int = 16,
) -> FluxInputs:
    """Random inputs for the network."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return FluxInputs(
        normal(b, size[0] * size[1], channels),
        size,
        normal(b, text, text_width),
        normal(b, pooled_width),
        np.linspace(0.2, 0.9, b, dtype=np.float32),
        np.linspace(1.0, 3.5, b, dtype=np.float32),
    )


def flux_arguments(
    given: FluxInputs, dtype: Any = torch.float32, *, guided: bool = True
) -> dict[str, Any]:
    """The inputs as arguments of PyTorch's network."""
    text_ids, image_ids = given.ids
    found = {
        "hidden_states": given.tokens,
        "encoder_hidden_states": given.text,
        "pooled_projections": given.pooled,
        "timestep": given.times,
        "guidance": given.scales if guided else None,
    }
    tensors = {k: None if v is None else torch.tensor(v, dtype=dtype) for k, v in found.items()}
    return {**tensors, "txt_ids": torch.tensor(text_ids), "img_ids": torch.tensor(image_ids)}


def upstream_flux(network: Any, given: FluxInputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction, b t d."""
    call = flux_arguments(given, dtype, guided=network.config.guidance_embeds)
    with torch.no_grad():
        return network(**call).sample.float().numpy()


FLUX_VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 16,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
    "mid_block_add_attention": False,
    "sample_size": 64,
}
"""Z-Image's, too."""
FLUX_CLIP: dict[str, Any] = {
    "vocab_size": len(CLIP_TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": len(CLIP_TOKENS) - 2,
    "eos_token_id": len(CLIP_TOKENS) - 1,
    "pad_token_id": len(CLIP_TOKENS) - 1,
}
FLUX_T5: dict[str, Any] = {
    "vocab_size": len(T5_TOKENS),
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
FLUX_SCHEDULE: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 8,
    "max_image_seq_len": 100,
}
"""FLUX.1-dev's, with its shifts for other numbers of tokens; schnell's is {"shift": 1.0}."""
FLUX_SIZE = {"height": 24, "width": 40, "max_sequence_length": 32}
"""Of 60 tokens."""


FLUX_FILL: dict[str, Any] = {"in_channels": 4 * (16 + 16 + 4), "out_channels": 64}
"""What differs in a transformer that sees a mask and the rest of an image."""


def flux_components(
    seed: int = 3, schedule: dict[str, Any] = FLUX_SCHEDULE, **changes: Any
) -> dict[str, Any]:
    """The components of a tiny pipeline of PyTorch. changes: of the transformer's config."""
    clip = transformers.CLIPTextModel(transformers.CLIPTextConfig(**FLUX_CLIP))
    t5 = transformers.T5EncoderModel(transformers.T5Config(**FLUX_T5))
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**schedule),
        "vae": randomize(diffusers.AutoencoderKL(**FLUX_VAE), 1).requires_grad_(False),
        "text_encoder": randomize(clip, 2).requires_grad_(False),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": randomize(t5, 4).requires_grad_(False),
        "tokenizer_2": t5_tokenizer(),
        "transformer": flux_transformer(seed, **changes),
    }


def flux_pipeline(folder: Any, name: str = "FluxPipeline", **changes: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`. changes: see `components`."""
    pipe = getattr(diffusers, name)(**flux_components(**changes))
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def flux_controlnet(seed: int = 5, **changes: Any) -> Any:
    """A ControlNet of PyTorch with fewer blocks than the transformer."""
    config = {**FLUX, "num_layers": 1, "num_single_layers": 2, **changes}
    return randomize(diffusers.FluxControlNetModel(**config), seed).requires_grad_(False)


KLEIN_VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "mid_block_add_attention": False,
    "sample_size": 64,
}


def klein_autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder with statistics of its latents that differ between channels."""
    vae = randomize(diffusers.AutoencoderKLFlux2(**{**KLEIN_VAE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.normal_(std=0.3, generator=generator)
    vae.bn.running_var.uniform_(0.5, 2.0, generator=generator)
    return vae.requires_grad_(False)


KLEIN: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_guidance_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
    "guidance_embeds": False,
}


def klein_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer whose blocks all have weights of their own."""
    network = diffusers.Flux2Transformer2DModel(**{**KLEIN, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class KleinInputs:
    """Two images with latents b h w c, times b, texts b s d, scales b, and two references."""

    latents: np.ndarray
    times: np.ndarray
    text: np.ndarray
    scales: np.ndarray
    references: tuple[np.ndarray, ...] = ()

    @property
    def tokens(self) -> np.ndarray:
        """All images' tokens, b t c."""
        maps = self.latents, *self.references
        return np.concatenate([x.reshape(2, -1, x.shape[-1]) for x in maps], axis=1)

    def arguments(self) -> dict[str, Any]:
        """The arguments of diffusers' call."""
        pipe = diffusers.Flux2KleinPipeline
        text, latents = torch.tensor(self.text), torch.tensor(self.latents.transpose(0, 3, 1, 2))
        ids = pipe._prepare_latent_ids(latents)
        if self.references:
            maps = [torch.tensor(x[:1].transpose(0, 3, 1, 2)) for x in self.references]
            ids = torch.cat([ids, pipe._prepare_image_ids(maps).expand(2, -1, -1)], dim=1)
        return {
            "hidden_states": torch.tensor(self.tokens),
            "encoder_hidden_states": text,
            "timestep": torch.tensor(self.times),
            "img_ids": ids,
            "txt_ids": pipe._prepare_text_ids(text),
            "guidance": torch.tensor(self.scales),
        }


def klein_inputs(*references: tuple[int, int], size: tuple[int, int] = (3, 5)) -> KleinInputs:
    """Random inputs for the network. references: the rows and columns of each."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times, scales = np.array([0.3, 0.9], np.float32), np.array([3.5, 1.5], np.float32)
    maps = tuple(normal(2, *shape, 16) for shape in references)
    return KleinInputs(normal(2, *size, 16), times, normal(2, 7, 48), scales, maps)


def upstream_klein(network: Any, given: KleinInputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction for the images, b h w c."""
    call = given.arguments()
    # Positions and times stay as they are; the network casts the times itself.
    for name in ("hidden_states", "encoder_hidden_states"):
        call[name] = call[name].to(dtype)
    with torch.no_grad():
        y = network(**call).sample.float().numpy()
    rows, columns = given.latents.shape[1:3]
    return y[:, : rows * columns].reshape(2, rows, columns, -1)


KLEIN_CHAT = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Qwen3's template as far as a prompt goes: an answer without thoughts begins with empty ones."""
KLEIN_LANGUAGE: dict[str, Any] = {
    "vocab_size": len(QWEN_TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
KLEIN_SIZE = {"height": 24, "width": 40}
"""Of 6x10 latents, which are tokens."""
KLEIN_CALL = {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 64, **KLEIN_SIZE}
"""What makes calls of tiny checkpoints quick; their language model has four layers."""
KLEIN_SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True}


def klein_pipeline(
    folder: Any, layers: int = 4, is_distilled: bool = False, **scheduler: Any
) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`.

    layers: those of the language model; 28 for calls with the default text_encoder_out_layers.
    """
    language = transformers.Qwen3Config(**{**KLEIN_LANGUAGE, "num_hidden_layers": layers})
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{**KLEIN_SCHEDULER, **scheduler}),
        vae=klein_autoencoder(),
        text_encoder=randomize(transformers.Qwen3ForCausalLM(language), 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(chat_template=KLEIN_CHAT),
        transformer=klein_transformer(3),
        is_distilled=is_distilled,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


Z_IMAGE: dict[str, Any] = {
    "in_channels": 16,
    "dim": 48,
    "n_layers": 3,
    "n_refiner_layers": 2,
    "n_heads": 2,
    "n_kv_heads": 2,
    "cap_feat_dim": 24,
    "axes_dims": [12, 8, 4],
    "axes_lens": [600, 32, 32],
}
Z_IMAGE_LANGUAGE: dict[str, Any] = {
    "vocab_size": len(QWEN_TOKENS),
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def z_image_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer with other learned tokens than zeros, and times that differ between steps."""
    network = randomize(diffusers.ZImageTransformer2DModel(**{**Z_IMAGE, **changes}), seed)
    return network.requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class ZImageInputs:
    """Latents b c h w, times b from 0 to 1, and captions of different lengths, t d each."""

    latents: np.ndarray
    times: np.ndarray
    captions: list[np.ndarray]

    @property
    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """The captions b s d, filled up with what must change nothing, and their lengths, b."""
        longest = max(map(len, self.captions)) + 5
        filled = [np.pad(c, ((0, longest - len(c)), (0, 0)), "edge") for c in self.captions]
        return np.stack(filled), np.array([len(c) for c in self.captions], np.int32)


def z_image_inputs(
    lengths: tuple[int, ...], size: tuple[int, int] = (6, 10), width: int = 24
) -> ZImageInputs:
    """Random inputs for the network, one image for each length."""
    rng = np.random.default_rng(3)
    latents = rng.standard_normal((len(lengths), 16, *size)).astype(np.float32)
    captions = [rng.standard_normal((n, width)).astype(np.float32) for n in lengths]
    return ZImageInputs(latents, np.linspace(0.1, 0.9, len(lengths), dtype=np.float32), captions)


def upstream_z_image(network: Any, given: ZImageInputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction, b c h w."""
    latents = [torch.tensor(x, dtype=dtype)[:, None] for x in given.latents]
    captions = [torch.tensor(c, dtype=dtype) for c in given.captions]
    with torch.no_grad():
        sample = network(latents, torch.tensor(given.times), captions).sample
    return torch.stack(sample)[:, :, 0].float().numpy()


Z_IMAGE_SIZE = {"height": 24, "width": 40}
"""Of 60 tokens, which are filled up to 64."""


def z_image_pipeline(folder: Any, **scheduler: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`."""
    language = transformers.Qwen3Config(**Z_IMAGE_LANGUAGE)
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=randomize(diffusers.AutoencoderKL(**FLUX_VAE), 1).requires_grad_(False),
        text_encoder=randomize(transformers.Qwen3Model(language), 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(),
        transformer=z_image_transformer(3),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


QWEN_IMAGE_VAE: dict[str, Any] = {
    "base_dim": 8,
    "z_dim": 4,
    "dim_mult": [1, 1, 2, 2],
    "num_res_blocks": 1,
    "latents_mean": [0.1, -0.3, 0.2, 0.0],
    "latents_std": [1.3, 0.8, 1.1, 0.6],
}


def qwen_image_autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder of videos."""
    vae = diffusers.AutoencoderKLQwenImage(**{**QWEN_IMAGE_VAE, **changes})
    return randomize(vae, seed).requires_grad_(False)


WAN_VAE: dict[str, Any] = {k: v for k, v in QWEN_IMAGE_VAE.items() if k != "dim_mult"}
WAN_VAE |= {"dim_mult": [1, 2, 2, 1]}
WAN22_VAE: dict[str, Any] = {
    "base_dim": 4,
    "decoder_base_dim": 6,
    "z_dim": 6,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [False, True, True],
    "is_residual": True,
    "in_channels": 12,
    "out_channels": 12,
    "patch_size": 2,
    "scale_factor_spatial": 16,
    "latents_mean": [0.1, -0.3, 0.2, 0.0, 0.5, -0.4],
    "latents_std": [1.3, 0.8, 1.1, 0.6, 1.7, 0.9],
}


def wan_autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder of videos, Wan 2.1's; Wan 2.2's with the options of `WAN22_VAE`."""
    vae = diffusers.AutoencoderKLWan(**{**WAN_VAE, **changes})
    return randomize(vae, seed).requires_grad_(False)


KREA2: dict[str, Any] = {
    "in_channels": 16,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "timestep_embed_dim": 32,
    "text_hidden_dim": 24,
    "num_text_layers": 3,
    "text_num_attention_heads": 4,
    "text_num_key_value_heads": 2,
    "text_intermediate_size": 32,
    "num_layerwise_text_blocks": 2,
    "num_refiner_text_blocks": 2,
    "axes_dims_rope": (4, 2, 6),
}


def krea2_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer whose norms, which multiply by one more than their weights, are near one."""
    network = randomize(diffusers.Krea2Transformer2DModel(**{**KREA2, **changes}), seed)
    for name, parameter in network.named_parameters():
        if "norm" in name:
            parameter.data -= 1
        elif name.endswith("scale_shift_table"):
            parameter.data *= 0.3
    return network.requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Krea2Inputs:
    """Latents b h w c, times b, and texts of different lengths, s l d each."""

    latents: np.ndarray
    times: np.ndarray
    texts: list[np.ndarray]

    @property
    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """The texts b s l d, with padding after them that must change nothing; their lengths, b."""
        longest = max(map(len, self.texts)) + 5
        axes = (0, 0), (0, 0)
        filled = [np.pad(x, ((0, longest - len(x)), *axes), "edge") for x in self.texts]
        return np.stack(filled), np.array(list(map(len, self.texts)), np.int32)

    @property
    def padded_inside(self) -> tuple[np.ndarray, np.ndarray]:
        """The texts b s l d, with padding before their last tokens; which tokens are none, b s."""
        longest = max(map(len, self.texts)) + 4
        text = np.full((len(self.texts), longest, *self.texts[0].shape[1:]), 7, np.float32)
        mask = np.zeros((len(self.texts), longest), bool)
        for i, own in enumerate(self.texts):
            first = len(own) - 2
            text[i, :first], text[i, -2:] = own[:first], own[first:]
            mask[i, :first], mask[i, -2:] = True, True
        return text, mask

    def arguments(self, dtype: Any = torch.float32) -> dict[str, Any]:
        """The arguments of diffusers' call, whose text has its padding inside."""
        b, h, w, c = self.latents.shape
        maps = torch.tensor(self.latents.transpose(0, 3, 1, 2))
        tokens = maps.view(b, c, h // 2, 2, w // 2, 2).permute(0, 2, 4, 1, 3, 5)
        text, mask = self.padded_inside
        return {
            "hidden_states": tokens.reshape(b, (h // 2) * (w // 2), 4 * c).to(dtype),
            "encoder_hidden_states": torch.tensor(text, dtype=dtype),
            "timestep": torch.tensor(self.times, dtype=dtype),
            "position_ids": diffusers.Krea2Pipeline.prepare_position_ids(
                text.shape[1], h // 2, w // 2, torch.device("cpu")
            ),
            "encoder_attention_mask": torch.tensor(mask),
        }


def krea2_inputs(
    lengths: tuple[int, ...],
    size: tuple[int, int] = (6, 10),
    channels: int = 4,
    layers: tuple[int, int] = (3, 24),
) -> Krea2Inputs:
    """Random inputs for the network, one image for each length; layers of a text, of a width."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times = np.linspace(0.3, 0.9, len(lengths), dtype=np.float32)
    texts = [normal(n, *layers) for n in lengths]
    return Krea2Inputs(normal(len(lengths), *size, channels), times, texts)


def upstream_krea2(network: Any, given: Krea2Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction, b h w c."""
    with torch.no_grad():
        y = network(**given.arguments(dtype)).sample.float().numpy()
    b, h, w, c = given.latents.shape
    maps = y.reshape(b, h // 2, w // 2, c, 2, 2).transpose(0, 1, 4, 2, 5, 3)
    return maps.reshape(b, h, w, c)


KREA2_LANGUAGE: dict[str, Any] = {
    "text_config": {
        "vocab_size": len(QWEN_TOKENS),
        "hidden_size": 24,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [3, 3, 2],
            "mrope_interleaved": True,
        },
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 24,
        "num_position_embeddings": 25,
        "deepstack_visual_indexes": [0],
    },
    "image_token_id": QWEN_TOKENS.index("<|image_pad|>"),
    "video_token_id": QWEN_TOKENS.index("<|video_pad|>"),
    "vision_start_token_id": QWEN_TOKENS.index("<|vision_start|>"),
    "vision_end_token_id": QWEN_TOKENS.index("<|vision_end|>"),
}
KREA2_SIZE = {"height": 24, "width": 40, "max_sequence_length": 240}
"""Of 6x10 tokens. Each byte of the chat around a prompt is a token, and all but 34 are read."""
KREA2_SCHEDULE: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 20,
    "max_image_seq_len": 1000,
}
"""Krea 2's, with its shifts for other numbers of tokens."""


def krea2_pipeline(folder: Any, is_distilled: bool = False, **scheduler: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`."""
    language = transformers.Qwen3VLConfig(**KREA2_LANGUAGE)
    pipe = diffusers.Krea2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{**KREA2_SCHEDULE, **scheduler}),
        vae=qwen_image_autoencoder(dim_mult=[1, 2], temperal_downsample=[True]),
        text_encoder=randomize(transformers.Qwen3VLModel(language), 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(),
        transformer=krea2_transformer(3),
        text_encoder_select_layers=(1, 3, 2),
        is_distilled=is_distilled,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


QWEN_IMAGE: dict[str, Any] = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 2,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "joint_attention_dim": 20,
    "axes_dims_rope": (4, 2, 6),
}


def qwen_image_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer of PyTorch."""
    network = diffusers.QwenImageTransformer2DModel(**{**QWEN_IMAGE, **changes})
    return randomize(network, seed).requires_grad_(False)


QWEN_IMAGE_LANGUAGE: dict[str, Any] = {
    "text_config": {
        "vocab_size": len(QWEN_TOKENS),
        "hidden_size": 20,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 2, 2]},
    },
    "vision_config": {
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "patch_size": 14,
        "out_hidden_size": 20,
        "window_size": 56,
        "fullatt_block_indexes": [1],
    },
    **{
        f"{name}_token_id": QWEN_TOKENS.index(f"<|{token}|>")
        for name, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    },
}
QWEN_IMAGE_SCHEDULE: dict[str, Any] = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 20,
    "max_image_seq_len": 1000,
    "shift_terminal": 0.02,
}
"""Qwen-Image's, with its shifts for other numbers of tokens."""


def qwen_image_pipeline(
    folder: Any, kind: str = "QwenImagePipeline", zero_cond_t: bool = False, **scheduler: Any
) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`. kind: its class."""
    more = {"processor": qwen2_processor(most=8)} if "Edit" in kind else {}
    language = transformers.Qwen2_5_VLConfig(**QWEN_IMAGE_LANGUAGE)
    reader = transformers.Qwen2_5_VLForConditionalGeneration(language)
    pipe = getattr(diffusers, kind)(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{**QWEN_IMAGE_SCHEDULE, **scheduler}),
        vae=qwen_image_autoencoder(dim_mult=[1, 2], temperal_downsample=[True]),
        text_encoder=randomize(reader, 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(),
        transformer=qwen_image_transformer(3, zero_cond_t=zero_cond_t),
        **more,
    )
    pipe.set_progress_bar_config(disable=True)
    if more:
        _save_with_processor(pipe, folder, "Qwen2VLProcessor")
    else:
        pipe.save_pretrained(folder)
    return pipe


@dataclasses.dataclass(frozen=True)
class QwenImageInputs:
    """Latents b h w c, times b, texts s d of different lengths, and further images b h w c."""

    latents: np.ndarray
    times: np.ndarray
    texts: list[np.ndarray]
    references: list[np.ndarray]

    @property
    def padded(self) -> tuple[np.ndarray, np.ndarray]:
        """The texts b s d, with padding after them that must change nothing; their lengths, b."""
        longest = max(map(len, self.texts)) + 5
        filled = [np.pad(x, ((0, longest - len(x)), (0, 0)), "edge") for x in self.texts]
        return np.stack(filled), np.array(list(map(len, self.texts)), np.int32)

    def arguments(self, dtype: Any = torch.float32) -> dict[str, Any]:
        """The arguments of diffusers' call."""
        images, (text, lengths) = [self.latents, *self.references], self.padded
        shapes = [(1, x.shape[1] // 2, x.shape[2] // 2) for x in images]
        mask = np.arange(text.shape[1]) < lengths[:, None]
        tokens = [np.asarray(patchify(x, 2, channels_first=True)) for x in images]
        return {
            "hidden_states": torch.tensor(np.concatenate(tokens, axis=1), dtype=dtype),
            "encoder_hidden_states": torch.tensor(text, dtype=dtype),
            "encoder_hidden_states_mask": torch.tensor(mask),
            "timestep": torch.tensor(self.times, dtype=dtype),
            "img_shapes": [shapes] * len(text),
        }


def qwen_image_inputs(
    lengths: tuple[int, ...],
    size: tuple[int, int] = (6, 10),
    *looked_at: tuple[int, int],
    channels: int = 4,
    width: int = 20,
) -> QwenImageInputs:
    """Random inputs for the network, one row for each length. looked_at: sizes of images."""
    rng, b = np.random.default_rng(3), len(lengths)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times = np.linspace(0.3, 0.9, b, dtype=np.float32)
    texts = [normal(n, width) for n in lengths]
    images = [normal(b, *shape, channels) for shape in looked_at]
    return QwenImageInputs(normal(b, *size, channels), times, texts, images)


def upstream_qwen_image(
    network: Any, given: QwenImageInputs, dtype: Any = torch.float32
) -> np.ndarray:
    """PyTorch's prediction, b h w c."""
    _, h, w, _ = given.latents.shape
    y = network(**given.arguments(dtype)).sample[:, : h * w // 4].float().numpy()
    return np.asarray(unpatchify(y, 2, h, w, channels_first=True))


QWEN_IMAGE21_VAE: dict[str, Any] = {
    "base_dim": 4,
    "decoder_base_dim": 6,
    "z_dim": 6,
    "dim_mult": [1, 2, 4, 4],
    "num_res_blocks": 2,
    "temperal_downsample": [False, True, True],
    "scale_factor_spatial": 8,
    "latents_mean": [0.1, -0.3, 0.2, 0.0, 0.5, -0.4],
    "latents_std": [1.3, 0.8, 1.1, 0.6, 1.7, 0.9],
}


def qwen_image21_autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder of images with an opacity."""
    vae = diffusers.AutoencoderKLQwenImage21(**{**QWEN_IMAGE21_VAE, **changes})
    return randomize(vae, seed).requires_grad_(False)


QWEN_IMAGE21: dict[str, Any] = {
    "in_channels": 6,
    "out_channels": 6,
    "num_layers": 3,
    "attention_head_dim": 12,
    "num_attention_heads": 2,
    "context_in_dim": 20,
    "mlp_ratio": 3,
    "axes_dims_rope": (4, 2, 6),
}


QWEN_IMAGE21_LANGUAGE: dict[str, Any] = {
    **KREA2_LANGUAGE,
    "text_config": {
        **KREA2_LANGUAGE["text_config"],
        "hidden_size": 20,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
    },
    "vision_config": {
        **KREA2_LANGUAGE["vision_config"],
        "out_hidden_size": 20,
        "patch_size": 16,
        "depth": 2,
        "deepstack_visual_indexes": [0, 1],
    },
}


def qwen_image21_pipeline(folder: Any, sigmas: Any = None, **scheduler: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`."""
    language = transformers.Qwen3VLConfig(**QWEN_IMAGE21_LANGUAGE)
    reader = transformers.Qwen3VLForConditionalGeneration(language)
    vae = {"dim_mult": [1, 1, 2, 2, 2], "temperal_downsample": [False, True, True, True]}
    pipe = diffusers.QwenImage21Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{**KREA2_SCHEDULE, **scheduler}),
        vae=qwen_image21_autoencoder(scale_factor_spatial=16, **vae),
        text_encoder=randomize(reader, 2).requires_grad_(False),
        processor=qwen3_processor(most=8),
        transformer=qwen_image21_transformer(3),
        sample_sigmas=sigmas,
    )
    pipe.set_progress_bar_config(disable=True)
    _save_with_processor(pipe, folder, "Qwen3VLProcessor", sample_sigmas=sigmas)
    return pipe


def _save_with_processor(pipe: Any, folder: Any, kind: str, **options: Any) -> None:
    """Saves a pipeline; its processor, which lacks the part for videos, in its parts.

    kind: the processor's class. options: those in the index.
    """
    index = {"_class_name": type(pipe).__name__, **options}
    for name, part in pipe.components.items():
        part = part.tokenizer if name == "processor" else part
        part.save_pretrained(folder / name)
        library = "diffusers" if name in ("scheduler", "transformer", "vae") else "transformers"
        index[name] = [library, type(part).__name__]
    pipe.processor.image_processor.save_pretrained(folder / "processor")
    index["processor"] = ["transformers", kind]
    (folder / "model_index.json").write_text(json.dumps(index))


def qwen_image21_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer of PyTorch, whose norm of the text multiplies by one and the weight."""
    network = diffusers.QwenImage21Transformer2DModel(**{**QWEN_IMAGE21, **changes})
    network = randomize(network, seed).requires_grad_(False)
    network.txt_in.text_norm.weight -= 1
    return network


def wan_transformer(seed: int = 1, **changes: Any) -> Any:
    """A random transformer of Wan."""
    own = {"in_channels": 4, "text_dim": 24, **changes}
    return randomize(diffusers.WanTransformer3DModel(**{**WAN, **own}), seed)


def wan_vace_transformer(seed: int = 6, **changes: Any) -> Any:
    """A random transformer of Wan's VACE, for latents of 4 channels and 2x2 pixels."""
    own = {"in_channels": 4, "text_dim": 24, **WAN_VACE, **changes}
    return randomize(diffusers.WanVACETransformer3DModel(**{**WAN, **own}), seed)


def wan_image_components(*, places: int | None = None) -> dict[str, Any]:
    """What a pipeline of image to video has of its own: a transformer and what reads images.

    places: the tokens of a first and a last image that have embeddings of their places.
    """
    config = transformers.CLIPVisionConfig(
        hidden_size=12,
        intermediate_size=20,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=16,
        patch_size=8,
    )
    read = {"image_dim": 12, "added_kv_proj_dim": 28, "pos_embed_seq_len": places}
    return {
        "transformer": wan_transformer(4, in_channels=10, **read),
        "image_encoder": randomize(transformers.CLIPVisionModel(config), 5),
        "image_processor": transformers.CLIPImageProcessorPil(
            size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}
        ),
    }


def wan_pipeline(folder: Any, kind: str = "WanPipeline", **changes: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`. changes: of its components."""
    text = {
        "d_model": 24,
        "d_kv": 8,
        "d_ff": 40,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
        "vocab_size": len(T5_TOKENS),
    }
    vae = diffusers.AutoencoderKLWan(**WAN_SMALL_VAE)
    pipe = getattr(diffusers, kind)(
        tokenizer=t5_tokenizer(),
        text_encoder=randomize(transformers.UMT5EncoderModel(transformers.UMT5Config(**text)), 2),
        scheduler=diffusers.UniPCMultistepScheduler(**WAN_SCHEDULE),
        **{"transformer": wan_transformer(), "vae": randomize(vae, 3), **changes},
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
