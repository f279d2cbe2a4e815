"""Trains text to image: the denoising loss on latents, as in diffusers' examples/text_to_image."""

import dataclasses
from typing import Any

import numpy as np
from PIL import Image

from diffusax.boundary.options import Share
from diffusax.models.network import Params
from diffusax.pipelines.tasks import tasks
from diffusax.training.data.batches import Element
from diffusax.training.data.examples import CaptionedDataConfig
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.denoiser_config import DenoiserConfig
from diffusax.training.recipes.recipe import Recipe
from diffusax.training.recipes.rows import caption_example


@dataclasses.dataclass(frozen=True)
class TextToImageConfig(DenoiserConfig):
    """Train a text-to-image model on pictures and captions."""

    caption_dropout: Share = 0.1
    """The share of captions replaced by the empty one, for classifier-free guidance."""
    data: CaptionedDataConfig = dataclasses.field(default_factory=CaptionedDataConfig)
    """The examples."""


def text_to_image(config: TextToImageConfig, *, compile_only: bool = False) -> Recipe:
    """Returns the recipe for these options.

    compile_only: whether the recipe is compiled and not trained, so that no weights are read: a
        cache is not compared with the checkpoint's networks.

    Raises:
        ValueError: the checkpoint or the data set cannot be used, or options do not go together;
            says why.
    """
    return TextToImage(config, compile_only=compile_only)


class TextToImage(Denoiser):
    """The recipe that trains text to image, with the configs read and the data set opened."""

    name = "text-to-image"
    config: TextToImageConfig

    def __init__(self, config: TextToImageConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set; raises the errors of `text_to_image`."""
        columns = (config.data.image_column, config.data.caption_column)
        dropout = config.caption_dropout
        super().__init__(config, columns, compile_only=compile_only, caption_dropout=dropout)

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Returns a row's pixels, tokens and, where the family has them, sizes.

        A row of a cache is returned as it is.
        """
        return (
            row
            if self.cached
            else caption_example(self.config.data, self.base, self.size, row, rng)
        )

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Generates images for the validation prompts, with the prompts beneath.

        The seed is that of the run.
        """
        return self.captioned(self.draw(trained, frozen, tasks.text_to_image))

    def card(self) -> dict[str, Any]:
        """Returns the model that this one was trained from."""
        return {"base_model": self.config.model, "pipeline_tag": self.name}
