"""Options as dataclasses: their types and ranges are declared, and checked by msgspec."""

import dataclasses
import math
import reprlib
import types
import typing
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import Meta

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
        kinds = option_types(type(self))
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), kinds[field.name]
            try:
                converted = msgspec.convert(value, kind)
            except (msgspec.ValidationError, OverflowError):
                raise ValueError(
                    f"{self.group}{field.name} must be {_in_words(kind)} "
                    f"(got {_BRIEFLY.repr(value)})"
                ) from None
            object.__setattr__(self, field.name, converted)


def option_types(cls: Any) -> dict[str, Any]:
    """The types of a class's options by name, with their ranges."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def is_group(kind: Any) -> bool:
    """Whether a type of an option is a set of options."""
    return isinstance(kind, type) and issubclass(kind, Options)


def _in_words(hint: Any) -> str:
    if is_group(hint):
        return f"a group of options, such as {hint.group}{dataclasses.fields(hint)[0].name}"
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return " or ".join(map(_in_words, typing.get_args(hint)))
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return f"one of {', '.join(map(str, args))}"
    if origin is tuple:
        return f"a list, and each of it {_in_words(args[0])}"
    if origin is Annotated:
        return " ".join(
            [_in_words(args[0]), *(_range(meta) for meta in args[1:] if isinstance(meta, Meta))]
        )
    return _NAMES[hint]


_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Path: "a path",
    type(None): "nothing",
}


def _range(meta: Meta) -> str:
    bounds = []
    if meta.gt is not None:
        bounds.append(f"above {meta.gt}")
    if meta.ge is not None:
        bounds.append(f"from {meta.ge}")
    if meta.lt is not None:
        bounds.append(f"below {meta.lt}")
    if meta.le is not None:
        bounds.append(f"up to {'infinity' if meta.le == math.inf else meta.le}")
    if meta.min_length:
        bounds.append("that is not empty")
    return " ".join(bounds)
