"""What gpu.py measures, for diffusax and for PyTorch alike."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

PROMPT = "a photo of an astronaut riding a horse on mars"
LR = 1e-5
TOKENS = 77

Prepare = Callable[[int], Callable[[], float]]
"""Batch -> what is timed, which returns the check."""


class Case(NamedTuple):
    """A setting."""

    model: str
    batches: tuple[int, ...]
    steps: int
    """Of a call; 0 for training."""
    guidance: float = 1.0
    pixels: int | None = None
    """The side of training pictures; by default the model's own."""

    torch: bool = True
    """Whether gpu_torch.py knows its networks."""

    def side(self, pipe: Any) -> int:
        """The side of the latents."""
        own: int = pipe.unet.config.sample_size
        return own if self.pixels is None else min(own, self.pixels // pipe.vae_scale_factor)


CASES = {
    "sd2": Case("sd2", (1, 8), 20, 7.5),
    "sdxl": Case("xl", (1,), 30, 5.0),
    "sdxl-mlperf": Case("xl", (8, 16), 20, 8.0),
    "z-image": Case("z-image", (1,), 9, 0.0, torch=False),
    "klein": Case("klein", (1,), 4, torch=False),
    "flux": Case("flux", (1,), 28, 3.5, torch=False),
    "train": Case("sd2", (8, 32), 0),
    "train-256": Case("sd2", (32,), 0, pixels=256),
}


def call_arguments(case: Case) -> dict[str, Any]:
    """What diffusax and diffusers are both called with."""
    return {"num_inference_steps": case.steps, "guidance_scale": case.guidance}


def first_latents(pipe: Any, batch: int) -> np.ndarray:
    """The noise that a call starts from, b 4 h w."""
    side = pipe.unet.config.sample_size
    return np.random.default_rng(0).standard_normal((batch, 4, side, side), np.float32)


def forget_params(pipe: Any) -> None:
    """Leaves the pipeline only the shapes of its parameters."""
    for name, params in pipe.params.items():
        pipe.params[name] = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
