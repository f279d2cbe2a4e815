"""Networks that draw from noise alone (Ho et al. 2020): a UNet on pixels, without any text."""

import dataclasses
import functools
from typing import Any

import jax

from diffusax.models.network import Params
from diffusax.pipelines.families.denoiser import Denoiser, DenoiserInputs
from diffusax.pipelines.families.family import Component, Family
from diffusax.pipelines.plan.plan import Conditions, Prompt, Tokens
from diffusax.samplers import Scheduler


@dataclasses.dataclass(frozen=True)
class UNet2DDenoiser(Denoiser):
    """A UNet without conditions. It is hashable and holds no arrays."""

    component = "unet"

    @functools.cached_property
    def sample_size(self) -> tuple[int, int]:
        """The height and width in pixels that the UNet was trained at.

        Raises:
            ValueError: its config does not say it.
        """
        size = self.network.config.sample_size
        if size is None:
            raise ValueError(
                "sample_size must be in the config of the unet, as it is the size of the images "
                "(got None); write it into the unet's config.json"
            )
        return size if isinstance(size, tuple) else (size, size)

    def predict(self, params: Params, given: DenoiserInputs, options: dict[str, Any]) -> jax.Array:
        """Predicts for each image, b h w c; see `Denoiser`."""
        return self.network.apply(params[self.component], given.x, given.timestep, **options)


def tokenize(tokenizers: Any, texts: Any, call: Any, length: int | None = None) -> Tokens:
    """Returns no tokens."""
    return Tokens(())


def tokenize_caption(tokenizers: Any, caption: str) -> Tokens:
    """Returns no tokens."""
    return Tokens(())


def encode(encoders: Any, params: Any, tokens: Tokens, clip_skip: int | None = None) -> Prompt:
    """Returns embeddings of nothing."""
    return Prompt(None)


def conditions(components: Any, call: Any, prompt: Any, size: Any, scales: Any) -> Conditions:
    """Returns conditions without anything in them."""
    return Conditions(None)


UNCONDITIONAL = Family(
    name="unconditional diffusion",
    components=(
        Component("unet", "denoiser"),
        Component("scheduler", "scheduler", Scheduler),
    ),
    tokenize=tokenize,
    tokenize_caption=tokenize_caption,
    encode=encode,
    conditions=conditions,
    denoiser=UNet2DDenoiser.of,
)
