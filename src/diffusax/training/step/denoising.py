"""The error of a denoiser's prediction at random timesteps (Ho et al. 2020, algorithm 1)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta

from diffusax.lora.trained import LoRA
from diffusax.models.autoencoders.latents import from_bytes, sample_latents, scale_latents
from diffusax.models.network import Network, Params, cast_params
from diffusax.pipelines.families import Denoiser, Family
from diffusax.pipelines.families.family import CONTROLNET
from diffusax.pipelines.plan.plan import Conditions, Prompt, StepInputs, Tokens
from diffusax.runtime.random.noise import seed_key
from diffusax.samplers import Scheduler
from diffusax.samplers.processes import Flow, FlowWeighting, Process, Scheme, add_noise
from diffusax.training.config import TrainConfig
from diffusax.training.options import ComputeDtype
from diffusax.training.step.losses import Dropped, drop_conditions, squared_error
from diffusax.training.step.step import Batch
from diffusax.training.step.timesteps import TimestepBiasConfig, timestep_probabilities

LENGTHS = "lengths"
"""The name in a batch of the number of tokens that are not padding, where the family has it."""
PRIOR = "prior"
"""The name in a batch of whether an example is of DreamBooth's class, not of its subject."""
STATISTICS = "statistics"
"""The name among the frozen parameters of the statistics that latents are normalised by."""
_OF_SCHEMES = {"logit_mean": "logit_normal", "logit_std": "logit_normal", "mode_scale": "mode"}
"""The options of weighting schemes."""
# What the key of an example is folded with for the adapters' dropout.
_ADAPTERS = 5


class Draws(NamedTuple):
    """The random numbers of a batch, with one row per example."""

    latent_noise: jax.Array | None
    """The noise that samples the autoencoder's distribution, b h w z; None where its mode is taken,
    and where there is no autoencoder."""
    noise: jax.Array
    """The noise that is added to the latents, with the noise offset, b h w z."""
    timesteps: jax.Array
    """The training times of the process, b."""
    dropped: Dropped
    """Whether the caption is replaced by the empty one, and the image by zeros, b each."""
    adapters: jax.Array | None = None
    """The random keys of the adapters' dropout, b; None without it."""


@dataclasses.dataclass(frozen=True)
class DenoisingConfig(TrainConfig):
    """The options of all recipes whose loss is the error of a denoiser."""

    model: str = ""
    """The checkpoint to start from: a folder in diffusers' layout, a .safetensors file, or a Hub
    repository id."""
    from_scratch: bool = False
    """Draw the trained networks' parameters afresh; the checkpoint gives their configs."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    """What the network predicts, also of the result; by default the checkpoint's own."""
    snr_gamma: Annotated[float, Meta(gt=0, le=1e6)] | None = None
    """The gamma of Min-SNR loss weights (Hang et al. 2023); 5 is usual; by default all errors
    weigh alike."""
    noise_offset: Annotated[float, Meta(ge=0, le=100)] = 0.0
    """The deviation of a mean that the noise gets per picture and channel, so that dark and bright
    pictures are learnt; 0.1 is usual."""
    gradient_checkpointing: Literal["none", "blocks", "full"] = "none"
    """What is computed again for the gradient to save memory: none; blocks (each resnet and
    transformer); full (levels too: the least memory, the most time)."""
    compute_dtype: ComputeDtype = "bfloat16"
    """The dtype that the networks compute in; parameters are float32."""
    timestep_bias: TimestepBiasConfig = dataclasses.field(default_factory=TimestepBiasConfig)
    """Timesteps drawn more often."""
    weighting_scheme: Scheme | None = None
    """Of flow matching: the density of the noise levels (logit_normal, the default, or mode), or
    the weight of their errors (sigma_sqrt or cosmap, all levels drawn alike), or none of both."""
    logit_mean: Annotated[float, Meta(ge=-100, le=100)] = 0.0
    """Of logit_normal: the mean, below 0 for more noise."""
    logit_std: Annotated[float, Meta(gt=0, le=100)] = 1.0
    """Of logit_normal: the deviation."""
    mode_scale: Annotated[float, Meta(ge=-1, le=1.75)] = 1.29
    """Of mode: how much more often levels in the middle are drawn."""
    guidance_scale: Annotated[float, Meta(ge=0, le=1000)] = 3.5
    """The guidance scale that a network is told while it is trained, for those that read it, such
    as FLUX.1-dev's."""

    def __post_init__(self) -> None:
        super().__post_init__()
        scheme = self.weighting_scheme
        for name, its in _OF_SCHEMES.items():
            if scheme != its and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{name} does nothing without weighting_scheme={its}; give both")

    def weighted(self, process: Process) -> Process:
        """Returns the process with these options' densities and weights of noise levels.

        Raises:
            ValueError: weighting_scheme is given, and the process has discrete noise levels.
        """
        if self.weighting_scheme is None:
            return process
        if not isinstance(process, Flow):
            raise ValueError(
                f"weighting_scheme={self.weighting_scheme} is for networks of flow matching, and "
                "this checkpoint has discrete noise levels; leave it out, see timestep_bias and "
                "snr_gamma"
            )
        numbers = {name: getattr(self, name) for name in _OF_SCHEMES}
        weighting = FlowWeighting(self.weighting_scheme, **numbers)
        return dataclasses.replace(process, weighting=weighting)


