"""What the denoisers of transformers share."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import jax

from diffusax.models.network import Network, Params
from diffusax.pipelines.guidance import apply_guidance
from diffusax.pipelines.plan import Conditions, StepInputs
from diffusax.runtime.devices.mesh import Rules


@dataclasses.dataclass(frozen=True)
class TransformerDenoiser:
    """A transformer as the sampler calls it, see `Denoiser`. It is hashable and holds no arrays."""

    transformer: Network
    controlnets: tuple[Network, ...] = ()

    sample_size: ClassVar[tuple[int, int]] = (128, 128)
    """The rows and columns of latents of an image of 1024x1024, diffusers' default."""
    embeds_guidance: ClassVar[bool] = False

    @classmethod
    def of(cls, networks: Mapping[str, Network]) -> Self:
        """Returns the denoiser of a checkpoint's networks, which are given by name."""
        return cls(networks["transformer"])

    @property
    def components(self) -> tuple[str, ...]:
        """The names of the components whose parameters it reads."""
        return ("transformer",)

    @property
    def in_channels(self) -> int:
        """The channels of the latents."""
        return int(self.transformer.config.in_channels)

    @property
    def context_dim(self) -> int:
        """The width of the text's embeddings."""
        return int(self.transformer.config.joint_attention_dim)

    @property
    def tensor_rules(self) -> Rules:
        """The axes of the parameters that a mesh's tensor axis splits."""
        return self.transformer.tensor_rules

    def embed(
        self, params: Params, images: tuple[Any, ...], weights: Any = None
    ) -> tuple[Any, ...]:
        """Returns nothing, as no images steer the network."""
        return ()

    def prepare(self, params: Params, conditions: Conditions, inputs: StepInputs) -> Conditions:
        """Returns the conditions as they are."""
        return conditions

    def guide(self, predictions: jax.Array, inputs: StepInputs) -> jax.Array:
        """Applies classifier-free guidance; see `apply_guidance`."""
        return apply_guidance(predictions, inputs.weights, inputs.rescale)
