"""The autoencoder: absolute error, image gradients, structure, and a little KL.

The terms of Rombach et al. 2022, appendix G, without the learned perceptual and adversarial ones,
whose networks would have to be had first.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta
from PIL import Image

from diffusax.checkpoints import load_network, save_network
from diffusax.models.network import Network, Params, initialize_params
from diffusax.pictures import to_pil
from diffusax.training.config import TrainConfig
from diffusax.training.data import Element, read_pixels
from diffusax.training.losses import (
    gradient_difference,
    kl_divergence,
    structural_dissimilarity,
)
from diffusax.training.options import ComputeDtype, Weight
from diffusax.training.recipe import Recipe
from diffusax.training.sources import Source, open_source
from diffusax.training.step import Batch, cast_floating

_ENCODER = ("encoder", "quant_conv")

_SAMPLES = 64
"""Pictures from which the scale of the latents is measured."""


@dataclasses.dataclass(frozen=True)
class AutoencoderConfig(TrainConfig):
    """Train an autoencoder on pictures."""

    model: str = ""
    """The autoencoder to start from: a folder with config.json and weights."""
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
    validation_images: Annotated[int, Meta(ge=1, le=1024)] = 8
    """How many pictures of the data set to reconstruct for validation."""


@dataclasses.dataclass(frozen=True, eq=False)
class ReconstructionLoss:
    """What a picture (b H W 3 uint8, under "pixel_values") loses on its way through the latents."""

    vae: Network
    gradient_weight: float
    ssim_weight: float
    kl_weight: float
    compute_dtype: Any = jnp.float32

    def __call__(self, params: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """The loss of each example, b, float32."""
        weights = cast_floating({**frozen, **params["vae"]}, self.compute_dtype)
        x = batch["pixel_values"].astype(jnp.float32) / 127.5 - 1
        mean, logvar = (m.astype(jnp.float32) for m in self.vae.apply(weights, x, method="encode"))
        noise = jax.vmap(lambda key: jax.random.normal(key, mean.shape[1:]))(keys)
        z = mean + jnp.exp(0.5 * logvar) * noise
        y = self.vae.apply(weights, z, method="decode").astype(jnp.float32)
        pixels = x.shape[1] * x.shape[2] * x.shape[3]
        return (
            jnp.abs(x - y).mean((1, 2, 3))
            + self.gradient_weight * gradient_difference(x, y)
            + self.ssim_weight * structural_dissimilarity(x, y)
            + self.kl_weight * kl_divergence(mean, logvar) / pixels
        )


def autoencoder(config: AutoencoderConfig) -> Recipe:
    """The recipe, with the network loaded or drawn and the data set opened.

    Raises:
        ValueError: the network or the data set cannot be used; says why.
    """
    vae = load_network(Path(config.model), dtype="float32")
    if config.from_scratch:
        vae = dataclasses.replace(vae, params=initialize_params(vae.params, seed=config.seed))
    if config.from_scratch and config.decoder_only:
        raise ValueError("decoder_only keeps an encoder, and from_scratch leaves none to keep")
    kept = _ENCODER if config.decoder_only else ()
    source = open_source(config.data, (config.image_column,))
    prepare = _Prepare(config, config.resolution or vae.config.sample_size)
    return Recipe(
        name="autoencoder",
        params={"vae": {name: part for name, part in vae.params.items() if name not in kept}},
        frozen={name: part for name, part in vae.params.items() if name in kept},
        loss=ReconstructionLoss(
            vae,
            config.gradient_weight,
            config.ssim_weight,
            config.kl_weight,
            jnp.dtype(config.compute_dtype),
        ),
        source=source,
        prepare=prepare,
        save=_Save(vae, source, prepare),
        validate=_Validate(vae, source, prepare, config.validation_images),
    )


def latent_scale(vae: Network, params: Params, pixels: np.ndarray) -> float:
    """1 / the standard deviation of the latents of some pictures (Rombach et al. 2022, section G).

    pixels: b H W 3 uint8.
    """
    x = jnp.asarray(pixels, jnp.float32) / 127.5 - 1
    mean, logvar = jax.jit(lambda p, x: vae.apply(p, x, method="encode"))(params, x)
    return float(1 / jnp.sqrt(jnp.var(mean) + jnp.mean(jnp.exp(logvar))))


@dataclasses.dataclass(frozen=True)
class _Prepare:
    config: AutoencoderConfig
    resolution: int

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        return {"pixel_values": read_pixels(self.config, self.resolution, row, rng)}


def _sample(source: Source, prepare: _Prepare, count: int) -> np.ndarray:
    """Rows spread evenly over the data set. b H W 3 uint8."""
    indices = np.linspace(0, len(source) - 1, min(count, len(source))).astype(int)
    rng = np.random.default_rng(0)
    return np.stack([prepare(source[int(i)], rng)["pixel_values"] for i in indices])


@dataclasses.dataclass(frozen=True)
class _Save:
    """Writes the network with the scaling factor that its latents ask for, where they are new."""

    vae: Network
    source: Source
    prepare: _Prepare

    def __call__(self, params: Params, folder: Path) -> None:
        weights, config = {**self.vae.params, **params["vae"]}, self.vae.config
        if "encoder" in params["vae"]:
            pixels = _sample(self.source, self.prepare, _SAMPLES)
            scale = latent_scale(self.vae, weights, pixels)
            config = dataclasses.replace(config, scaling_factor=scale)
        save_network(dataclasses.replace(self.vae, config=config, params=weights), folder)


@dataclasses.dataclass(frozen=True)
class _Validate:
    """Pictures beside their reconstructions."""

    vae: Network
    source: Source
    prepare: _Prepare
    count: int

    def __call__(self, params: Params) -> list[Image.Image]:
        x = _sample(self.source, self.prepare, self.count).astype(np.float32) / 127.5 - 1
        y = np.asarray(jax.jit(self.vae.apply)({**self.vae.params, **params["vae"]}, x))
        return to_pil(np.clip(np.concatenate([x, y], axis=2) / 2 + 0.5, 0, 1))
