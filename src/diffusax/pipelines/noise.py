"""Where a run's random numbers come from: JAX's keys, or PyTorch's generator reproduced."""

import dataclasses
import functools
import secrets
from typing import Any

import jax
import numpy as np

from diffusax.pipelines.programs import image_keys
from diffusax.runtime.torch_random import TorchGenerator

SEED_LIMIT = {"jax": 2**32, "torch": 2**63}

_image_keys = jax.jit(image_keys)


@dataclasses.dataclass(frozen=True)
class JaxNoise:
    """A key per image; the programs draw from it themselves."""

    keys: jax.Array

    def initial(self, shape: tuple[int, int, int, int]) -> Any:
        return self.keys

    def row(self, shape: tuple[int, int, int, int], *, draws: bool) -> Any:
        return self.keys


@dataclasses.dataclass(frozen=True)
class TorchNoise:
    """The numbers of torch.Generator().manual_seed(seed), in the order in which diffusers draws."""

    generators: tuple[TorchGenerator, ...]

    def initial(self, shape: tuple[int, int, int, int]) -> Any:
        """shape: b h w c, the layout of the result; drawn as b c h w."""
        b, h, w, c = shape
        if len(self.generators) == 1:
            drawn = self.generators[0].randn((b, c, h, w))
        else:
            drawn = np.concatenate([g.randn((1, c, h, w)) for g in self.generators])
        return np.ascontiguousarray(drawn.transpose(0, 2, 3, 1))

    def row(self, shape: tuple[int, int, int, int], *, draws: bool) -> Any:
        """The noise of a row that draws some; zeros for one that does not."""
        return self.initial(shape) if draws else _zeros(shape)


def noise_source(kind: str, seed: list[int] | int | None, n: int) -> JaxNoise | TorchNoise:
    """The noise of n images; None draws a seed from the system."""
    if seed is None:
        seed = secrets.randbits(32)
    if kind == "torch":
        seeds = seed if isinstance(seed, list) else [seed]
        return TorchNoise(tuple(TorchGenerator(s) for s in seeds))
    if isinstance(seed, list):
        return JaxNoise(_image_keys(np.array(seed, np.uint32), np.zeros(n, np.uint32)))
    return JaxNoise(_image_keys(np.full(n, seed, np.uint32), np.arange(n, dtype=np.uint32)))


@functools.lru_cache(2)
def _zeros(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)
