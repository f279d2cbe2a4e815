"""Trains a ControlNet (Zhang et al. 2023), a copy of a denoiser's encoder that steers it.

The loss is that of text to image with the denoiser frozen, as in diffusers' examples/controlnet.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from diffusax.boundary.options import Share
from diffusax.checkpoints import resolve, save_network
from diffusax.images.reading import load_image
from diffusax.models.network import Params
from diffusax.models.unet.derived import controlnet_params
from diffusax.networks import Model, load_network
from diffusax.pipelines.tasks.steering import control_text_to_image
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import ControlDataConfig
from diffusax.training.optimizers import FineTuningOptimizerConfig
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.denoiser_config import DenoiserConfig, PicturesValidationConfig
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.recipes.rows import control_example


@dataclasses.dataclass(frozen=True)
class ControlNetValidationConfig(PicturesValidationConfig):
    """Pictures drawn from prompts and from pictures that steer."""

    images: tuple[str, ...] = ()
    """The pictures that steer: one, or one for each of the prompts."""


@dataclasses.dataclass(frozen=True)
class ControlNetConfig(DenoiserConfig):
    """Train a ControlNet for a checkpoint, on pictures with captions and pictures that steer."""

    refused: ClassVar[tuple[str, ...]] = (
        *("from_scratch", "train_text_encoder", "text_encoder_learning_rate"),
    )
    refusal: ClassVar[str] = (
        "a ControlNet is trained alone, and what it steers must be trained already"
    )

    controlnet: str = ""
    """The ControlNet to start from: a folder with config.json and weights, or a Hub repository id;
    by default a copy of the denoiser's encoder."""
    caption_dropout: Share = 0.1
    """The share of captions replaced by the empty one, so that the picture alone steers."""
    data: ControlDataConfig = dataclasses.field(default_factory=ControlDataConfig)
    """The examples."""
    validation: ControlNetValidationConfig = dataclasses.field(
        default_factory=ControlNetValidationConfig
    )
    """The pictures that are drawn during the run."""
    optimizer: FineTuningOptimizerConfig = dataclasses.field(
        default_factory=FineTuningOptimizerConfig
    )
    """The options of the optimizer."""


def controlnet(config: ControlNetConfig, *, compile_only: bool = False) -> Recipe:
    """Returns the recipe for these options.

    compile_only: whether the recipe is compiled and not trained, so that no weights are read: a
        cache is not compared with the checkpoint's networks.

    Raises:
        ValueError: the checkpoint, the ControlNet, the data set or a validation image cannot be
            used, or options do not go together; says why.
    """
    return ControlNet(config, compile_only=compile_only)


class ControlNet(Denoiser):
    """The recipe that trains a ControlNet, with the configs read and the data set opened."""

    name = "controlnet"
    config: ControlNetConfig

    def __init__(self, config: ControlNetConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set; raises the errors of `controlnet`."""
        if config.lora.on and not config.controlnet:
            raise ValueError(
                "controlnet must be given with lora.rank: a new ControlNet ends in layers of "
                "zeros, which adapters do not train"
            )
        if config.lora.format != "diffusers":
            raise ValueError(
                f"lora.format={config.lora.format} cannot be written: kohya's files have no layers "
                "of a ControlNet; use diffusers"
            )
        data = config.data
        columns = (data.image_column, data.caption_column, data.conditioning_image_column)
        super().__init__(
            config,
            columns,
            controlnet=config.controlnet,
            compile_only=compile_only,
            caption_dropout=config.caption_dropout,
        )
        self.pictures = [load_image(path) for path in config.validation.images]

    def load(self, name: str, dtype: Any = "float32", *, device: Any = None) -> Params:
        """Loads the parameters of a network; those of a new ControlNet are made."""
        if name != "controlnet":
            return super().load(name, dtype, device=device)
        if self.config.controlnet:
            folder = resolve(self.config.controlnet)
            return load_network(folder, dtype=dtype, device=device).params
        network, base = self.base.networks["controlnet"], self.base
        params = super().load(base.denoiser, device=device)
        return controlnet_params(network, params, seed=self.config.seed)

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns a row's image, control image, tokens and, where the family has them, sizes.

        A row of a cache is returned as it is.
        """
        if self.cached:
            return row
        return control_example(self.config.data, self.base, self.size, row, rng)

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Generates images for the validation prompts, with the prompts beneath, steered.

        The seed is that of the run.
        """
        height, width = self.validation_size
        pictures = [
            picture.resize((width, height), Image.Resampling.LANCZOS) for picture in self.pictures
        ]
        count = len(self.config.validation.prompts)
        pictures *= count // len(pictures)
        return self.captioned(self.draw(trained, frozen, control_text_to_image, image=pictures))

    def save_networks(self, trained: Params, folder: Path) -> None:
        """Saves the ControlNet alone, float32."""
        network = self.base.networks["controlnet"]
        save_network(Model(network, trained["controlnet"]), folder)

    def card(self) -> dict[str, Any]:
        """Returns the model that this one steers."""
        return {
            "base_model": self.config.model,
            "pipeline_tag": "text-to-image",
            "tags": ["controlnet"],
        }
