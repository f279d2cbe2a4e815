"""What a training loop needs to know of a task."""

from pathlib import Path
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh
from PIL import Image

from diffusax.models.network import Params
from diffusax.training.data.batches import Element
from diffusax.training.data.sources import Source
from diffusax.training.step import Batch


class Recipe(Protocol):
    """A task. It holds no parameters: the loop has them, and hands them in.

    Worker processes get a copy, so it must be possible to pickle it.
    """

    name: str
    source: Source
    """The rows of the data set."""

    def shapes(self) -> Params:
        """What is trained, by component, as shapes."""

    def trained(self, mesh: Mesh | None = None) -> Params:
        """What is trained, loaded or drawn afresh; files are read straight to a mesh's devices."""

    def frozen(self, mesh: Mesh | None = None) -> Params:
        """What the loss and the validation use besides."""

    def frozen_shapes(self) -> Params:
        """What `frozen` gives, as shapes; no parameters are read."""

    def example(self, row: dict[str, Any], rng: np.random.Generator) -> Element:
        """An example made of a row; raises where the row cannot be used."""

    def loss(self, trained: Params, frozen: Params, batch: Batch, keys: jax.Array) -> jax.Array:
        """The loss of each example, b; each has a random key."""

    def validate(self, trained: Params, frozen: Params) -> list[Image.Image]:
        """Pictures that show what parameters do, with captions where they have some.

        They are always from the same random numbers.
        """

    def save(self, trained: Params, folder: Path) -> None:
        """Writes trained parameters as a folder that diffusers opens."""

    def card(self) -> dict[str, Any]:
        """What the model card says in front: base_model, license, pipeline_tag."""
