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
from diffusax.images.conversion import to_pil
from diffusax.models.autoencoders.latents import (
    fold_latents,
    from_bytes,
    latent_statistics,
    sample_latents,
    to_unit,
)
from diffusax.models.network import Network, Params, cast_params, cast_shapes, initialize_params
from diffusax.networks import Model, load_network
from diffusax.runtime.programs.program import Program
from diffusax.training.config import TrainConfig, ValidationConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.buckets import SIZE
from diffusax.training.data.examples import image_size, read_pixels
from diffusax.training.data.opening import open_images
from diffusax.training.data.options import ImageDataConfig
from diffusax.training.options import ComputeDtype, require_options
from diffusax.training.step.step import Batch

_TRAINED = ("AutoencoderKL", "AutoencoderKLFlux2")
_MEASURED = "bn"
"""The statistics of latents, which no gradient reaches."""
_ENCODER = ("encoder", "quant_conv", _MEASURED)

_SAMPLES = 64
"""The number of images from which the scale of the latents is measured."""


@dataclasses.dataclass(frozen=True)
class AutoencoderValidationConfig(ValidationConfig):
    """Images of the data set, each beside its reconstruction."""

    images: Annotated[int, Meta(ge=1, le=1024)] = 8
    """The number of images of the data set to reconstruct."""


@dataclasses.dataclass(frozen=True)
class AutoencoderConfig(TrainConfig):
    """Train an autoencoder on images."""

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
    """The images that are reconstructed during the run."""


class Autoencoder:
    """The recipe that trains an autoencoder: `diffusax.training.autoencoder(config)`."""

    name = "autoencoder"

    def __init__(self, config: AutoencoderConfig):
        """Reads the network's config and opens the data set.

        Raises:
            ValueError: the network or the data set cannot be used, or options do not go together;
                says why.
        """
        require_options(config, ("model", "data.path"))
        if config.from_scratch and config.decoder_only:
            raise ValueError("decoder_only keeps an encoder, and from_scratch leaves none to keep")
        self.config = config
        self.folder = _folder(config.model)
        self.network = read_network(self.folder)
        if self.network.class_name not in _TRAINED:
            raise ValueError(
                f"autoencoder trains an {' or an '.join(_TRAINED)}; {self.folder} holds a "
                f"{self.network.class_name}"
            )
        network = self.network.config
        side = network.sample_size
        default = side if isinstance(side, int) else max(side)
        self.size = image_size(config.data, default, network.downsampling)
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
        pixels = self._images(self.config.validation.images)
        pairs = _reconstruct(self.network, {**frozen, **trained["vae"]}, pixels)
        return to_pil(np.asarray(pairs))

    def save(self, trained: Params, folder: Path) -> None:
        """Saves the network, whose latents are measured anew where the encoder was trained.

        What is measured is the scaling factor, or the statistics of patches of latents.
        """
        network, params = self.network, trained["vae"]
        if self.config.decoder_only:
            params = {**self._part(self._load(), kept=True), **params}
        elif latent_statistics(params) is None:
            scale = latent_scale(network, params, self._images(_SAMPLES))
            config = dataclasses.replace(network.config, scaling_factor=scale)
            network = dataclasses.replace(network, config=config)
        else:
            measured = patch_statistics(network, params, self._images(_SAMPLES))
            params = {**params, _MEASURED: measured}
        save_network(Model(network, params), folder)

    def card(self) -> dict[str, Any]:
        return {"base_model": self.config.model}

    def _load(self, mesh: Mesh | None = None) -> Params:
        return load_network(self.folder, dtype="float32", device=mesh).params

    def _part(self, params: Params, *, kept: bool) -> Params:
        """Returns the parameters that are kept fixed, or those that are trained."""
        names = _ENCODER if self.config.decoder_only else ()
        return {name: part for name, part in params.items() if (name in names) is kept}

    def _images(self, count: int) -> np.ndarray:
        """Returns squares of rows spread evenly over the data set, b H W 3 uint8."""
        n = len(self.source)
        rng = np.random.default_rng(0)
        rows = np.linspace(0, n - 1, min(count, n)).astype(int)
        square = (self.size, self.size)
        chosen = ({**self.source[int(i)], SIZE: square} for i in rows)
        return np.stack([self.example(row, rng)["pixel_values"] for row in chosen])


autoencoder = Autoencoder


@functools.partial(Program, static=("network",))
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


def patch_statistics(network: Network, params: Params, pixels: np.ndarray) -> Params:
    """Returns the mean and variance of each channel of patches of latents, c each.

    Upstream: diffusers models/autoencoders/autoencoder_kl_flux2.py, whose batch norm has them.

    pixels: b H W 3 uint8.
    """
    mean, logvar = _encode(network, params, pixels)
    mean, variance = (fold_latents(x, network.config.latent_patch) for x in (mean, jnp.exp(logvar)))
    axes = (0, 1, 2)
    spread = jnp.var(mean, axes) + jnp.mean(variance, axes)
    return {"running_mean": jnp.mean(mean, axes), "running_var": spread}


@functools.partial(Program, static=("network",))
def _encode(network: Network, params: Params, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    return network.apply(params, from_bytes(pixels), method="encode")


def _folder(path_or_repo: str) -> Path:
    """Returns the autoencoder's folder: the checkpoint itself, or `vae` in a pipeline's."""
    root = resolve(path_or_repo)
    return root / "vae" if (root / "model_index.json").is_file() else root


def kl_divergence(mean: jax.Array, logvar: jax.Array) -> jax.Array:
    """Returns the KL divergence of a diagonal normal from the standard normal, summed over latents.

    Kingma and Welling 2014, appendix B. b h w z -> b.
    """
    terms = mean**2 + jnp.exp(logvar) - 1.0 - logvar
    return 0.5 * jnp.sum(terms, axis=tuple(range(1, terms.ndim)))


def gradient_difference(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean difference of image gradients (Mathieu et al. 2016, equation 6, alpha=1).

    It sums vertical and horizontal gradients; a blurred edge costs its lost contrast. b h w c -> b.
    """
    difference = x - y
    vertical = jnp.abs(jnp.diff(difference, axis=1)).mean((1, 2, 3))
    horizontal = jnp.abs(jnp.diff(difference, axis=2)).mean((1, 2, 3))
    return vertical + horizontal


def structural_dissimilarity(x: jax.Array, y: jax.Array, *, window: int = 7) -> jax.Array:
    """Returns (1 - SSIM) / 2 in uniform windows, for images in [-1, 1].

    Wang et al. 2004. b h w c -> b.
    """

    def local_mean(z: jax.Array) -> jax.Array:
        total = jax.lax.reduce_window(
            z, 0.0, jax.lax.add, (1, window, window, 1), (1, 1, 1, 1), "VALID"
        )
        return total / window**2

    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    mean_x, mean_y = local_mean(x), local_mean(y)
    variance_x = local_mean(x * x) - mean_x**2
    variance_y = local_mean(y * y) - mean_y**2
    covariance = local_mean(x * y) - mean_x * mean_y
    ssim = ((2 * mean_x * mean_y + c1) * (2 * covariance + c2)) / (
        (mean_x**2 + mean_y**2 + c1) * (variance_x + variance_y + c2)
    )
    return (1 - ssim.mean((1, 2, 3))) / 2
