"""Text to image: fine-tuning a Stable Diffusion checkpoint, or training its networks afresh."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta
from PIL import Image

from diffusax.models.network import Network, Params, initialize_params
from diffusax.pipelines import DiffusionPipeline, StableDiffusionPipeline
from diffusax.training.cached import CachedSource, is_cache
from diffusax.training.config import TrainConfig
from diffusax.training.data import Element, caption_ids, choose_caption, read_pixels
from diffusax.training.losses import (
    add_noise,
    min_snr_weight,
    prediction_target,
    squared_error,
)
from diffusax.training.options import ComputeDtype, Share
from diffusax.training.recipe import Recipe
from diffusax.training.sources import open_source
from diffusax.training.step import Batch, cast_floating
from diffusax.training.timesteps import (
    TimestepBiasConfig,
    draw_timestep,
    timestep_probabilities,
)

# Ends of the UNet's residual branches, which start as identities (Dhariwal and Nichol 2021's code).
_ZERO = frozenset(["conv2", "proj_out", "conv_out"])


@dataclasses.dataclass(frozen=True)
class TextToImageConfig(TimestepBiasConfig, TrainConfig):
    """Train a text-to-image model on pictures and captions."""

    model: str = ""
    """The checkpoint to start from: a folder in diffusers' layout, or a Hub repository id."""
    from_scratch: bool = False
    """Draw the trained networks' parameters afresh; the checkpoint gives their configs."""
    train_text_encoder: bool = False
    """Train the text encoder too."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    """What the network predicts, also of the result; by default the checkpoint's own."""
    snr_gamma: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The gamma of Min-SNR loss weights (Hang et al. 2023); 5 is usual, none weighs all alike."""
    noise_offset: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """The deviation of a mean that the noise gets per picture and channel, so that dark and bright
    pictures are learnt; 0.1 is usual."""
    caption_dropout: Share = 0.1
    """The share of captions replaced by the empty one, for classifier-free guidance."""
    gradient_checkpointing: Literal["none", "blocks", "full"] = "none"
    """What is computed again for the gradient to save memory: none; blocks (each resnet and
    transformer); full (levels too: the least memory, the most time)."""
    compute_dtype: ComputeDtype = "bfloat16"
    """The dtype that the networks compute in; parameters are float32."""
    validation_prompts: tuple[str, ...] = ()
    """What to draw for validation."""
    validation_steps: Annotated[int, Meta(ge=1, le=1000)] = 20
    """The number of sampler steps of validation pictures."""
    validation_guidance: Annotated[float, Meta(ge=0, le=1000)] = 7.5
    """The guidance scale of validation pictures."""


class Draws(NamedTuple):
    """The random numbers of a batch: one row per example."""

    latent_noise: jax.Array
    """b h w z: which latents the autoencoder's distribution gives."""
    noise: jax.Array
    """b h w z, with its offset."""
    timesteps: jax.Array
    """b, from 0 to num_train_timesteps - 1."""
    dropped: jax.Array
    """b, bool: the empty caption instead."""


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisingLoss:
    """The error of a UNet's prediction at a random timestep (Ho et al. 2020, algorithm 1).

    A batch has pixel_values (b H W 3 uint8) or moments (b h w 2z, cached), and input_ids (b t) or
    encoder_hidden_states (b t d, cached). `frozen` has the empty caption as input_ids (t) or
    embeddings (t d) under "empty".
    """

    text_encoder: Network
    unet: Network
    vae: Network
    alphas_cumprod: np.ndarray
    prediction_type: str
    snr_gamma: float | None = None
    noise_offset: float = 0.0
    caption_dropout: float = 0.0
    gradient_checkpointing: str = "none"
    compute_dtype: Any = jnp.float32
    timestep_probabilities: np.ndarray | None = None
    """One for each timestep; None where all are alike."""

    def __call__(self, params: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """The loss of each example, b, float32."""
        return self.given(params, frozen, batch, self.draw(batch, keys))

    def draw(self, batch: Batch, keys: jax.Array) -> Draws:
        """Every example's random numbers from its key alone."""
        shape = self._latent_shape(batch)

        def draw_one(key: jax.Array) -> Draws:
            latent, noise, offset, timestep, drop = jax.random.split(key, 5)
            mean = self.noise_offset * jax.random.normal(offset, shape[-1:])
            return Draws(
                jax.random.normal(latent, shape),
                jax.random.normal(noise, shape) + mean,
                draw_timestep(timestep, len(self.alphas_cumprod), self.timestep_probabilities),
                jax.random.uniform(drop) < self.caption_dropout,
            )

        return jax.vmap(draw_one)(keys)

    def given(self, params: Params, frozen: Params, batch: Batch, draws: Draws) -> jax.Array:
        """As a call, with the random numbers given."""
        weights = cast_floating({**frozen, **params}, self.compute_dtype)
        x0 = self._latents(weights, batch, draws.latent_noise)
        context = self._context(weights, batch, draws.dropped)
        alpha_bar = jnp.asarray(self.alphas_cumprod, jnp.float32)[draws.timesteps]
        noisy = add_noise(x0, draws.noise, alpha_bar)
        prediction = self.unet.apply(
            weights["unet"],
            noisy,
            draws.timesteps,
            context,
            gradient_checkpointing=self.gradient_checkpointing,
        )
        target = prediction_target(self.prediction_type, x0, draws.noise, alpha_bar)
        error = squared_error(prediction, target)
        if self.snr_gamma is None:
            return error
        return error * min_snr_weight(self.prediction_type, alpha_bar, self.snr_gamma)

    def _latent_shape(self, batch: Batch) -> tuple[int, int, int]:
        if "moments" in batch:
            _, h, w, channels = batch["moments"].shape
            return h, w, channels // 2
        _, h, w, _ = batch["pixel_values"].shape
        factor = self.vae.config.downsampling
        return h // factor, w // factor, self.vae.config.latent_channels

    def _latents(self, weights: Params, batch: Batch, noise: jax.Array) -> jax.Array:
        if "moments" in batch:
            mean, logvar = jnp.split(batch["moments"].astype(jnp.float32), 2, axis=-1)
        else:
            pixels = batch["pixel_values"].astype(jnp.float32) / 127.5 - 1
            moments = self.vae.apply(weights["vae"], pixels, method="encode")
            mean, logvar = (m.astype(jnp.float32) for m in moments)
        config = self.vae.config
        latents = mean + jnp.exp(0.5 * logvar) * noise
        return (latents - (config.shift_factor or 0.0)) * config.scaling_factor

    def _context(self, weights: Params, batch: Batch, dropped: jax.Array) -> jax.Array:
        if "encoder_hidden_states" in batch:
            hidden = batch["encoder_hidden_states"].astype(self.compute_dtype)
            return jnp.where(dropped[:, None, None], weights["empty"], hidden)
        ids = jnp.where(dropped[:, None], weights["empty"], batch["input_ids"])
        return self.text_encoder.apply(weights["text_encoder"], ids, method="encode")


def text_to_image(config: TextToImageConfig) -> Recipe:
    """The recipe, with the checkpoint loaded and the data set opened.

    Raises:
        ValueError: the checkpoint or the data set cannot be used; says why.
    """
    pipe = DiffusionPipeline.from_pretrained(config.model, dtype="float32")
    if config.prediction_type is not None:
        changed = {"prediction_type": config.prediction_type}
        pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler, **changed)
    trained = ("unet", "text_encoder") if config.train_text_encoder else ("unet",)
    if config.from_scratch:
        for i, name in enumerate(trained):
            pipe.params[name] = initialize_params(
                pipe.params[name], seed=config.seed + i, zero=_ZERO if name == "unet" else ()
            )
    cached = is_cache(config.data)
    if cached:
        source: Any = CachedSource.open(config.data, vae=pipe.vae, text_encoder=pipe.text_encoder)
    else:
        source = open_source(config.data, (config.image_column, config.caption_column))
    embedded = cached and "encoder_hidden_states" in source.shapes
    if embedded and config.train_text_encoder:
        raise ValueError(
            f"{config.data} holds text embeddings, so train_text_encoder has nothing to train; "
            "write it again without --text-embeddings"
        )
    empty = pipe.tokenizer("")[0]
    frozen = {} if cached else {"vae": pipe.params["vae"]}
    if not embedded and not config.train_text_encoder:
        frozen["text_encoder"] = pipe.params["text_encoder"]
    frozen = cast_floating(frozen, config.compute_dtype)
    frozen["empty"] = pipe.encode_prompt("")[0] if embedded else jnp.asarray(empty)
    prepare = _unchanged if cached else _Prepare(config, resolution(config, pipe), pipe.tokenizer)
    return Recipe(
        name="text-to-image",
        params={name: pipe.params[name] for name in trained},
        frozen=frozen,
        loss=_loss(pipe, config),
        source=source,
        prepare=prepare,
        save=_Save(pipe),
        validate=_Validate(pipe, config) if config.validation_prompts else None,
        info={"base_model": config.model},
    )


