"""The fields of requests as dataclasses, whose types and ranges msgspec checks and describes."""

import dataclasses
import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from msgspec import Meta

from diffusax.boundary.convert import Mismatch, Words, by_type, convert, field_types, in_words
from diffusax.serving.requests.errors import Refused
from diffusax.serving.requests.generation import (
    ControlSettings,
    ImageSettings,
    Prompt,
    Settings,
    TextSettings,
    Weights,
)

T = TypeVar("T")

_OUT_OF_RANGE = re.compile(r"Expected `\w+` (?:[<>]|of length)")
"""What msgspec says of a value of the right type."""

SentImage = Annotated[
    str, Meta(description="A PNG, JPEG or WebP image: base64, or a data URI with base64.")
]
SentImages = Annotated[
    tuple[SentImage, ...],
    Meta(max_length=15, description="Further images, for models that look at several."),
]
SentVideo = Annotated[
    str,
    Meta(
        description="A video in MP4, MOV, WebM, Matroska or AVI, or an animated GIF, WebP or PNG: "
        "base64, or a data URI with base64."
    ),
]
SentMaskVideo = Annotated[
    str,
    Meta(
        description="A video, or an image for all frames, white where to generate anew, for models "
        "that read a mask beside their video: as video is sent, or as images are."
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlFields(ControlSettings):
    """A ControlNet that steers, with its image."""

    image: SentImage


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationFields(Settings):
    """What to generate. Fields that are left out take the model's own values."""

    image: SentImage | None = None
    more_images: SentImages = ()
    mask_image: SentImage | None = None
    video: SentVideo | None = None
    mask_video: SentMaskVideo | None = None
    last_image: SentImage | None = None
    controls: tuple[ControlFields, ...] = ()


Deadline = Annotated[
    float, Meta(gt=0, le=86_400, description="The seconds within which it must be done, or fails.")
]

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlevel, _BRIEFLY.maxlist, _BRIEFLY.maxdict, _BRIEFLY.maxstring = 2, 4, 4, 60
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    dict: "a JSON object",
    list: "a list",
    type(None): "null",
    Weights: "numbers from -100 to 100 by name",
    dict[str, Any]: "a JSON object",
    list[Any]: "a list",
    list[str]: "a list of texts",
}
_CONTROLS = {
    tuple[ControlFields, ...]: "a list of objects with model, image, scale, start and end",
    SentImages: "a list of at most 15 images in base64",
}
_RULES = by_type(_CONTROLS), in_words(_NAMES)
_WORDS = Words("{name} must be {must} (got {value})", _RULES, _BRIEFLY.repr)


def read_fields(
    kind: type[T],
    values: Mapping[str, Any],
    *,
    strict: bool = True,
    tolerant: bool = False,
    ignored: Collection[str] = (),
    unused: Collection[str] = (),
) -> T:
    """Makes a dataclass from a request's values.

    Arguments:
        kind: the dataclass.
        values: the values by name; None takes the default.
        strict: whether texts are no numbers, as in JSON; in forms everything is a text.
        tolerant: whether values with other names are left out, and not refused.
        ignored: names of other values that are left out.
        unused: names of fields that nothing uses here, whose values are of their types in any
            range.

    Raises:
        Refused: a value is not of its type or not in its range, or its name is unknown.
    """
    hints = field_types(kind)
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in hints:
            if tolerant or name in ignored:
                continue
            shown = _BRIEFLY.repr(name)
            text = f"{shown} is no field here; use some of {', '.join(hints)}"
            raise Refused(text, param=name[:100], code="unknown_parameter")
        if value is None:
            continue
        try:
            found[name] = convert(value, hints[name], strict=strict)
        except Mismatch as wrong:
            if name not in unused or not _OUT_OF_RANGE.match(wrong.reason):
                raise Refused(_WORDS.tell(name, wrong), param=name) from None
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        defaults = (field.default, field.default_factory)
        if field.name not in found and defaults == (dataclasses.MISSING,) * 2:
            raise Refused(f"{field.name} must be given", param=field.name, code="missing_parameter")
    return kind(**found)


IGNORED = ("input_fidelity", "safety_identifier", "complexity")
"""Fields of OpenAI's newest models, which change nothing here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFields(TextSettings):
    """What the images API takes: OpenAI's fields, our settings, controls and a deadline."""

    prompt: Prompt = dataclasses.field()
    n: Annotated[int, Meta(ge=1, le=10)] = 1
    size: Annotated[str, Meta(description='Width and height, such as "512x512", or "auto".')] = (
        "auto"
    )
    response_format: (
        Annotated[
            Literal["b64_json", "url"],
            Meta(description="By default an address for DALL-E's names, and else base64."),
        ]
        | None
    ) = None
    output_format: Literal["png", "jpeg", "webp"] = "png"
    output_compression: Annotated[int, Meta(ge=0, le=100)] | None = None
    stream: bool = False
    partial_images: Annotated[int, Meta(ge=0, le=3)] = 0
    user: Any = None
    quality: Any = None
    style: Any = None
    moderation: Any = None
    background: Any = None
    controls: tuple[ControlFields, ...] = ()
    deadline: Deadline | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditFields(ImageSettings, ImageFields):
    """What edits take besides: an image, a mask that is transparent where to generate, and ours."""

    image: Any = None
    images: Any = None
    mask: Any = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class EditForm(EditFields):
    """A form of an edit; image and mask are files."""

    image: SentImage
    mask: SentImage | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariationForm(EditForm):
    """A form of a variation, which needs no prompt; image is a file."""

    prompt: Prompt = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageAnswer:
    """One image, with its seed."""

    seed: int
    revised_prompt: str
    """The prompt, which nothing revises."""
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
