"""Trains networks that generate from noise alone: diffusers' unconditional_image_generation.

The loss is the squared error of the noise (Ho et al. 2020, equation 14), or that of the predicted
image weighted by the signal-to-noise ratio (Salimans and Ho 2022, section 4).
"""

import dataclasses
import math
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from msgspec import Meta
from PIL import Image

from diffusax.boundary.options import Count
from diffusax.checkpoints import read_model_index, resolve
from diffusax.checkpoints.files import component_folder
from diffusax.checkpoints.networks import read_network
from diffusax.models import UNet2DConfig
from diffusax.models.network import Network, Params, initialize_params
from diffusax.networks import Model, UNet2DModel, load_network
from diffusax.pipelines import DDPMPipeline, DiffusionPipeline
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.components.loading import class_for
from diffusax.pipelines.families import UNCONDITIONAL
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.tasks.tasks import unconditional as generate_from_noise
from diffusax.samplers import DDPMScheduler, Scheduler
from diffusax.training.config import DenoisingConfig, ValidationConfig
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import cut_images
from diffusax.training.data.opening import open_images
from diffusax.training.data.options import ImageDataConfig
from diffusax.training.options import require_options
from diffusax.training.recipes.base_model import draw_images, read_scheduler
from diffusax.training.recipes.denoiser import ZERO_AT_START
from diffusax.training.step.denoising import DenoisingLoss
from diffusax.training.step.step import Batch

