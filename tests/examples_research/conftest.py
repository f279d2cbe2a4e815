"""What tests of examples/research share: the scripts as modules, pipelines of both sides."""

import sys
from typing import Any, NamedTuple

import diffusers
import numpy as np
import pytest
import torch
from support.effort import few
from support.repository import ROOT
from support.tiny import LEVELS, SMALLEST_UNET, SMALLEST_VAE, build_stable_diffusion

import diffusax

sys.path.insert(0, str(ROOT / "examples" / "research"))

SIDE = 8
# A predictor of v with no signal at the last timestep, as the embedded model is, and one of noise.
SCHEDULERS = {
    "v_prediction": {"timestep_spacing": "trailing", "rescale_betas_zero_snr": True},
    "epsilon": {"timestep_spacing": "leading", "steps_offset": 1},
}


class Sides(NamedTuple):
    """One checkpoint in PyTorch and here, with numbers for both."""

    torch: Any
    jax: Any

    def context(self, count: int) -> np.ndarray:
        """Random outputs of a text encoder, count 5 d."""
        width = self.torch.unet.config.cross_attention_dim
        return np.random.default_rng(1).standard_normal((count, 5, width), np.float32)

    def noise(self, *count: int) -> np.ndarray:
        """Random latents, count c h w."""
        return np.random.default_rng(2).standard_normal((*count, 4, SIDE, SIDE), np.float32)


@pytest.fixture(scope="module", params=few(SCHEDULERS, "v_prediction"))
def sides(request, tmp_path_factory):
    """A pipeline of each side: the smallest networks with a latent for each pixel."""
    folder = tmp_path_factory.mktemp("research") / "model"
    options = {**LEVELS, "clip_sample": False, "set_alpha_to_one": False}
    options |= {"prediction_type": request.param, **SCHEDULERS[request.param]}
    reference = build_stable_diffusion(
        folder,
        unet=SMALLEST_UNET | {"sample_size": SIDE},
        vae=SMALLEST_VAE | {"sample_size": SIDE},
        scheduler=diffusers.DDIMScheduler(**options),
    )
    for network in (reference.unet, reference.vae):
        network.requires_grad_(False)
    ours = diffusax.StableDiffusionPipeline.from_pretrained(folder)
    ours.set_progress_bar_config(disable=True)
    return Sides(reference, ours)


def torch_parts(scheduler: Any, raw: torch.Tensor, t: Any, x: torch.Tensor) -> Any:
    """Returns (x0, noise) that a prediction stands for, at one timestep or b."""
    alpha_bar = scheduler.alphas_cumprod[t].reshape(-1, 1, 1, 1)
    alpha, sigma = alpha_bar.sqrt(), (1 - alpha_bar).sqrt()
    if scheduler.config.prediction_type == "epsilon":
        return (x - sigma * raw) / alpha, raw
    return alpha * x - sigma * raw, sigma * x + alpha * raw
