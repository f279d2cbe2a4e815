"""The fields of requests as dataclasses, whose types and ranges msgspec checks and describes."""

import dataclasses
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from diffusax.serving.errors import Refused
from diffusax.typed.convert import Mismatch, Words, by_type, convert, field_types, in_words

T = TypeVar("T")

Text = Annotated[str, Meta(max_length=1_000_000)]
Name = Annotated[str, Meta(max_length=300)]
Pixels = Annotated[int, Meta(ge=8, le=16_384)]
Scale = Annotated[float, Meta(ge=-100, le=100)]
Share = Annotated[float, Meta(ge=0, le=1)]
Picture = Annotated[
    str, Meta(description="A PNG, JPEG or WebP picture: base64, or a data URI with base64.")
]

# What several APIs take has its description here.
Prompt = Annotated[Text, Meta(description="The prompt; <lora:name:0.8> in it names a LoRA.")]
NegativePrompt = Annotated[Text, Meta(description="What to steer away from.")]
Model = Annotated[Name, Meta(description="A model's name; the default model for none.")]
Sampler = Annotated[Name, Meta(description="A sampler's name; the model's own for none.")]
Steps = Annotated[int, Meta(ge=1, le=1000, description="The sampler's steps.")]
Guidance = Annotated[
    Scale, Meta(description="The scale of classifier-free guidance; 1 and less turns it off.")
]
ImageGuidance = Annotated[Scale, Meta(description="How closely an edit keeps to its image.")]
Rescale = Annotated[Share, Meta(description="How much guidance is rescaled (Lin et al. 2024).")]
Seed = Annotated[
    int, Meta(ge=0, le=2**32 - 1, description="Image i has the seed plus i; random for none.")
]
Images = Annotated[int, Meta(ge=1, le=1000, description="The number of images.")]
Strength = Annotated[Share, Meta(description="How much to change the image.")]
Blur = Annotated[
    float, Meta(ge=0, le=1024, description="The pixels by which the mask's edge is softened.")
]
Padding = Annotated[
    int,
    Meta(
        ge=0, le=4096, description="Generates only the masked part, with so many pixels around it."
    ),
]
ClipSkip = Annotated[
    int, Meta(ge=0, le=100, description="The text encoder's last layers to leave out.")
]
Weighting = Annotated[bool, Meta(description="Whether (word:1.3) is a weight.")]
LongPrompt = Annotated[bool, Meta(description="Whether all of a long prompt is read.")]
Weights = dict[str, Scale]
Adapters = Annotated[Weights, Meta(description="The weights of LoRAs by name.")]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlFields:
    """A picture that steers a ControlNet."""

    model: Name
    """The name of a ControlNet of the catalogue."""
    image: Picture
    scale: Scale = 1.0
    start: Share = 0.0
    end: Share = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawingFields:
    """What to generate. Fields that are left out take the model's own values."""

    prompt: Prompt = ""
    negative_prompt: NegativePrompt = ""
    model: Model = ""
    width: Pixels | None = None
    height: Pixels | None = None
    num_inference_steps: Steps | None = None
    guidance_scale: Guidance | None = None
    image_guidance_scale: ImageGuidance | None = None
    guidance_rescale: Rescale = 0.0
    sampler: Sampler | None = None
    seed: Seed | None = None
    num_images: Images = 1
    image: Picture | None = None
    mask_image: Picture | None = None
    strength: Strength | None = None
    mask_blur: Blur = 0.0
    padding_mask_crop: Padding | None = None
    controls: tuple[ControlFields, ...] = ()
    adapters: Adapters = dataclasses.field(default_factory=dict)
    clip_skip: ClipSkip | None = None
    prompt_weighting: Weighting = True
    long_prompt: LongPrompt = True


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
) -> T:
    """Makes a dataclass of a request's values.

    Arguments:
        kind: the dataclass.
        values: the values by name; None takes the default.
        strict: whether texts are no numbers, as in JSON; in forms everything is a text.
        tolerant: whether values with other names are left out, and not refused.
        ignored: names of other values that are left out.

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
        if value is not None:
            found[name] = _converted(name, value, hints[name], strict)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        defaults = (field.default, field.default_factory)
        if field.name not in found and defaults == (dataclasses.MISSING,) * 2:
            raise Refused(f"{field.name} must be given", param=field.name, code="missing_parameter")
    return kind(**found)


def _converted(name: str, value: Any, hint: Any, strict: bool) -> Any:
    try:
        return convert(value, hint, strict=strict)
    except Mismatch as wrong:
        raise Refused(_WORDS.tell(name, wrong), param=name) from None
