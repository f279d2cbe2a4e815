"""Tiny FLUX.2 networks of PyTorch with all weights random, two blocks of each kind and more."""

import dataclasses
from typing import Any

import diffusers
import numpy as np
import torch
import transformers

from support.tiny import randomize
from support.torch_families.tokenizers import QWEN_TOKENS, qwen_tokenizer

VAE: dict[str, Any] = {
    "block_out_channels": (8, 8),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "mid_block_add_attention": False,
    "sample_size": 64,
}


def autoencoder(seed: int = 1, **changes: Any) -> Any:
    """An autoencoder with statistics of its latents that differ between channels."""
    vae = randomize(diffusers.AutoencoderKLFlux2(**{**VAE, **changes}), seed)
    generator = torch.Generator().manual_seed(seed)
    vae.bn.running_mean.normal_(std=0.3, generator=generator)
    vae.bn.running_var.uniform_(0.5, 2.0, generator=generator)
    return vae.requires_grad_(False)


TRANSFORMER: dict[str, Any] = {
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


def transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer whose blocks all have weights of their own."""
    network = diffusers.Flux2Transformer2DModel(**{**TRANSFORMER, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Inputs:
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


def inputs(*references: tuple[int, int], size: tuple[int, int] = (3, 5)) -> Inputs:
    """Random inputs for the network. references: the rows and columns of each."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times, scales = np.array([0.3, 0.9], np.float32), np.array([3.5, 1.5], np.float32)
    maps = tuple(normal(2, *shape, 16) for shape in references)
    return Inputs(normal(2, *size, 16), times, normal(2, 7, 48), scales, maps)


def upstream(network: Any, given: Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction for the images, b h w c."""
    call = given.arguments()
    # Positions and times stay as they are; the network casts the times itself.
    for name in ("hidden_states", "encoder_hidden_states"):
        call[name] = call[name].to(dtype)
    with torch.no_grad():
        y = network(**call).sample.float().numpy()
    rows, columns = given.latents.shape[1:3]
    return y[:, : rows * columns].reshape(2, rows, columns, -1)


CHAT = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Qwen3's template as far as a prompt goes: an answer without thoughts begins with empty ones."""
LANGUAGE: dict[str, Any] = {
    "vocab_size": len(QWEN_TOKENS),
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}
SIZE = {"height": 24, "width": 40}
"""Of 6x10 latents, which are tokens."""
CALL = {"text_encoder_out_layers": (1, 2, 3), "max_sequence_length": 64, **SIZE}
"""What makes calls of tiny checkpoints quick; their language model has four layers."""
SCHEDULER = {"shift": 3.0, "use_dynamic_shifting": True}


def pipeline(folder: Any, layers: int = 4, is_distilled: bool = False, **scheduler: Any) -> Any:
    """A tiny pipeline of PyTorch, saved in `folder`.

    layers: those of the language model; 28 for calls with the default text_encoder_out_layers.
    """
    language = transformers.Qwen3Config(**{**LANGUAGE, "num_hidden_layers": layers})
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(**{**SCHEDULER, **scheduler}),
        vae=autoencoder(),
        text_encoder=randomize(transformers.Qwen3ForCausalLM(language), 2).requires_grad_(False),
        tokenizer=qwen_tokenizer(chat_template=CHAT),
        transformer=transformer(3),
        is_distilled=is_distilled,
    )
    pipe.set_progress_bar_config(disable=True)
    pipe.save_pretrained(folder)
    return pipe
