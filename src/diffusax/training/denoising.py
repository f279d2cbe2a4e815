"""The error of a denoiser's prediction at random timesteps (Ho et al. 2020, algorithm 1)."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.models.latents import from_bytes, sample_latents, scale_latents
from diffusax.models.network import Network, Params, cast_params
from diffusax.pipelines.families import Family
from diffusax.training.losses import (
    add_noise,
    min_snr_weight,
    prediction_target,
    squared_error,
)
from diffusax.training.step import Batch
from diffusax.training.timesteps import draw_timestep


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
    """The loss of pictures with captions.

    A batch has pixel_values (b H W 3 uint8) or moments (b h w 2z, cached), and input_ids (b t) or
    encoder_hidden_states (b t d, cached). Frozen parameters have the empty caption as input_ids (t)
    or embeddings (t d) under "empty".
    """

    family: Family
    networks: Mapping[str, Network]
    """By the names in the checkpoint: unet, vae, and the text encoder unless all is cached."""
    alphas_cumprod: np.ndarray
    prediction_type: str
    snr_gamma: float | None = None
    noise_offset: float = 0.0
    caption_dropout: float = 0.0
    gradient_checkpointing: str = "none"
    compute_dtype: Any = jnp.float32
    timestep_probabilities: np.ndarray | None = None
    """One for each timestep; None where all are alike."""

    def __call__(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """The loss of each example, b, float32."""
        return self.with_draws(trained, frozen, batch, self.draw(batch, keys))

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

    def with_draws(self, trained: Params, frozen: Params, batch: Batch, draws: Draws) -> jax.Array:
        """As a call, from these random numbers."""
        weights = cast_params({**frozen, **trained}, self.compute_dtype)
        x0 = self._latents(weights, batch, draws.latent_noise)
        context = self._context(weights, batch, draws.dropped)
        alpha_bar = jnp.asarray(self.alphas_cumprod, jnp.float32)[draws.timesteps]
        prediction = self.networks["unet"].apply(
            weights["unet"],
            add_noise(x0, draws.noise, alpha_bar),
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
        config = self.networks["vae"].config
        return h // config.downsampling, w // config.downsampling, config.latent_channels

    def _latents(self, weights: Params, batch: Batch, noise: jax.Array) -> jax.Array:
        vae = self.networks["vae"]
        if "moments" in batch:
            mean, logvar = jnp.split(batch["moments"].astype(jnp.float32), 2, axis=-1)
        else:
            moments = vae.apply(weights["vae"], from_bytes(batch["pixel_values"]), method="encode")
            mean, logvar = (m.astype(jnp.float32) for m in moments)
        latents = sample_latents(mean, logvar, noise)
        return scale_latents(vae.config, latents, normalize=self.family.normalizes_latents)

    def _context(self, weights: Params, batch: Batch, dropped: jax.Array) -> jax.Array:
        if "encoder_hidden_states" in batch:
            hidden = batch["encoder_hidden_states"].astype(self.compute_dtype)
            return jnp.where(dropped[:, None, None], weights["empty"], hidden)
        ids = jnp.where(dropped[:, None], weights["empty"], batch["input_ids"])
        return encode_captions(self.family, self.networks, weights, ids)


def encode_captions(
    family: Family, networks: Mapping[str, Network], params: Params, ids: jax.Array
) -> jax.Array:
    """Token ids b t to what cross-attention looks at, b t d."""
    names = [encoder for _, encoder in family.text]
    encoders = tuple(networks[name] for name in names)
    return family.encode(encoders, tuple(params[name] for name in names), (ids[:, None],))[0]
