"""What a pipeline is made of, as tasks and training see it."""

import dataclasses
from typing import Any

import jax

from diffusax.models.network import Network, Params
from diffusax.pipelines.denoisers import UNetDenoiser
from diffusax.pipelines.families.family import Family


@dataclasses.dataclass
class Components:
    """Networks, parameters, tokenizers and the sampler, by the names in the checkpoint."""

    family: Family
    networks: dict[str, Network]
    params: dict[str, Params]
    tokenizers: dict[str, Any]
    scheduler: Any
    options: dict[str, Any]

    @property
    def denoiser(self) -> UNetDenoiser:
        """The UNet with its ControlNets."""
        controlnets = (net for name, net in self.networks.items() if name.startswith("controlnet"))
        return UNetDenoiser(self.networks["unet"], tuple(controlnets))

    @property
    def denoiser_params(self) -> dict[str, Params]:
        """What `denoiser` reads."""
        return {k: v for k, v in self.params.items() if k.startswith(("unet", "controlnet"))}

    @property
    def text(self) -> list[tuple[Any, Network, Params]]:
        """Tokenizer, text encoder and its parameters, as far as the checkpoint has them.

        Raises:
            ValueError: there is none; embeddings must be given then.
        """
        found = [
            (self.tokenizers[tokenizer], self.networks[encoder], self.params[encoder])
            for tokenizer, encoder in self.family.text
            if encoder in self.networks and tokenizer in self.tokenizers
        ]
        if not found:
            raise ValueError(
                "this pipeline has no text encoder; give prompt_embeds and, with guidance, "
                "negative_prompt_embeds"
            )
        return found

    @property
    def unet_config(self) -> Any:
        """The UNet's config."""
        return self.networks["unet"].config

    @property
    def vae_config(self) -> Any:
        """The autoencoder's config."""
        return self.networks["vae"].config

    @property
    def factor(self) -> int:
        """Pixels per latent, in each direction."""
        return self.vae_config.downsampling

    @property
    def context_dim(self) -> int:
        """The width of what cross-attention looks at."""
        dim = self.unet_config.cross_attention_dim
        return dim[0] if isinstance(dim, tuple) else dim

    @property
    def default_size(self) -> tuple[int, int]:
        """The height and width in pixels that the UNet was trained at."""
        size = self.unet_config.sample_size or 64
        rows, columns = size if isinstance(size, tuple) else (size, size)
        return rows * self.factor, columns * self.factor

    @property
    def upcasts(self) -> bool:
        """Whether the autoencoder runs in float32 although its parameters are float16."""
        wanted = self.family.upcasts_vae and getattr(self.vae_config, "force_upcast", False)
        return bool(wanted) and jax.tree.leaves(self.params["vae"])[0].dtype == "float16"
