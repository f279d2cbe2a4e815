"""Networks that draw from noise alone (Ho et al. 2020): a UNet on pixels, without any text."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from diffusax.models.network import Network, Params
from diffusax.pipelines.families.family import Component, Family
from diffusax.pipelines.plan.plan import Conditions, Prompt, StepInputs, Tokens
from diffusax.runtime.devices.mesh import Rules
from diffusax.samplers import Scheduler


@dataclasses.dataclass(frozen=True)
class UNet2DDenoiser:
    """A UNet without conditions. It is hashable and holds no arrays."""

    unet: Network
    components = ("unet",)
    controlnets: tuple[Network, ...] = ()
    context_dim = None
    embeds_guidance = False

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> "UNet2DDenoiser":
        """Returns the denoiser of a checkpoint's networks, which are given by name."""
        return cls(networks["unet"])

    @functools.cached_property
    def in_channels(self) -> int:
        """The channels of the images."""
        return int(self.unet.config.in_channels)

    @functools.cached_property
    def sample_size(self) -> tuple[int, int]:
        """The height and width in pixels that the UNet was trained at.

        Raises:
            ValueError: its config does not say it.
        """
        size = self.unet.config.sample_size
        if size is None:
            raise ValueError(
                "sample_size must be in the config of the unet, as it is the size of the images "
                "(got None); write it into the unet's config.json"
            )
        return size if isinstance(size, tuple) else (size, size)

    @property
    def tensor_rules(self) -> Rules:
        """The axes of the parameters that a mesh's tensor axis splits."""
        return self.unet.tensor_rules

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Returns nothing, as no images steer the network."""
        return ()

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions as they are."""
        return conditions

    def __call__(
        self,
        params: Params,
        x: jax.Array,
        timestep: jax.Array,
        conditions: Conditions,
        inputs: StepInputs | None = None,
        *,
        gradient_checkpointing: str = "none",
    ) -> jax.Array:
        """Predicts for each image, b h w c; the arguments are those of `Denoiser`."""
        options: dict[str, Any] = {"gradient_checkpointing": gradient_checkpointing}
        return self.unet.apply(params["unet"], x, timestep, **options)

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Returns the prediction of the only branch, b ..., of b 1 ... ."""
        return predictions[:, 0]


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
