"""Tiny FLUX.1 networks of PyTorch with all weights random, two blocks of each kind and more."""

import dataclasses
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from support.tiny import randomize
from support.torch_families.tokenizers import CLIP_TOKENS, T5_TOKENS, clip_tokenizer, t5_tokenizer

TRANSFORMER: dict[str, Any] = {
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


def transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer of PyTorch."""
    network = diffusers.FluxTransformer2DModel(**{**TRANSFORMER, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Inputs:
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


def inputs(
    b: int = 2,
    size: tuple[int, int] = (3, 5),
    text: int = 7,
    channels: int = 64,
    *,
    text_width: int = 20,
    pooled_width: int = 16,
) -> Inputs:
    """Random inputs for the network."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    return Inputs(
        normal(b, size[0] * size[1], channels),
        size,
        normal(b, text, text_width),
        normal(b, pooled_width),
        np.linspace(0.2, 0.9, b, dtype=np.float32),
        np.linspace(1.0, 3.5, b, dtype=np.float32),
    )


def arguments(given: Inputs, dtype: Any = torch.float32, *, guided: bool = True) -> dict[str, Any]:
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


def upstream(network: Any, given: Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction, b t d."""
    call = arguments(given, dtype, guided=network.config.guidance_embeds)
    with torch.no_grad():
        return network(**call).sample.float().numpy()


VAE: dict[str, Any] = {
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
CLIP: dict[str, Any] = {
    "vocab_size": len(CLIP_TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "bos_token_id": len(CLIP_TOKENS) - 2,
    "eos_token_id": len(CLIP_TOKENS) - 1,
    "pad_token_id": len(CLIP_TOKENS) - 1,
}
T5: dict[str, Any] = {
    "vocab_size": len(T5_TOKENS),
    "d_model": 20,
    "d_kv": 6,
    "d_ff": 32,
    "num_layers": 2,
    "num_heads": 2,
    "feed_forward_proj": "gated-gelu",
}
SCHEDULE: dict[str, Any] = {
    "shift": 3.0,
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 8,
    "max_image_seq_len": 100,
}
"""FLUX.1-dev's, with its shifts for other numbers of tokens; schnell's is {"shift": 1.0}."""
SIZE = {"height": 24, "width": 40, "max_sequence_length": 32}
"""Of 60 tokens."""


FILL: dict[str, Any] = {"in_channels": 4 * (16 + 16 + 4), "out_channels": 64}
"""What differs in a transformer that sees a mask and the rest of an image."""


def components(
    seed: int = 3, schedule: dict[str, Any] = SCHEDULE, **changes: Any
) -> dict[str, Any]:
    """The components of a tiny pipeline of PyTorch. changes: of the transformer's config."""
    clip = transformers.CLIPTextModel(transformers.CLIPTextConfig(**CLIP))
    t5 = transformers.T5EncoderModel(transformers.T5Config(**T5))
    return {
        "scheduler": diffusers.FlowMatchEulerDiscreteScheduler(**schedule),
        "vae": randomize(diffusers.AutoencoderKL(**VAE), 1).requires_grad_(False),
        "text_encoder": randomize(clip, 2).requires_grad_(False),
        "tokenizer": clip_tokenizer(),
        "text_encoder_2": randomize(t5, 4).requires_grad_(False),
        "tokenizer_2": t5_tokenizer(),
        "transformer": transformer(seed, **changes),
    }


def pipeline(folder: Any, name: str = "FluxPipeline", **changes: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`. changes: see `components`."""
    pipe = getattr(diffusers, name)(**components(**changes))
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe


def controlnet(seed: int = 5, **changes: Any) -> Any:
    """A ControlNet of PyTorch with fewer blocks than the transformer."""
    config = {**TRANSFORMER, "num_layers": 1, "num_single_layers": 2, **changes}
    return randomize(diffusers.FluxControlNetModel(**config), seed).requires_grad_(False)
