"""Pictures, masks, videos and tensors that go into the small calls."""

import numpy as np
import torch
from PIL import Image

from support.pairs import mask as pil_mask
from support.pairs import picture as pil_picture


def picture(seed: int = 0, side: int = 64) -> Image.Image:
    """A coloured square."""
    return pil_picture(seed, side, side)


def mask(seed: int = 0, side: int = 64) -> Image.Image:
    """A white rectangle on black: where to draw."""
    return pil_mask(seed, side, side)


def video(frames: int = 5, side: int = 32) -> list[Image.Image]:
    """Coloured squares, one after the other."""
    return [picture(seed, side) for seed in range(frames)]


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def unit(*shape: int, seed: int = 0) -> torch.Tensor:
    """Numbers between 0 and 1."""
    return torch.from_numpy(np.random.default_rng(seed).random(shape, np.float32))