def _loss(pipe: StableDiffusionPipeline, config: TextToImageConfig) -> DenoisingLoss:
    return DenoisingLoss(
        pipe.text_encoder,
        pipe.unet,
        pipe.vae,
        pipe.scheduler.alphas_cumprod,
        pipe.scheduler.prediction_type,
        snr_gamma=config.snr_gamma,
        noise_offset=config.noise_offset,
        caption_dropout=config.caption_dropout,
        gradient_checkpointing=config.gradient_checkpointing,
        compute_dtype=jnp.dtype(config.compute_dtype),
        timestep_probabilities=timestep_probabilities(config, len(pipe.scheduler.alphas_cumprod)),
    )


@dataclasses.dataclass(frozen=True)
class _Prepare:
    config: TextToImageConfig
    resolution: int
    tokenizer: Any

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        pixels = read_pixels(self.config, self.resolution, row, rng)
        caption = choose_caption(row[self.config.caption_column], rng)
        return {"pixel_values": pixels, "input_ids": caption_ids(self.tokenizer, caption)}


def _unchanged(row: dict[str, Any], rng: np.random.Generator) -> Element:
    """A cached row is an example already."""
    return row


def resolution(config: TextToImageConfig, pipe: StableDiffusionPipeline) -> int:
    """Pixels a side: those asked for, or the model's own."""
    return config.resolution or pipe.unet.config.sample_size * pipe.vae.config.downsampling


@dataclasses.dataclass(frozen=True)
class _Save:
    pipe: StableDiffusionPipeline

    def __call__(self, params: Params, folder: Path) -> None:
        self.pipe.params.update(params)
        self.pipe.save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class _Validate:
    pipe: StableDiffusionPipeline
    config: TextToImageConfig

    def __call__(self, params: Params) -> list[Image.Image]:
        self.pipe.params.update(params)
        size = None if is_cache(self.config.data) else self.config.resolution
        return self.pipe(
            list(self.config.validation_prompts),
            height=size,
            width=size,
            num_inference_steps=self.config.validation_steps,
            guidance_scale=self.config.validation_guidance,
            seed=self.config.seed,
        ).images