_UNET = "unet"
_CHANNELS = 3
# The network and the size of diffusers' train_unconditional.py.
_LEVELS: dict[str, Any] = {
    "block_out_channels": (128, 128, 256, 256, 512, 512),
    "down_block_types": (*("DownBlock2D",) * 4, "AttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "AttnUpBlock2D", *("UpBlock2D",) * 4),
}
_RESOLUTION = 64


@dataclasses.dataclass(frozen=True)
class UnconditionalValidationConfig(ValidationConfig):
    """Images that are generated, always from the same noise."""

    images: Annotated[int, Meta(ge=1, le=1024)] = 16
    """The number of images to generate."""
    steps: Annotated[int, Meta(ge=1, le=1000)] = 1000
    """The number of sampler steps."""


@dataclasses.dataclass(frozen=True)
class UnconditionalConfig(DenoisingConfig):
    """Train a model that generates from noise alone, on images without captions."""

    model: str = ""
    """What to start from: the checkpoint of a DDPMPipeline or a DDIMPipeline, or a folder with the
    config.json of a UNet2DModel; by default a new model with the UNet of diffusers' script."""
    from_scratch: bool = False
    """Draw the parameters afresh; model gives the configs alone. A new model always does."""
    prediction_type: Literal["epsilon", "v_prediction", "sample"] | None = None
    """What the network predicts, also of the result; by default the checkpoint's own, or epsilon.
    The error of sample is weighted by the signal-to-noise ratio, unless snr_gamma is given."""
    num_train_timesteps: Count | None = None
    """The number of noise levels; by default the checkpoint's own, or 1000."""
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid"] | None = None
    """How the noise grows from level to level; by default the checkpoint's own, or linear."""
    data: ImageDataConfig = dataclasses.field(default_factory=ImageDataConfig)
    """The examples."""
    validation: UnconditionalValidationConfig = dataclasses.field(
        default_factory=UnconditionalValidationConfig
    )
    """The images that are generated during the run."""


class Unconditional:
    """The recipe that trains a UNet to generate from noise: `unconditional(config)`."""

    name = "unconditional"

    def __init__(self, config: UnconditionalConfig):
        """Reads the configs and opens the data set.

        Raises:
            ValueError: the checkpoint or the data set cannot be used, or options do not go
                together; says why.
        """
        require_options(config, ("data.path",))
        self.config = config
        self.start = start = _start(config)
        self.size = _size(config, start.network)
        _check_network(start.network, start.folder)
        # The result generates at the size that it has learnt.
        own = dataclasses.replace(start.network.config, sample_size=self.size)
        self.network = dataclasses.replace(start.network, config=own)
        column = config.data.image_column
        self.source = open_images(
            config.data,
            (column,),
            image_column=column,
            side=self.size,
            factor=start.network.config.downsampling,
            leave_out=config.output,
        )
        scheduler = start.scheduler
        weighted: dict[str, Any] = {}
        if scheduler.prediction_type == "sample" and config.snr_gamma is None:
            weighted = {"snr_gamma": math.inf}
        self.denoising = DenoisingLoss.of(
            config, UNCONDITIONAL, {_UNET: self.network}, scheduler, **weighted
        )
        if config.validation.every:
            scheduler.schedule(config.validation.steps)

    def shapes(self) -> Params:
        return {_UNET: self.network.shapes}

    def trained(self, mesh: Mesh | None = None) -> Params:
        if self.start.folder is not None and not self.config.from_scratch:
            return {_UNET: load_network(self.start.folder, dtype="float32", device=mesh).params}
        seed, shapes = self.config.seed, self.network.shapes
        return {_UNET: initialize_params(shapes, seed=seed, zero=ZERO_AT_START)}

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Returns no parameters; the empty caption, which the loss asks for, has no entries."""
        return {"empty": {}}

    def frozen_shapes(self) -> Params:
        return self.frozen()

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns the pixels of a row, H W 3 uint8, under "pixel_values", and its mask if any."""
        data = self.config.data
        (pixels,), _, weights = cut_images(data, self.size, row, [row[data.image_column]], rng)
        return {"pixel_values": pixels, **weights}

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        return self.denoising(trained, frozen, batch, keys)

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        options = self.config.validation
        components = Components.of(
            UNCONDITIONAL,
            {_UNET: self.network},
            dict(trained),
            tokenizers={},
            scheduler=self.start.scheduler,
            options={},
        )
        call = Call(
            batch_size=options.images, num_inference_steps=options.steps, seed=self.config.seed
        )
        return draw_images(components, generate_from_noise, call)

    def save(self, trained: Params, folder: Path) -> None:
        """Saves a whole pipeline, float32."""
        model, scheduler = Model(self.network, trained[_UNET]), self.start.scheduler
        self.start.pipeline_class(unet=model, scheduler=scheduler).save_pretrained(folder)

    def card(self) -> dict[str, Any]:
        base = {"base_model": self.config.model} if self.config.model else {}
        return {**base, "pipeline_tag": "unconditional-image-generation"}


unconditional = Unconditional


class _Start(NamedTuple):
    """What a run starts from."""

    network: Network
    scheduler: Scheduler
    folder: Path | None = None
    """The folder with the network's parameters; None for a new network."""
    pipeline_class: Any = DDPMPipeline


def _start(config: UnconditionalConfig) -> _Start:
    options: dict[str, Any] = {
        "prediction_type": config.prediction_type,
        "num_train_timesteps": config.num_train_timesteps,
        "beta_schedule": config.beta_schedule,
    }
    changes = {name: value for name, value in options.items() if value is not None}
    if not config.model:
        size = config.data.resolution or _RESOLUTION
        network = Network(UNet2DModel, UNet2DConfig(sample_size=size, **_LEVELS))
        return _Start(network, DDPMScheduler(**changes))
    folder = resolve(config.model, weights=not config.from_scratch)
    if not (folder / "model_index.json").is_file():
        return _Start(_read_network(folder), DDPMScheduler(**changes), folder)
    cls = class_for(DiffusionPipeline, folder)
    if cls.family is not UNCONDITIONAL:
        raise ValueError(
            f"model={config.model} is {cls.family.name}, which generates from prompts; use "
            "`diffusax train text-to-image`"
        )
    _, listed, _ = read_model_index(folder)
    scheduler = read_scheduler(folder, "scheduler", listed["scheduler"][1], **changes)
    own = component_folder(folder, _UNET)
    return _Start(_read_network(own), scheduler, own, cls)


def _read_network(folder: Path) -> Network:
    network = read_network(folder)
    if network.class_name != "UNet2DModel":
        raise ValueError(
            f"unconditional trains a UNet2DModel; {folder} holds a {network.class_name}"
        )
    return network


def _size(config: UnconditionalConfig, network: Network) -> int:
    """Returns the side of the training images in pixels: the option's, or the network's own."""
    own, factor = network.config.sample_size, network.config.downsampling
    size = config.data.resolution or (max(own) if isinstance(own, tuple) else own)
    if size is None:
        raise ValueError(
            f"data.resolution must be given, as the config of {config.model} has no sample_size"
        )
    if size % factor:
        low = max(size // factor, 1) * factor
        raise ValueError(
            f"data.resolution must be divisible by {factor}, which the network's levels halve (got "
            f"{size}); use {low} or {low + factor}"
        )
    return int(size)


def _check_network(network: Network, folder: Path | None) -> None:
    """Raises ValueError for a network that images alone cannot train."""
    config = network.config
    if (config.in_channels, config.out_channels) != (_CHANNELS, _CHANNELS):
        raise ValueError(
            "unconditional trains networks with in_channels=3 and out_channels=3; that of "
            f"{folder} has {config.in_channels} and {config.out_channels}"
        )
    if config.conditional:
        raise ValueError(
            f"unconditional trains networks without classes; that of {folder} has "
            f"class_embed_type={config.class_embed_type!r} and "
            f"num_class_embeds={config.num_class_embeds}"
        )
    if config.time_embedding_type == "fourier":
        raise ValueError(
            "unconditional trains networks at discrete timesteps; time_embedding_type='fourier' of "
            f"{folder} is for continuous noise levels, use 'positional' or 'learned'"
        )
