"""Trains an autoencoder with absolute error, image gradients, structural similarity and KL.

The terms of Rombach et al. 2022, appendix G, without the learned perceptual and adversarial ones,
which need networks of their own.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from msgspec import Meta
from PIL import Image

from diffusax.boundary.options import Weight
from diffusax.checkpoints import resolve, save_network
from diffusax.checkpoints.networks import read_network
from diffusax.images.pictures import to_pil
from diffusax.models.autoencoders.latents import from_bytes, sample_latents, to_unit
from diffusax.models.network import Network, Params, cast_params, cast_shapes, initialize_params
from diffusax.networks import Model, load_network
from diffusax.training.config import TrainConfig, ValidationConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import SIZE
from diffusax.training.data.examples import ImageDataConfig, picture_size, read_pixels
from diffusax.training.data.opening import open_images
from diffusax.training.options import ComputeDtype, require_options
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.step.losses import (
    gradient_difference,
    kl_divergence,
    structural_dissimilarity,
)
from diffusax.training.step.step import Batch

_ENCODER = ("encoder", "quant_conv")

_SAMPLES = 64
"""The number of images from which the scale of the latents is measured."""


@dataclasses.dataclass(frozen=True)
class AutoencoderValidationConfig(ValidationConfig):
    """Pictures of the data set, each beside its reconstruction."""

    images: Annotated[int, Meta(ge=1, le=1024)] = 8
    """How many pictures of the data set to reconstruct."""


@dataclasses.dataclass(frozen=True)
class AutoencoderConfig(TrainConfig):
    """Train an autoencoder on pictures."""

    model: str = ""
    """The autoencoder to start from: a folder with config.json and weights, a Hub repository id, or
    a whole pipeline's, whose autoencoder is taken."""
    from_scratch: bool = False
    """Draw the parameters afresh."""
    decoder_only: bool = False
    """Keep the encoder, so that the latents stay what diffusion models were trained on."""
    gradient_weight: Weight = 1.0
    """The loss weight of the difference of image gradients."""
    ssim_weight: Weight = 0.1
    """The loss weight of (1 - SSIM) / 2."""
    kl_weight: Weight = 1e-6
    """The loss weight of the KL divergence, summed over an example's latents and divided by its
    pixels."""
    compute_dtype: ComputeDtype = "bfloat16"
    """The dtype that the network computes in; parameters are float32."""
    data: ImageDataConfig = dataclasses.field(default_factory=ImageDataConfig)
    """The examples."""
    validation: AutoencoderValidationConfig = dataclasses.field(
        default_factory=AutoencoderValidationConfig
    )
    """The pictures that are reconstructed during the run."""


def autoencoder(config: AutoencoderConfig) -> Recipe:
    """Returns the recipe for these options.

    Raises:
        ValueError: the network or the data set cannot be used, or options do not go together; says
            why.
    """
    return Autoencoder(config)


