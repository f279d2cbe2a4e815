"""Text to image: the denoising loss on latents, as in diffusers' examples/text_to_image."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from msgspec import Meta
from PIL import Image

from diffusax.models.network import Model, Params, initialize_params
from diffusax.options import Share
from diffusax.pipelines import DiffusionPipeline, programs, run, tasks
from diffusax.pipelines.arguments import Call
from diffusax.pipelines.components import Components
from diffusax.training.base_model import BaseModel
from diffusax.training.cached import CachedSource, is_cache
from diffusax.training.config import TrainConfig
from diffusax.training.data import (
    DataConfig,
    Element,
    caption_ids,
    choose_caption,
    picture_size,
    read_pixels,
)
from diffusax.training.denoising import DenoisingLoss, encode_captions
from diffusax.training.opening import open_data
from diffusax.training.options import ComputeDtype, require_options
from diffusax.training.recipe import Recipe
from diffusax.training.sources import Source
from diffusax.training.step import Batch
from diffusax.training.timesteps import TimestepBiasConfig, timestep_probabilities

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


def text_to_image(config: TextToImageConfig) -> Recipe:
    """The recipe for these options.

    Raises:
        ValueError: the checkpoint or the data set cannot be used, or options do not go together;
            says why.
    """
    return TextToImage(config)


class TextToImage:
    """The recipe, with the checkpoint's configs read and the data set opened."""

    name = "text-to-image"

    def __init__(self, config: TextToImageConfig):
        """See `text_to_image`."""
        require_options(config, ("model", "data"))
        self.config = config
        self.base = base = BaseModel.open(config.model, prediction_type=config.prediction_type)
        self.size = picture_size(config, base.default_size, base.factor)
        self.source: Source
        self.cached, self.embedded = is_cache(config.data), False
        if self.cached:
            _check_without_pictures(config)
            self.source = cache = CachedSource.open(config.data, base.load)
            self.embedded = "encoder_hidden_states" in cache.shapes
        else:
            self.source = open_data(config, (config.image_column, config.caption_column))
        if self.embedded and config.train_text_encoder:
            raise ValueError(
                f"{config.data} holds text embeddings, so train_text_encoder has nothing to train; "
                "write it again without --text-embeddings"
            )
        self._check_validation()
        self.components = ("unet", "text_encoder") if config.train_text_encoder else ("unet",)
        scheduler = base.scheduler
        self.denoising = DenoisingLoss(
            base.family,
            base.networks,
            scheduler.alphas_cumprod,
            scheduler.prediction_type,
            snr_gamma=config.snr_gamma,
            noise_offset=config.noise_offset,
            caption_dropout=config.caption_dropout,
            gradient_checkpointing=config.gradient_checkpointing,
            compute_dtype=jnp.dtype(config.compute_dtype),
            timestep_probabilities=timestep_probabilities(config, len(scheduler.alphas_cumprod)),
        )

    def shapes(self) -> Params:
        """What is trained, as shapes."""
        return {name: self.base.networks[name].shapes for name in self.components}

    def trained(self, mesh: Mesh | None = None) -> Params:
        """What is trained, float32."""
        if not self.config.from_scratch:
            return {name: self.base.load(name, device=mesh).params for name in self.components}
        return {
            name: initialize_params(
                self.base.networks[name].shapes,
                seed=self.config.seed + i,
                zero=_ZERO if name == "unet" else (),
            )
            for i, name in enumerate(self.components)
        }

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Networks that are not trained, in the dtype of the computation, and the empty caption."""
        dtype = self.config.compute_dtype
        empty = jnp.asarray(caption_ids(self.base.tokenizer, ""))
        drawn = bool(self.config.validate_every)
        names = ["vae"] if drawn or not self.cached else []
        if "text_encoder" not in self.components and (drawn or not self.embedded):
            names.append("text_encoder")
        frozen = {name: self.base.load(name, dtype, device=mesh).params for name in names}
        if not self.embedded:
            return {**frozen, "empty": empty}
        params = {"text_encoder": self.base.load("text_encoder").params}
        hidden = encode_captions(self.base.family, self.base.networks, params, empty[None])[0]
        return {**frozen, "empty": hidden.astype(dtype)}

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Pixels and tokens; a cached row is an example already."""
        if self.cached:
            return row
        pixels = read_pixels(self.config, self.size, row, rng)
        caption = choose_caption(row[self.config.caption_column], rng)
        return {"pixel_values": pixels, "input_ids": caption_ids(self.base.tokenizer, caption)}

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """See `DenoisingLoss`."""
        return self.denoising(trained, frozen, batch, keys)

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """The validation prompts' pictures, from the seed of the run."""
        base, params = self.base, {**frozen, **trained}
        params.pop("empty")
        components = Components(
            base.family,
            base.networks,
            params,
            {"tokenizer": base.tokenizer},
            base.scheduler,
            dict(base.family.options),
        )
        call = Call(
            prompt=list(self.config.validation_prompts),
            height=self.size,
            width=self.size,
            num_inference_steps=self.config.validation_steps,
            guidance_scale=self.config.validation_guidance,
            seed=self.config.seed,
        )
        job = tasks.text_to_image(components, call)
        state = programs.denoise(
            components.denoiser,
            components.denoiser_params,
            programs.first_state(job.plan.latents),
            job.plan,
            np.int32(0),
            np.int32(len(job.schedule)),
        )
        return run.output(components, state[0], "pil", tiled=False)

    def save(self, trained: Params, folder: Path) -> None:
        """The checkpoint with its trained parts replaced, all in float32."""
        models: dict[str, Any] = {
            name: Model(self.base.networks[name], trained[name]) for name in self.components
        }
        pipe = DiffusionPipeline.from_pretrained(
            self.base.folder, dtype="float32", scheduler=self.base.scheduler, **models
        )
        pipe.save_pretrained(folder)

    def card(self) -> dict[str, Any]:
        """The model that this one was trained from."""
        return {"base_model": self.config.model, "pipeline_tag": self.name}

    def _check_validation(self) -> None:
        config = self.config
        if config.validate_every and not config.validation_prompts:
            raise ValueError(
                f"validate_every={config.validate_every} has nothing to draw; give "
                "validation_prompts"
            )
        if config.validation_prompts and not config.validate_every:
            raise ValueError("validation_prompts are never drawn; give validate_every")
        if config.validate_every:
            self.base.scheduler.schedule(config.validation_steps)


def _check_without_pictures(config: TextToImageConfig) -> None:
    """Raises ValueError where options of pictures are given for a cache of latents."""
    names = ("resolution", "center_crop", "random_flip", "image_column", "caption_column")
    given = [n for n in names if getattr(config, n) != getattr(DataConfig, n)]
    if given:
        raise ValueError(
            f"{config.data} holds latents, on which {' and '.join(given)} can do nothing; give "
            "them to cache-latents"
        )
