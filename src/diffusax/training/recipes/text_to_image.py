"""Trains text to image: the denoising loss on latents, as in diffusers' examples/text_to_image."""

import dataclasses

from diffusax.boundary.options import Share
from diffusax.training.config import DenoiserConfig
from diffusax.training.data.options import CaptionedDataConfig
from diffusax.training.recipes.denoiser import Denoiser


@dataclasses.dataclass(frozen=True)
class TextToImageConfig(DenoiserConfig):
    """Train a text-to-image model on images and captions."""

    caption_dropout: Share = 0.1
    """The share of captions replaced by the empty one, for classifier-free guidance."""
    data: CaptionedDataConfig = dataclasses.field(default_factory=CaptionedDataConfig)
    """The examples."""


class TextToImage(Denoiser):
    """The recipe that trains text to image: `diffusax.training.text_to_image(config)`."""

    name = "text-to-image"
    config: TextToImageConfig

    def __init__(self, config: TextToImageConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set.

        compile_only: whether the recipe is compiled and not trained, so that no weights are read: a
            cache is not compared with the checkpoint's networks.

        Raises:
            ValueError: the checkpoint or the data set cannot be used, or options do not go
                together; says why.
        """
        columns = (config.data.image_column, config.data.caption_column)
        dropout = config.caption_dropout
        super().__init__(config, columns, compile_only=compile_only, caption_dropout=dropout)


text_to_image = TextToImage