class Autoencoder:
    """The recipe that trains an autoencoder, with the config read and the data set opened."""

    name = "autoencoder"

    def __init__(self, config: AutoencoderConfig):
        """Reads the network's config and opens the data set; raises the errors of `autoencoder`."""
        require_options(config, ("model", "data.path"))
        if config.from_scratch and config.decoder_only:
            raise ValueError("decoder_only keeps an encoder, and from_scratch leaves none to keep")
        self.config = config
        self.folder = _folder(config.model)
        self.network = read_network(self.folder)
        if self.network.class_name != "AutoencoderKL":
            raise ValueError(
                f"autoencoder trains an AutoencoderKL; {self.folder} holds a "
                f"{self.network.class_name}"
            )
        network = self.network.config
        side = network.sample_size
        default = side if isinstance(side, int) else max(side)
        self.size = picture_size(config.data, default, network.downsampling)
        if config.data.mask != "none" or config.data.mask_column:
            raise ValueError("an autoencoder's loss reads no masks; leave data.mask out")
        column = config.data.image_column
        self.source = open_images(
            config.data,
            (column,),
            image_column=column,
            side=self.size,
            factor=network.downsampling,
            leave_out=config.output,
        )

    def shapes(self) -> Params:
        """Returns the shapes of the trained parameters."""
        return {"vae": self._part(self.network.shapes, kept=False)}

    def trained(self, mesh: Mesh | None = None) -> Params:
        """Returns the network's parameters, or the decoder's alone, float32."""
        if self.config.from_scratch:
            params = initialize_params(self.network.shapes, seed=self.config.seed)
        else:
            params = self._load(mesh)
        return {"vae": self._part(params, kept=False)}

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Returns the encoder's parameters where only the decoder is trained, else none."""
        if not self.config.decoder_only:
            return {}
        return cast_params(self._part(self._load(mesh), kept=True), self.config.compute_dtype)

    def frozen_shapes(self) -> Params:
        """Returns the shapes of what `frozen` returns."""
        if not self.config.decoder_only:
            return {}
        kept = self._part(self.network.shapes, kept=True)
        return cast_shapes(kept, self.config.compute_dtype)

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns the pixels of a row, H W 3 uint8, under "pixel_values"."""
        data = self.config.data
        return {"pixel_values": read_pixels(data, self.size, data.image_column, row, rng)}

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the reconstruction loss of images (b H W 3 uint8, under "pixel_values"), b."""
        config, apply = self.config, self.network.apply
        weights = cast_params({**frozen, **trained["vae"]}, jnp.dtype(config.compute_dtype))
        x = from_bytes(batch["pixel_values"])
        mean, logvar = (m.astype(jnp.float32) for m in apply(weights, x, method="encode"))
        noise = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:], jnp.float32))(keys)
        z = sample_latents(mean, logvar, noise)
        y = apply(weights, z, method="decode").astype(jnp.float32)
        pixels = x.shape[1] * x.shape[2] * x.shape[3]
        return (
            jnp.abs(x - y).mean((1, 2, 3))
            + config.gradient_weight * gradient_difference(x, y)
            + config.ssim_weight * structural_dissimilarity(x, y)
            + config.kl_weight * kl_divergence(mean, logvar) / pixels
        )

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Returns images of the data set, each beside its reconstruction."""
        pixels = self._pictures(self.config.validation.images)
        pairs = _reconstruct(self.network, {**frozen, **trained["vae"]}, pixels)
        return to_pil(np.asarray(pairs))

    def save(self, trained: Params, folder: Path) -> None:
        """Saves the network, with a newly measured scaling factor where the encoder was trained."""
        network, params = self.network, trained["vae"]
        if self.config.decoder_only:
            params = {**self._part(self._load(), kept=True), **params}
        else:
            scale = latent_scale(network, params, self._pictures(_SAMPLES))
            config = dataclasses.replace(network.config, scaling_factor=scale)
            network = dataclasses.replace(network, config=config)
        save_network(Model(network, params), folder)

    def card(self) -> dict[str, Any]:
        """Returns the model that this one was trained from."""
        return {"base_model": self.config.model}

    def _load(self, mesh: Mesh | None = None) -> Params:
        return load_network(self.folder, dtype="float32", device=mesh).params

    def _part(self, params: Params, *, kept: bool) -> Params:
        """Returns the parameters that are kept fixed, or those that are trained."""
        names = _ENCODER if self.config.decoder_only else ()
        return {name: part for name, part in params.items() if (name in names) is kept}

    def _pictures(self, count: int) -> np.ndarray:
        """Returns squares of rows spread evenly over the data set, b H W 3 uint8."""
        n = len(self.source)
        rng = np.random.default_rng(0)
        rows = np.linspace(0, n - 1, min(count, n)).astype(int)
        square = (self.size, self.size)
        chosen = ({**self.source[int(i)], SIZE: square} for i in rows)
        return np.stack([self.example(row, rng)["pixel_values"] for row in chosen])


@functools.partial(jax.jit, static_argnums=0)
def _reconstruct(network: Network, params: Params, pixels: jax.Array) -> jax.Array:
    """Returns images beside their reconstructions, b H W 3 uint8 -> b H 2W 3 in [0, 1]."""
    x = from_bytes(pixels)
    return to_unit(jnp.concatenate([x, network.apply(params, x)], axis=2))


def latent_scale(network: Network, params: Params, pixels: np.ndarray) -> float:
    """Returns 1 / the standard deviation of images' latents (Rombach et al. 2022, section G).

    pixels: b H W 3 uint8.
    """
    mean, logvar = _encode(network, params, pixels)
    return float(1 / jnp.sqrt(jnp.var(mean) + jnp.mean(jnp.exp(logvar))))


@functools.partial(jax.jit, static_argnums=0)
def _encode(network: Network, params: Params, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return network.apply(params, from_bytes(pixels), method="encode")


def _folder(path_or_repo: str) -> Path:
    """Returns the autoencoder's folder: the checkpoint itself, or `vae` in a pipeline's."""
    root = resolve(path_or_repo)
    return root / "vae" if (root / "model_index.json").is_file() else root
