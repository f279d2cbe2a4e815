"""A tiny FLUX.3 in PyTorch: two blocks of each kind, and all weights random."""

import dataclasses
from typing import Any

import diffusers
import numpy as np
import torch
from diffusers.modular_pipelines.flux3.before_denoise import _prepare_image_ids

from support.tiny import randomize

FLUX3: dict[str, Any] = {
    "in_channels": 16,
    "cond_in_channels": 16,
    "num_layers": 2,
    "num_single_layers": 2,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
    "joint_attention_dim": 48,
    "timestep_channels": 32,
    "axes_dims_rope": (4, 4, 4, 4),
}


def flux3_transformer(seed: int = 0, **changes: Any) -> Any:
    """A transformer whose blocks all have weights of their own."""
    network = diffusers.Flux3Transformer2DModel(**{**FLUX3, **changes})
    return randomize(network, seed).requires_grad_(False)


@dataclasses.dataclass(frozen=True)
class Flux3Inputs:
    """Two images with latents b h w c, times b, texts b s d, targets b, and references."""

    latents: np.ndarray
    times: np.ndarray
    text: np.ndarray
    targets: np.ndarray
    references: tuple[np.ndarray, ...] = ()

    def arguments(self, *, flow_map: bool = False) -> dict[str, Any]:
        """The arguments of diffusers' call."""
        text_ids = torch.zeros(self.text.shape[1], 4)
        text_ids[:, 3] = torch.arange(self.text.shape[1])
        found = {
            "hidden_states": _tokens(self.latents),
            "encoder_hidden_states": torch.tensor(self.text),
            "timestep": torch.tensor(self.times),
            "img_ids": _prepare_image_ids(*self.latents.shape[1:3], 0.5),
            "txt_ids": text_ids,
        }
        if self.references:
            ids = [
                _prepare_image_ids(*x.shape[1:3], 0.5, -(1 + i))
                for i, x in enumerate(self.references)
            ]
            found["image_cond_hidden_states"] = torch.cat(list(map(_tokens, self.references)), 1)
            found["image_cond_ids"] = torch.cat(ids)
        return found | ({"target_timestep": torch.tensor(self.targets)} if flow_map else {})


def _tokens(latents: np.ndarray) -> torch.Tensor:
    return torch.tensor(latents.reshape(len(latents), -1, latents.shape[-1]))


def flux3_inputs(
    *references: tuple[int, int], size: tuple[int, int] = (3, 5), text: int = 7
) -> Flux3Inputs:
    """Random inputs for the network. references: the rows and columns of each."""
    rng = np.random.default_rng(3)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(np.float32)

    times, targets = np.array([0.3, 0.9], np.float32), np.array([0.1, 0.7], np.float32)
    maps = tuple(normal(2, *shape, 16) for shape in references)
    return Flux3Inputs(normal(2, *size, 16), times, normal(2, text, 48), targets, maps)


def upstream_flux3(network: Any, given: Flux3Inputs, dtype: Any = torch.float32) -> np.ndarray:
    """PyTorch's prediction for the images, b h w c."""
    call = given.arguments(flow_map=network.config.flow_map)
    for name in call:
        if name.endswith("hidden_states"):
            call[name] = call[name].to(dtype)
    with torch.no_grad():
        y = network(**call).sample.float().numpy()
    return y.reshape(given.latents.shape)
