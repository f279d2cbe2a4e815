"""What a client asks for: a drawing, with the settings of `diffusax.serving`'s interfaces."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

TEXT, IMAGE, INPAINT, EDIT = "text-to-image", "image-to-image", "inpainting", "edit"
TASKS = TEXT, IMAGE, INPAINT, EDIT
"""The tasks of drawings."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Control:
    """A picture that steers a drawing through a ControlNet."""

    model: str
    """The ControlNet's name in the catalogue."""
    image: Any
    """What it sees, a PIL image: edges, depth, a pose."""
    scale: float = 1.0
    """What it counts for."""
    start: float = 0.0
    """The fraction of the run from which on it steers."""
    end: float = 1.0
    """The fraction of the run until which it steers."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawing:
    """A drawing to make. What is None takes the model's own value."""

    prompt: str = ""
    """What to draw; `<lora:name:0.8>` in it names an adapter of the catalogue."""
    negative_prompt: str = ""
    """What to steer away from."""
    model: str = ""
    """A name of the catalogue; empty for its default."""
    width: int | None = None
    """In pixels."""
    height: int | None = None
    """In pixels."""
    num_inference_steps: int | None = None
    """The sampler's steps."""
    guidance_scale: float | None = None
    """Classifier-free guidance; 1 and less turns it off."""
    image_guidance_scale: float | None = None
    """How closely an edit keeps to its picture (InstructPix2Pix)."""
    guidance_rescale: float = 0.0
    """phi of Lin et al. 2024, section 3.4."""
    sampler: str | None = None
    """A name of `diffusax.samplers.SAMPLER_NAMES`."""
    seed: int | None = None
    """The first image's seed; None takes one from the system."""
    num_images: int = 1
    """The number of images; image i is drawn by itself, with seed + i, and can be drawn again."""
    image: Any = None
    """A PIL image to start from, or to edit where the model is InstructPix2Pix's."""
    mask_image: Any = None
    """A PIL image, white where to draw anew."""
    strength: float | None = None
    """How much of the noise to add to the image, from 0 to 1."""
    mask_blur: float = 0.0
    """The radius in pixels by which the mask's edge is softened."""
    padding_mask_crop: int | None = None
    """Draws only the masked part and as many pixels around it, at full size."""
    controls: tuple[Control, ...] = ()
    """The ControlNets that steer, with their pictures."""
    adapters: Mapping[str, float] = dataclasses.field(default_factory=lambda: MappingProxyType({}))
    """The weights of LoRAs of the catalogue by name."""
    clip_skip: int | None = None
    """How many of the text encoder's last layers to leave out."""
    prompt_weighting: bool = True
    """Whether `(word:1.3)` is a weight."""
    long_prompt: bool = True
    """Whether all of a long prompt is read, in windows."""

    @property
    def task(self) -> str:
        """The task: one of TASKS.

        An edit is a drawing over an image with an image guidance scale, which the catalogue gives
        to drawings of models that edit.
        """
        if self.image is None:
            return TEXT
        if self.mask_image is not None:
            return INPAINT
        return IMAGE if self.image_guidance_scale is None else EDIT
