"""The error of a denoiser's prediction at random timesteps (Ho et al. 2020, algorithm 1)."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diffusax.lora.trained import TrainedLora
from diffusax.models.autoencoders.latents import (
    from_bytes,
    sample_latents,
    scale_latents,
)
from diffusax.models.network import Network, Params, cast_params
from diffusax.pipelines.families import Denoiser, Family
from diffusax.pipelines.families.family import CONTROLNET
from diffusax.pipelines.plan.plan import Conditions, HiddenLayers, Prompt, StepInputs
from diffusax.runtime.random.noise import seed_key
from diffusax.samplers import Scheduler
from diffusax.samplers.processes import Flow, Process, add_noise
from diffusax.training.config import DenoisingConfig
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import (
    EMPTY,
    EMPTY_LENGTHS,
    GIVEN,
    LENGTHS,
    PIXELS,
    PRIOR,
    SEEN,
)
from diffusax.training.step.draws import Draws, Dropped, drop_conditions
from diffusax.training.step.encoding import (
    before_names,
    encode_captions,
    encode_pixels,
    original_names,
    reference_sizes,
)
from diffusax.training.step.given_frames import GivenFrames
from diffusax.training.step.seen_images import SeenImages, seen_images, with_tail
from diffusax.training.step.step import Batch
from diffusax.training.step.timesteps import timestep_probabilities

STATISTICS = "statistics"
"""The name among the frozen parameters of the statistics that latents are normalised by."""
# What the key of an example is folded with for the adapters' dropout.
_ADAPTERS = 5
# And for which clips are shown their first frame.
_FIRST_FRAME = 6


def squared_error(
    prediction: jax.Array, target: jax.Array, weights: jax.Array | None = None
) -> jax.Array:
    """Returns the mean squared error of each example, in float32. b ... c -> b.

    weights: what each place of an example counts for, b ...; by default 1.
    """
    difference = prediction.astype(jnp.float32) - target.astype(jnp.float32)
    squares = difference**2 if weights is None else weights[..., None] * difference**2
    return jnp.mean(squares, axis=tuple(range(1, difference.ndim)))


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisingLoss:
    """The denoising loss of images with captions, and optionally with images as conditions.

    The entries of a batch are:
        pixel_values: b H W 3 uint8, or moments: b h w 2z, cached. The images to learn; they are
            their own latents where the family has no autoencoder.
        input_ids: b t, and input_ids_2 for a second text encoder; or encoder_hidden_states: b t d,
            and a pooled output: b p, cached under the family's `embedding_columns`. Where the
            texts speak of images, text_before, text_before_2 and so on hold what stands before
            each, b t d, and empty_text and empty_lengths the caption's replacement, see
            `SeenImages.encode_empty`.
        lengths: b, the tokens of each text that are not padding, where the family has it.
        time_ids: b 6, where the family has micro-conditioning.
        original_pixel_values: b H W 3 uint8, or original_latents: b h w z, cached. For edits alone:
            the images before them, further channels of the input as in InstructPix2Pix, or
            images to look at in a family that has these; further ones of these are
            original_pixel_values_2, or original_latents_2, and so on.
        prior: b bool. For DreamBooth alone: which examples are of the class; `snr_gamma` does not
            weigh them (diffusers examples/dreambooth/train_dreambooth.py).
        conditioning_pixel_values: b H W 3 uint8. For ControlNet alone: the control images.
        pixel_values: b f H W 3 uint8, or moments: b f h w 2z, cached. For clips, of a family of
            videos. seen_pixel_values and given_latents, image_embeds: what is shown of their first
            frames, see `GivenFrames.entries`.
        loss_weights: b h w float32, where there are masks: what each latent's error counts for.

    The frozen parameters hold under "empty" the replacement for a dropped caption: the names of the
    caption's entries in a batch, with arrays that lack the axis b; and under "statistics" those of
    `latent_statistics`, float32, where the autoencoder has some.
    """

    family: Family
    networks: Mapping[str, Network]
    """The networks by their names in the checkpoint: the denoiser, the autoencoder (if the family
    has one) and the text encoders unless their outputs are cached, and the ControlNet that is
    trained."""
    process: Process
    """The process that turns clean latents into noise."""
    prediction_type: str
    snr_gamma: float | None = None
    noise_offset: float = 0.0
    caption_dropout: float = 0.0
    """The share of examples whose text is dropped."""
    conditioning_dropout: float = 0.0
    """The shares of examples without text, without both and without image, see
    `drop_conditions`."""
    guidance_scale: float = 3.5
    """What a denoiser is told that reads the guidance scale."""
    keep_pooled: bool = False
    """Whether the pooled embedding is kept where the text is dropped."""
    gradient_checkpointing: str = "none"
    compute_dtype: Any = jnp.float32
    timestep_probabilities: np.ndarray | None = None
    """The probability of each timestep; None where all are equally likely."""
    layers: HiddenLayers | None = None
    """The hidden states that are a text's embeddings; see `encode_captions`."""
    shift_of: Callable[[Size], float] | None = None
    """How far the noise levels are moved for a height and width in pixels; None where the process
    says it."""
    tokenizers: tuple[Any, ...] = ()
    """Those of the text encoders, in a family whose texts speak of images."""
    given: GivenFrames | None = None
    """The frames of a clip that the network is shown; None where it is shown none."""
    lora: TrainedLora | None = None
    """The adapters that are trained; their networks are frozen. None where networks are trained."""

    @classmethod
    def of(
        cls,
        config: DenoisingConfig,
        family: Family,
        networks: Mapping[str, Network],
        scheduler: Scheduler,
        **options: Any,
    ) -> "DenoisingLoss":
        """Returns the loss for a recipe's options.

        scheduler: the checkpoint's, which says the process and what is predicted. options: further
        attributes, or others than the config's.

        Raises:
            ValueError: the noise levels shall depend on an image's size, and nothing says how.
        """
        if config.shift_by_size and options.get("shift_of") is None:
            raise ValueError(
                "shift_by_size cannot be where no pipeline moves noise levels by an image's size; "
                "leave it out, or give timestep_shift"
            )
        probabilities = timestep_probabilities(config.timestep_bias, scheduler.num_train_timesteps)
        own: dict[str, Any] = {
            "snr_gamma": config.snr_gamma,
            "noise_offset": config.noise_offset,
            "gradient_checkpointing": config.gradient_checkpointing,
            "compute_dtype": jnp.dtype(config.compute_dtype),
            "timestep_probabilities": probabilities,
            "guidance_scale": config.guidance_scale,
        }
        process = config.weighted(scheduler.forward_process)
        predicted = scheduler.prediction_type
        return cls(family, networks, process, predicted, **{**own, **options})

    def __post_init__(self) -> None:
        def ask(key: jax.Array) -> jax.Array:
            t = self.process.sample_time(key, self.timestep_probabilities)
            return self.process.weight(t, self.prediction_type, self.snr_gamma)

        # The process rejects options that it does not have, before anything is loaded.
        jax.eval_shape(ask, jax.eval_shape(lambda: seed_key(0)))

    def __call__(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the loss of each example, b, float32."""
        return self.with_draws(trained, frozen, batch, self.draw(batch, keys))

    def draw(self, batch: Batch, keys: jax.Array) -> Draws:
        """Draws the random numbers of each example from its key alone."""
        shape, encoding = self._latent_shape(batch), self.family.encoding
        if original_names(batch):
            encoding = self.family.edits.encoding(encoding)
        dropout = self.lora is not None and self.lora.dropout > 0
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)
        process = self._process_for(shape)

        def draw_one(key: jax.Array) -> Draws:
            latent, noise, offset, timestep, drop = jax.random.split(key, 5)
            mean = self.noise_offset * normal(offset, shape[-1:])
            u = jax.random.uniform(drop, dtype=jnp.float32)
            text, image = drop_conditions(u, self.conditioning_dropout)
            return Draws(
                encoding(lambda n: normal(latent, shape), 1, 1),
                normal(noise, shape) + mean,
                process.sample_time(timestep, self.timestep_probabilities),
                Dropped(text | (u < self.caption_dropout), image),
                jax.random.fold_in(key, _ADAPTERS) if dropout else None,
                self._shows_first(key, shape),
            )

        return jax.vmap(draw_one)(keys)

    def with_draws(self, trained: Params, frozen: Params, batch: Batch, draws: Draws) -> jax.Array:
        """Returns the loss of each example, b, float32, for these random numbers."""
        if self.lora is not None:
            networks = self.lora.adapted(
                self.networks, trained, self.compute_dtype, keys=draws.adapters
            )
            adapted = dataclasses.replace(self, networks=networks, lora=None)
            return adapted.with_draws({}, frozen, batch, draws)
        exact = {name: frozen[name] for name in (STATISTICS,) if name in frozen}
        weights = {**cast_params({**frozen, **trained}, self.compute_dtype), **exact}
        x0 = self._latents(weights, batch, draws.latent_noise)
        process, t = self.process, draws.timesteps
        noisy, timesteps = add_noise(process, x0, draws.noise, t), process.timesteps(t)
        conditions = self._conditions(weights, batch, draws.dropped)
        counted = batch.get("loss_weights")
        if self.given is not None and draws.first_frame is not None:
            shown = draws.first_frame
            conditions, counted = self.given.from_first(conditions, x0, noisy, timesteps, shown)
        prediction = self._denoiser(
            weights,
            noisy,
            timesteps,
            conditions,
            StepInputs(None, None, self._control_weights(len(x0))),
            gradient_checkpointing=self.gradient_checkpointing,
        )
        target = process.target(x0, draws.noise, t, self.prediction_type)
        error = squared_error(prediction, target, counted)
        weight = process.weight(t, self.prediction_type, self.snr_gamma)
        if PRIOR in batch:
            plain = process.weight(t, self.prediction_type, None)
            weight = jnp.where(batch[PRIOR], plain, weight)
        return error * weight

    @functools.cached_property
    def _denoiser(self) -> Denoiser:
        names = (*self.family.names("denoiser"), CONTROLNET.name)
        return self.family.denoiser({k: net for k, net in self.networks.items() if k in names})

    @functools.cached_property
    def _autoencoder(self) -> str | None:
        """The autoencoder's name; None where the denoiser learns from the pixels themselves."""
        return next(iter(self.family.names("autoencoder")), None)

    def _control_weights(self, b: int) -> jax.Array | None:
        """Returns 1 for each residual of the ControlNet, b m r; None without one."""
        nets = self._denoiser.controlnets
        if not nets:
            return None
        return jnp.ones((b, 1, len(nets[0].shapes["controlnet_down_blocks"]) + 1), jnp.float32)

    def _latent_shape(self, batch: Batch) -> tuple[int, ...]:
        if self._autoencoder is None:
            return tuple(batch["pixel_values"].shape[1:])
        form = self.family.latents(self.networks[self._autoencoder].config)
        if "moments" in batch:
            _, *frames, h, w, _ = batch["moments"].shape
            return *frames, h // form.fold, w // form.fold, form.channels
        _, *count, height, width, _ = batch["pixel_values"].shape
        return form.shape(height, width, *count)

    def _process_for(self, shape: tuple[int, ...]) -> Process:
        """Returns the process for latents h w c."""
        if self.shift_of is None or not isinstance(self.process, Flow):
            return self.process
        factor = self.family.latents(self.networks[self._autoencoder or ""].config).factor
        shift = self.shift_of((shape[-3] * factor, shape[-2] * factor))
        return dataclasses.replace(self.process, shift=shift)

    def _latents(self, weights: Params, batch: Batch, noise: jax.Array | None) -> jax.Array:
        if self._autoencoder is None:
            return from_bytes(batch["pixel_values"])
        vae = self.networks[self._autoencoder]
        if "moments" in batch:
            mean, logvar = jnp.split(batch["moments"].astype(jnp.float32), 2, axis=-1)
        else:
            mean, logvar = encode_pixels(vae, weights[self._autoencoder], batch["pixel_values"])
        latents = mean if noise is None else sample_latents(mean, logvar, noise)
        return self._scaled(weights, latents)

    def _scaled(self, weights: Params, latents: jax.Array) -> jax.Array:
        """Returns latents of the autoencoder as the denoiser takes them."""
        config = self.networks[self._autoencoder or ""].config
        normalize, known = self.family.latents(config).normalize, weights.get(STATISTICS)
        return scale_latents(config, latents, normalize=normalize, statistics=known)

    def _conditions(self, weights: Params, batch: Batch, dropped: Dropped) -> Conditions:
        """Returns the conditions without the axis of the branches, as training has one branch."""
        prompt = self._text(weights, batch, dropped.text)
        added: dict[str, Any] = {
            name: batch[name].astype(jnp.float32) for name in self.family.size_inputs
        }
        scales = jnp.full(len(dropped.text), self.guidance_scale, jnp.float32)
        added |= self._denoiser.guidance_inputs(scales)
        control: tuple[Any, ...] = ()
        if self._denoiser.controlnets:
            images = batch["conditioning_pixel_values"].astype(self.compute_dtype) / 255
            control = self._denoiser.embed(weights, (images[:, None],))
            control = tuple(hint[:, 0] for hint in control)
        channels = None
        if self.given is not None:
            channels, seen = self._given(self.given, weights, batch)
            added |= seen
        given = Conditions(*prompt[:3], channels, added=added or None, control=control).told(prompt)
        names = original_names(batch)
        if not names:
            return given
        originals = [self._image(weights, name, batch[name], dropped.image) for name in names]
        return self.family.edits.condition(given, originals, lambda x: self._scaled(weights, x))

    def _shows_first(self, key: jax.Array, shape: tuple[int, ...]) -> jax.Array | None:
        """Draws whether a clip, whose latents are f h w c, is shown its first frame."""
        if self.given is None or self.given.in_channels or shape[0] == 1:
            return None
        u = jax.random.uniform(jax.random.fold_in(key, _FIRST_FRAME), dtype=jnp.float32)
        return u < self.given.share

    def _given(
        self, given: GivenFrames, weights: Params, batch: Batch
    ) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """Returns the input channels that show frames of clips, and what CLIP sees of them."""
        name = self._autoencoder or ""
        cached = {key: batch[key] for key in (GIVEN, SEEN) if key in batch}
        found = cached or given.entries(self.networks, weights, name, batch)
        channels = None
        if GIVEN in found:
            step = self.family.latents(self.networks[name].config).frames
            latents = self._scaled(weights, found[GIVEN].astype(jnp.float32))
            channels = given.channels(latents, step)
        return channels, {"images": found[SEEN]} if SEEN in found else {}

    def _text(self, weights: Params, batch: Batch, dropped: jax.Array) -> Prompt:
        seen = seen_images(self.family, self.tokenizers, reference_sizes(batch))
        empty = weights["empty"] if seen is None else seen.empty
        if EMPTY in batch:
            empty = self._cached_empty(batch)
        given = {name: batch[name] for name in empty}
        chosen = {name: _replace(dropped, jnp.asarray(empty[name]), given[name]) for name in empty}
        if seen is not None:
            chosen |= seen.patches(batch)
        befores = {name: batch[name] for name in before_names(batch)}
        encoded = self._encode(weights, {**chosen, **befores}, seen)
        if not self.keep_pooled:
            return encoded
        return encoded._replace(pooled=self._encode(weights, given, seen).pooled)

    def _cached_empty(self, batch: Batch) -> dict[str, jax.Array]:
        """Returns the embeddings of empty captions of rows' own images, by their names."""
        (name,), lengths = self.family.embedding_columns, batch[EMPTY_LENGTHS]
        return {name: with_tail(batch[name], batch[EMPTY], lengths), LENGTHS: lengths}

    def _encode(
        self, weights: Params, text: Mapping[str, jax.Array], seen: SeenImages | None
    ) -> Prompt:
        cached = [text[name] for name in self.family.embedding_columns if name in text]
        if cached:
            befores = [text[name] for name in before_names(text)]
            embeddings = [embedding.astype(self.compute_dtype) for embedding in (*cached, *befores)]
            own: dict[str, Any] = dict(zip(Prompt._fields, embeddings[: len(cached)]))
            before = tuple(embeddings[len(cached) :])
            return Prompt(**own, lengths=text.get(LENGTHS), before=before)
        return encode_captions(self.family, self.networks, weights, text, self.layers, seen)

    def _image(self, weights: Params, name: str, given: jax.Array, dropped: jax.Array) -> jax.Array:
        """Returns the modes of an image's latents before the edit, unscaled.

        name: the name in a batch of its pixels or latents, which are given.
        """
        latents = given.astype(jnp.float32)
        if name.startswith(PIXELS):
            vae = self._autoencoder or ""
            latents, _ = encode_pixels(self.networks[vae], weights[vae], given)
        return _replace(dropped, jnp.float32(0), latents)


def _replace(dropped: jax.Array, value: jax.Array, given: jax.Array) -> jax.Array:
    """Returns the value, b ..., where an example's condition is dropped, else what is given."""
    return jnp.where(dropped.reshape(-1, *(1,) * (given.ndim - 1)), value, given)
