"""The fields of OpenAI's images API, with ours beside them."""

import dataclasses
import re
from typing import Annotated, Any, Literal

from msgspec import Meta

from diffusax.serving.drawing import (
    Adapters,
    Blur,
    ClipSkip,
    Guidance,
    ImageGuidance,
    LongPrompt,
    Model,
    NegativePrompt,
    Padding,
    Prompt,
    Rescale,
    Sampler,
    Seed,
    Steps,
    Strength,
    Weighting,
)
from diffusax.serving.errors import Refused
from diffusax.serving.web.fields import ControlFields, Deadline, Picture

IGNORED = ("input_fidelity", "safety_identifier", "complexity")
"""Fields of OpenAI's newest models, which change nothing here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFields:
    """What the images API takes: OpenAI's fields, and ours from negative_prompt on."""

    prompt: Prompt
    model: Model = ""
    n: Annotated[int, Meta(ge=1, le=10)] = 1
    size: Annotated[str, Meta(description='Width and height, such as "512x512", or "auto".')] = (
        "auto"
    )
    response_format: Literal["b64_json", "url"] = "b64_json"
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool = False
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0
    user: Any = None
    quality: Any = None
    style: Any = None
    moderation: Any = None
    background: Any = None
    negative_prompt: NegativePrompt = ""
    seed: Seed | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    guidance_rescale: Rescale = 0.0
    sampler: Sampler | None = None
    adapters: Adapters = dataclasses.field(default_factory=dict)
    clip_skip: ClipSkip | None = None
    prompt_weighting: Weighting = True
    long_prompt: LongPrompt = True
    controls: tuple[ControlFields, ...] = ()
    deadline: Deadline | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditFields(ImageFields):
    """What edits take beside: a picture, a mask whose transparent part is drawn anew, and ours."""

    image: Any = None
    images: Any = None
    mask: Any = None
    strength: Strength | None = None
    image_guidance_scale: ImageGuidance | None = None
    mask_blur: Blur = 0.0
    padding_mask_crop: Padding | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditForm(EditFields):
    """A form of an edit; image and mask are files."""

    image: Picture
    mask: Picture | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageAnswer:
    """One image, with its seed."""

    seed: int
    b64_json: str | None = None
    url: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImagesAnswer:
    """The images of a request."""

    created: int
    data: list[ImageAnswer]
    output_format: str
    size: str
    background: str
    usage: dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenAIModel:
    """A model."""

    id: str
    created: int
    object: str
    owned_by: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class OpenAIModels:
    """All models."""

    object: str
    data: list[OpenAIModel]


def read_size(size: str) -> tuple[int | None, int | None]:
    """Returns the width and the height that a size names; None for those of the model.

    Raises:
        Refused: it is not of the form "WxH".
    """
    if size == "auto":
        return None, None
    found = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", size)
    if found is None:
        raise Refused(
            f'size must be "auto" or width and height such as "512x512" (got {size[:40]!r})',
            param="size",
        )
    return int(found[1]), int(found[2])
