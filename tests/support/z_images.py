"""Tiny Z-Image networks of PyTorch with all weights random, two blocks of each kind and more."""

import dataclasses
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from support.tiny import randomize
from support.torch_families.tokenizers import QWEN_TOKENS, qwen_tokenizer

TRANSFORMER: dict[str, Any] = {
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
LANGUAGE: dict[str, Any] = {
    "vocab_size": len(QWEN_TOKENS),
    "hidden_size": 24,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer with other learned tokens than zeros, and times that differ between steps."""
    network = randomize(diffusers.ZImageTransformer2DModel(**{**TRANSFORMER, **changes}), seed)
    return network.requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Inputs:
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


def inputs(lengths: tuple[int, ...], size: tuple[int, int] = (6, 10), width: int = 24) -> Inputs:
    """Random inputs for the network, one image for each length."""
    rng = np.random.default_rng(3)
    latents = rng.standard_normal((len(lengths), 16, *size)).astype(np.float32)
    captions = [rng.standard_normal((n, width)).astype(np.float32) for n in lengths]
    return Inputs(latents, np.linspace(0.1, 0.9, len(lengths), dtype=np.float32), captions)


def upstream(network: Any, given: Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction, b c h w."""
    latents = [torch.tensor(x, dtype=dtype)[:, None] for x in given.latents]
    captions = [torch.tensor(c, dtype=dtype) for c in given.captions]
    with torch.no_grad():
        sample = network(latents, torch.tensor(given.times), captions).sample
    return torch.stack(sample)[:, :, 0].float().numpy()


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
SIZE = {"height": 24, "width": 40}
"""Of 60 tokens, which are filled up to 64."""


def pipeline(folder: Any, **scheduler: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`."""
    language = transformers.Qwen3Config(**LANGUAGE)
    pipe = diffusers.ZImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{"shift": 3.0, **scheduler}),
        vae=randomize(diffusers.AutoencoderKL(**VAE), 1).requires_grad_(False),
        text_encoder=randomize(transformers.Qwen3Model(language), 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(),
        transformer=transformer(3),
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
