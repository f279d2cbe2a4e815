"""What the training loop needs to know of a task."""

from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from diffusax.images.clips import SUFFIXES, encode_video
from diffusax.models.network import Params
from diffusax.training.data.batches import Element
from diffusax.training.data.sources import Source
from diffusax.training.step.step import Batch


class Clip(NamedTuple):
    """A video that a validation generates."""

    frames: list[Image.Image]
    fps: float
    """The frames per second."""
    suffix: str
    """That of its file: .mp4, .gif or .webp."""

    def write(self, file: Path) -> None:
        """Writes a file of that suffix."""
        kind = next(kind for kind, suffix in SUFFIXES.items() if suffix == self.suffix)
        file.write_bytes(encode_video(self.frames, self.fps, media_type=kind).data)


class Recipe(Protocol):
    """A task. It holds no parameters: the loop has them and passes them in.

    Worker processes get a copy, so it must be possible to pickle a recipe. A recipe that has
    `networks`, by component, tells a mesh's tensor axis how many heads their attention has.
    One that has `lora`, the plan of its adapters, goes on only with the same alphas. One that has
    `choose` says what a step takes of a batch, see `InstructPix2Pix.choose`.
    """

    name: str

    @property
    def source(self) -> Source:
        """The rows of the data set."""

    def shapes(self) -> Params:
        """Returns the trained parameters as shapes, by component."""

    def trained(self, mesh: Mesh | None = None) -> Params:
        """Loads or initialises the trained parameters; reads files straight to a mesh's devices."""

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """Loads the other parameters that the loss and the validation use."""

    def frozen_shapes(self) -> Params:
        """Returns the result of `frozen` as shapes, without reading parameters."""

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """Makes an example of a row; raises an error where the row cannot be used."""

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """Returns the loss of each example, b; each has a random key."""

    def validate(self, trained: Params, frozen: Params) -> "list[Image.Image] | Clip":
        """Generates images that show what the parameters can do, with captions if they have some.

        Of videos it is one clip, with all of them side by side.

        The random numbers are always the same.
        """

    def save(self, trained: Params, folder: Path) -> None:
        """Writes trained parameters as a folder that diffusers opens."""

    def card(self) -> dict[str, Any]:
        """Returns the metadata of the model card: base_model, license, pipeline_tag.

        What is under "usage" is no metadata: Markdown that says how to use the result, in which
        {location} is its folder or repository; by default it is opened as a pipeline.
        """
