"""The fields of requests as dataclasses, whose types and ranges msgspec checks and describes."""

import dataclasses
import re
import reprlib
from collections.abc import Collection, Mapping
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from diffusax.boundary.convert import Mismatch, Words, by_type, convert, field_types, in_words
from diffusax.serving.drawing import ControlSettings, Settings, Weights
from diffusax.serving.errors import Refused

T = TypeVar("T")

_OUT_OF_RANGE = re.compile(r"Expected `\w+` (?:[<>]|of length)")
"""What msgspec says of a value of the right type."""

Picture = Annotated[
    str, Meta(description="A PNG, JPEG or WebP picture: base64, or a data URI with base64.")
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ControlFields(ControlSettings):
    """A picture that steers a ControlNet."""

    image: Picture


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrawingFields(Settings):
    """What to generate. Fields that are left out take the model's own values."""

    image: Picture | None = None
    mask_image: Picture | None = None
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
    """Makes a dataclass of a request's values.

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
