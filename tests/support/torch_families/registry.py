"""The registry of tiny pipelines: how one is built and what a small call takes."""

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable
from typing import Any

import diffusers
import torch

TEXT = "text-to-image"
IMAGE = "image-to-image"
INPAINT = "inpainting"
VIDEO = "video"
AUDIO = "audio"
OTHER = "other"

# What nearly every call takes, where the pipeline knows it.
USUAL: dict[str, Any] = {
    "prompt": "a red apple",
    "negative_prompt": "blurry",
    "num_inference_steps": 2,
    "output_type": "np",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """A pipeline class of diffusers with tiny random components.

    Attributes:
        name: Name of the class in diffusers.
        task: What it makes; one of the constants above.
        components: Makes the arguments of the constructor.
        inputs: What the small call takes, beside the usual; a None leaves out a usual one.
        prepare: What is done to a new pipeline before the call.
    """

    name: str
    task: str
    components: Callable[[], dict[str, Any]]
    inputs: dict[str, Any]
    prepare: Callable[[Any], Any] | None = None

    @property
    def pipeline_class(self) -> Any:
        """The class itself."""
        return getattr(diffusers, self.name)

    def __call__(self, seed: int = 0) -> tuple[Any, dict[str, Any]]:
        """A new pipeline, whose weights `seed` decides, and the arguments of a small call."""
        torch.manual_seed(seed)
        accepted = inspect.signature(self.pipeline_class.__init__).parameters
        components = self.components()
        pipe = self.pipeline_class(**{k: v for k, v in components.items() if k in accepted})
        pipe.set_progress_bar_config(disable=True)
        if self.prepare is not None:
            self.prepare(pipe)
        return pipe, self.arguments()

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of a small call, without the generator."""
        known = inspect.signature(self.pipeline_class.__call__).parameters
        usual = {k: v for k, v in USUAL.items() if k in known}
        merged = {**usual, **self.inputs}
        return {k: v() if callable(v) else v for k, v in merged.items() if v is not None}


REGISTRY: dict[str, Family] = {}
# Classes that have an entry which cannot run here, and what they need.
UNMET: dict[str, str] = {}


def add(
    name: str,
    task: str,
    components: Callable[[], dict[str, Any]],
    *,
    prepare: Callable[[Any], Any] | None = None,
    needs: tuple[str, ...] = (),
    **inputs: Any,
) -> None:
    """Puts a class into the registry. Inputs that are functions are called for each call.

    Of the components, those are used that the class accepts. A class that needs a package which
    is not installed goes to `UNMET` instead.
    """
    if name in REGISTRY:
        raise ValueError(f"{name} is in the registry already.")
    lacking = [package for package in needs if importlib.util.find_spec(package) is None]
    if lacking:
        UNMET[name] = f"needs {', '.join(lacking)}"
        return
    REGISTRY[name] = Family(name, task, components, inputs, prepare)
