"""What a training loop needs to know of a task."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from PIL import Image

from diffusax.models.network import Params
from diffusax.training.data import Prepare
from diffusax.training.sources import Source
from diffusax.training.step import Loss


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A task: parameters, a loss, examples, and what to do with the result."""

    name: str
    params: Params
    """What is trained, by component."""
    frozen: Params
    """What the loss uses besides."""
    loss: Loss
    source: Source
    """The rows of the data set."""
    prepare: Prepare
    """(row, random numbers) -> example."""
    save: Callable[[Params, Path], None]
    """Writes trained parameters as a folder that diffusers opens."""
    validate: Callable[[Params], list[Image.Image]] | None = None
    """Pictures that show what parameters do; always from the same random numbers."""
    info: dict[str, Any] = dataclasses.field(default_factory=dict)
    """For the model card: base_model, license."""
