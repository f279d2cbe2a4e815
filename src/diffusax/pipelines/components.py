"""What a pipeline is made of, as tasks and training see it."""

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from diffusax.models.freeu import FreeU
from diffusax.models.network import Network, Params, Switches
from diffusax.pipelines.denoisers import UNetDenoiser
from diffusax.pipelines.families.family import Family
from diffusax.pipelines.plan import Decoding
from diffusax.samplers.processes import Process


@dataclasses.dataclass
class Components:
    """Networks, parameters, tokenizers and the sampler, by the names in the checkpoint.

    What follows from networks and tokenizers is computed once; `forget` after changing these.
    """

    family: Family
    networks: dict[str, Network]
    params: dict[str, Params]
    tokenizers: dict[str, Any]
    scheduler: Any
    options: dict[str, Any]
    mesh: Mesh | None = None
    """Of several devices, over which parameters and batches are spread."""
    switches: dict[str, Switches] = dataclasses.field(default_factory=dict)
    """Of the models in a pipeline, which share them."""
    process: Process | None = None
    """What the networks were trained for, as the scheduler says that they came with; None where
    nobody knows."""

    def forget(self) -> None:
        """Has what follows from networks and tokenizers computed again."""
        for name in [n for n in vars(self) if n not in self.__dataclass_fields__]:
            del vars(self)[name]

    @functools.cached_property
    def denoiser(self) -> UNetDenoiser:
        """The UNet with its ControlNets."""
        controlnets = (net for name, net in self.networks.items() if name.startswith("controlnet"))
        return UNetDenoiser(self.networks["unet"], tuple(controlnets))

    @functools.cached_property
    def local_mesh(self) -> Mesh | None:
        """The part of the mesh that belongs to this process."""
        return None if self.mesh is None else self.mesh.local_mesh

    @property
    def denoiser_params(self) -> dict[str, Params]:
        """What `denoiser` reads."""
        return {k: v for k, v in self.params.items() if k.startswith(("unet", "controlnet"))}

    @property
    def freeu(self) -> FreeU | None:
        """The numbers that the UNet runs with, if it does with FreeU."""
        return self.switches["unet"].freeu if "unet" in self.switches else None

    @property
    def dtype(self) -> Any:
        """The UNet's."""
        return jax.tree.leaves(self.params["unet"])[0].dtype

    @functools.cached_property
    def text(self) -> list[tuple[Any, Network, str]]:
        """Tokenizer, text encoder and its name, as far as the checkpoint has them.

        Raises:
            ValueError: there is none; embeddings must be given then.
        """
        found = [
            (self.tokenizers[tokenizer], self.networks[encoder], encoder)
            for tokenizer, encoder in self.family.text
            if encoder in self.networks and tokenizer in self.tokenizers
        ]
        if not found:
            raise ValueError(
                "this pipeline has no text encoder; give prompt_embeds and, with guidance, "
                "negative_prompt_embeds"
            )
        return found

    @functools.cached_property
    def unet_config(self) -> Any:
        """The UNet's config."""
        return self.networks["unet"].config

    @functools.cached_property
    def vae_config(self) -> Any:
        """The autoencoder's config."""
        return self.networks["vae"].config

    @functools.cached_property
    def factor(self) -> int:
        """Pixels per latent, in each direction."""
        return self.vae_config.downsampling

    @functools.cached_property
    def context_dim(self) -> int:
        """The width of what cross-attention looks at."""
        dim = self.unet_config.cross_attention_dim
        return dim[0] if isinstance(dim, tuple) else dim

    @functools.cached_property
    def default_size(self) -> tuple[int, int]:
        """The height and width in pixels that the UNet was trained at."""
        size = self.unet_config.sample_size or 64
        rows, columns = size if isinstance(size, tuple) else (size, size)
        return rows * self.factor, columns * self.factor

    @functools.cached_property
    def upcasts(self) -> bool:
        """Whether the autoencoder runs in float32 where its parameters are float16."""
        return self.family.upcasts_vae and bool(getattr(self.vae_config, "force_upcast", False))

    def decoding(self, *, normalized: bool = True) -> Decoding:
        """How the autoencoder decodes; with `normalized`, as the family does."""
        return Decoding(self.upcasts, normalized and self.family.normalizes_latents)


class MultiControlNetModel:
    """Several ControlNets, whose residuals are added up."""

    def __init__(self, nets: Any):
        self.nets = list(nets)

    def __repr__(self) -> str:
        return f"MultiControlNetModel({self.nets})"
