"""Trains a ControlNet (Zhang et al. 2023), a copy of a denoiser's encoder that steers it.

The loss is that of text to image with the denoiser frozen, as in diffusers' examples/controlnet.
"""

import dataclasses
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from diffusax.boundary.options import Share
from diffusax.checkpoints import resolve, save_network
from diffusax.images.reading import load_image
from diffusax.models.network import Params, cast_params
from diffusax.models.quantized import copied_dicts, quantize_in_place
from diffusax.models.unet.derived import controlnet_params
from diffusax.networks import Model, load_network
from diffusax.pipelines.tasks.steering import control_text_to_image
from diffusax.training.config import DenoiserConfig, ImagesValidationConfig
from diffusax.training.data.options import ControlDataConfig
from diffusax.training.optimizers import FineTuningOptimizerConfig
from diffusax.training.recipes.denoiser import Denoiser
from diffusax.training.recipes.row_examples import control_example


@dataclasses.dataclass(frozen=True)
class ControlNetValidationConfig(ImagesValidationConfig):
    """Images generated from prompts and from images that steer."""


@dataclasses.dataclass(frozen=True)
class ControlNetConfig(DenoiserConfig):
    """Train a ControlNet for a checkpoint, on images with captions and images that steer."""

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
    """The share of captions replaced by the empty one, so that the image alone steers."""
    data: ControlDataConfig = dataclasses.field(default_factory=ControlDataConfig)
    """The examples."""
    validation: ControlNetValidationConfig = dataclasses.field(
        default_factory=ControlNetValidationConfig
    )
    """The images that are generated during the run."""
    optimizer: FineTuningOptimizerConfig = dataclasses.field(
        default_factory=FineTuningOptimizerConfig
    )
    """The options of the optimizer."""


class ControlNet(Denoiser):
    """The recipe that trains a ControlNet: `diffusax.training.controlnet(config)`."""

    name = cached_as = "controlnet"
    config: ControlNetConfig
    make_example = staticmethod(control_example)

    def __init__(self, config: ControlNetConfig, *, compile_only: bool = False):
        """Reads the configs and opens the data set.

        compile_only: see `TextToImage`.

        Raises:
            ValueError: the checkpoint, the ControlNet, the data set or a validation image cannot be
                used, or options do not go together; says why.
        """
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
        self.images = [load_image(path) for path in config.validation.images]

    def load(
        self, name: str, dtype: Any = "float32", *, device: Any = None, weights: Any = None
    ) -> Params:
        """Loads the parameters of a network, or makes those of a new ControlNet."""
        if name != "controlnet":
            return super().load(name, dtype, device=device, weights=weights)
        if self.config.controlnet:
            folder = resolve(self.config.controlnet)
            return load_network(folder, dtype=dtype, device=device, weights=weights).params
        network, base = self.base.networks["controlnet"], self.base
        params = super().load(base.denoiser, device=device)
        made = controlnet_params(network, params, seed=self.config.seed)
        if weights is None:
            return made
        tree: Params = copied_dicts(cast_params(made, dtype))
        quantize_in_place(tree, weights)
        return tree

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Generates images for the validation prompts, steered, with the prompts beneath."""
        height, width = self.validation_size
        images = [image.resize((width, height), Image.Resampling.LANCZOS) for image in self.images]
        images *= len(self.config.validation.prompts) // len(images)
        return self.captioned(self.draw(trained, frozen, control_text_to_image, image=images))

    def save_networks(self, trained: Params, folder: Path) -> None:
        """Saves the ControlNet alone, float32."""
        network = self.base.networks["controlnet"]
        save_network(Model(network, trained["controlnet"]), folder)

    def card(self) -> dict[str, Any]:
        return {**super().card(), "tags": ["controlnet"]}


controlnet = ControlNet