@dataclasses.dataclass(frozen=True, eq=False)
class DenoisingLoss:
    """The denoising loss of images with captions, and optionally with images as conditions.

    The entries of a batch are:
        pixel_values: b H W 3 uint8, or moments: b h w 2z, cached. The images to learn; they are
            their own latents where the family has no autoencoder.
        input_ids: b t, and input_ids_2 for a second text encoder; or encoder_hidden_states: b t d,
            and a pooled output: b p, cached under the family's `embedding_columns`.
        lengths: b, the tokens of each text that are not padding, where the family has it.
        time_ids: b 6, where the family has micro-conditioning.
        original_pixel_values: b H W 3 uint8, or original_latents: b h w z, cached. For edits alone:
            the images before them, further channels of the input as in InstructPix2Pix, or
            images to look at in a family that has these.
        prior: b bool. For DreamBooth alone: which examples are of the class; `snr_gamma` does not
            weigh them (diffusers examples/dreambooth/train_dreambooth.py).
        conditioning_pixel_values: b H W 3 uint8. For ControlNet alone: the control images.
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
    lora: LoRA | None = None
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
        """
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
        shape = self._latent_shape(batch)
        dropout = self.lora is not None and self.lora.dropout > 0
        normal = functools.partial(jax.random.normal, dtype=jnp.float32)

        def draw_one(key: jax.Array) -> Draws:
            latent, noise, offset, timestep, drop = jax.random.split(key, 5)
            mean = self.noise_offset * normal(offset, shape[-1:])
            u = jax.random.uniform(drop, dtype=jnp.float32)
            text, image = drop_conditions(u, self.conditioning_dropout)
            return Draws(
                self.family.encoding(lambda n: normal(latent, shape), 1, 1),
                normal(noise, shape) + mean,
                self.process.sample_time(timestep, self.timestep_probabilities),
                Dropped(text | (u < self.caption_dropout), image),
                jax.random.fold_in(key, _ADAPTERS) if dropout else None,
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
        prediction = self._denoiser(
            weights,
            add_noise(process, x0, draws.noise, t),
            process.timesteps(t),
            self._conditions(weights, batch, draws.dropped),
            StepInputs(None, None, self._control_weights(len(x0))),
            gradient_checkpointing=self.gradient_checkpointing,
        )
        target = process.target(x0, draws.noise, t, self.prediction_type)
        error = squared_error(prediction, target, batch.get("loss_weights"))
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

    def _latent_shape(self, batch: Batch) -> tuple[int, int, int]:
        if self._autoencoder is None:
            _, h, w, channels = batch["pixel_values"].shape
            return h, w, channels
        form = self.family.latents(self.networks[self._autoencoder].config)
        if "moments" in batch:
            _, h, w, _ = batch["moments"].shape
            return h // form.fold, w // form.fold, form.channels
        return form.shape(*batch["pixel_values"].shape[1:3])

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
            pictures = batch["conditioning_pixel_values"].astype(self.compute_dtype) / 255
            control = self._denoiser.embed(weights, (pictures[:, None],))
            control = tuple(hint[:, 0] for hint in control)
        image = self._image(weights, batch, dropped.image)
        given = Conditions(*prompt, added=added or None, control=control)
        if image is None:
            return given
        return self.family.edits.condition(given, image, lambda x: self._scaled(weights, x))

    def _text(self, weights: Params, batch: Batch, dropped: jax.Array) -> Prompt:
        empty = weights["empty"]
        given = {name: batch[name] for name in empty}
        chosen = {name: _replace(dropped, empty[name], given[name]) for name in empty}
        encoded = self._encode(weights, chosen)
        if not self.keep_pooled:
            return encoded
        return encoded._replace(pooled=self._encode(weights, given).pooled)

    def _encode(self, weights: Params, text: Mapping[str, jax.Array]) -> Prompt:
        cached = [text[name] for name in self.family.embedding_columns if name in text]
        if cached:
            embeddings = (embedding.astype(self.compute_dtype) for embedding in cached)
            return Prompt(*embeddings)._replace(lengths=text.get(LENGTHS))
        return encode_captions(self.family, self.networks, weights, text)

    def _image(self, weights: Params, batch: Batch, dropped: jax.Array) -> jax.Array | None:
        """Returns the modes of the latents before the edit, unscaled, as a denoiser takes them."""
        if "original_latents" in batch:
            latents = batch["original_latents"].astype(jnp.float32)
        elif "original_pixel_values" in batch:
            vae, pixels = self._autoencoder or "", batch["original_pixel_values"]
            latents, _ = encode_pixels(self.networks[vae], weights[vae], pixels)
        else:
            return None
        return _replace(dropped, jnp.float32(0), latents)


def encode_pixels(vae: Network, params: Params, pixels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encodes images b H W 3 uint8 to mean and log variance of their latents, b h w z float32."""
    mean, logvar = vae.apply(params, from_bytes(pixels), method="encode")
    return mean.astype(jnp.float32), logvar.astype(jnp.float32)


def encode_captions(
    family: Family, networks: Mapping[str, Network], params: Params, ids: Mapping[str, jax.Array]
) -> Prompt:
    """Encodes tokens b t, which have their names in a batch, to embeddings."""
    encoders = family.text_encoders
    return family.encode(
        tuple(networks[encoder.name] for encoder in encoders),
        tuple(params[encoder.name] for encoder in encoders),
        Tokens(tuple(ids[ids_name(e.tokenizer)] for e in encoders), lengths=ids.get(LENGTHS)),
    )


def embedding_entries(family: Family, prompt: Prompt) -> dict[str, jax.Array]:
    """Returns embeddings by their names in a batch, with their lengths where the family has it."""
    found = dict(zip(family.embedding_columns, prompt))
    return found if prompt.lengths is None else {**found, LENGTHS: prompt.lengths}


def is_text(name: str) -> bool:
    """Returns whether an entry of a batch holds a text's tokens."""
    return name == LENGTHS or name.startswith(ids_name("tokenizer"))


def ids_name(tokenizer: str) -> str:
    """Returns the name in a batch of the ids of a tokenizer: input_ids or input_ids_2."""
    return tokenizer.replace("tokenizer", "input_ids")


def _replace(dropped: jax.Array, value: jax.Array, given: jax.Array) -> jax.Array:
    """Returns the value, b ..., where an example's condition is dropped, else what is given."""
    return jnp.where(dropped.reshape(-1, *(1,) * (given.ndim - 1)), value, given)
