"""Options as dataclasses: their types and ranges are declared, and checked by msgspec."""

import dataclasses
import reprlib
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Meta

from diffusax.boundary.convert import Words, convert_fields, field_types, in_words

Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Weight = Annotated[float, Meta(ge=0, le=1e6)]
Seed = Annotated[int, Meta(ge=0, le=2**32 - 1)]

_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlevel, _BRIEFLY.maxlist, _BRIEFLY.maxdict = 2, 4, 4


@dataclasses.dataclass(frozen=True)
class Options:
    """A set of options, each of the type and in the range that its annotation declares.

    A set may be an option of another one, and then says in `group` under which name, for messages.

    Raises:
        ValueError: an option is not; names it, what it may be and what it is.
    """

    group: ClassVar[str] = ""
    """What stands before its options' names, such as "ema."."""

    def __post_init__(self) -> None:
        hints = field_types(type(self))
        values = {name: getattr(self, name) for name in hints}
        for name, value in convert_fields(hints, values, _WORDS, group=self.group).items():
            object.__setattr__(self, name, value)


def is_group(kind: Any) -> bool:
    """Whether a type of an option is a set of options."""
    return isinstance(kind, type) and issubclass(kind, Options)


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "nothing",
}
_WORDS = Words("{group}{name} must be {must} (got {value})", (in_words(_NAMES),), _BRIEFLY.repr)


ImageCount = Annotated[int, Meta(ge=1, le=4096)]
Steps = Annotated[int, Meta(ge=1, le=100_000)]
Pixels = Annotated[int, Meta(ge=1, le=32_768)]
Scale = Annotated[float, Meta(ge=-10_000, le=10_000)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
