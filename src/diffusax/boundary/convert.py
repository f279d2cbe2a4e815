"""Converts values from outside to their declared types, by msgspec, and tells mistakes.

Callers bring the words: a `Words` is the sentence, and the rules that say what the value must be.
"""

import dataclasses
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class Mismatch(ValueError):
    """A value is not of its type or not in its range; the text is msgspec's.

    `value` and `hint` are the value and the type; `reason` is the text without the place inside
    the value.
    """

    def __init__(self, text: str, value: Any, hint: Any):
        super().__init__(text)
        self.value, self.hint = value, hint
        self.reason = text.partition(" - at `$")[0]


Rule = Callable[[Mismatch], str | None]
"""Says what a value must be, or None where the rule has no words for the mistake."""


@dataclasses.dataclass(frozen=True)
class Words:
    """Tells mistakes in a caller's words.

    sentence: has the places {name}, {value} and {must}, and others that the caller fills.
    rules: the first that has words for a mistake says what stands for {must}.
    show: writes the value.
    """

    sentence: str
    rules: tuple[Rule, ...]
    show: Callable[[Any], str]

    def tell(self, name: str, wrong: Mismatch, **places: str) -> str:
        """Gives the sentence about the value of the option `name`."""
        must = next(text for rule in self.rules if (text := rule(wrong)) is not None)
        return self.sentence.format(name=name, value=self.show(wrong.value), must=must, **places)


def convert(value: Any, hint: Any, *, strict: bool = True) -> Any:
    """Turns a value into a type: lists become tuples, 1 becomes 1.0, NumPy's numbers Python's.

    Args:
        value: anything.
        hint: a type with its ranges (`msgspec.Meta`); Any takes the value as it is.
        strict: whether texts are no numbers.

    Raises:
        Mismatch: the value has another type, or is out of its range.
    """
    if hint is Any:
        return value
    value = unboxed(value)
    try:
        return msgspec.convert(value, hint, strict=strict)
    except (msgspec.ValidationError, OverflowError) as error:
        raise Mismatch(str(error), value, hint) from None
    except UnicodeEncodeError:
        text = "Expected text of valid Unicode, got half a surrogate pair"
        raise Mismatch(text, value, hint) from None


def convert_fields(
    hints: Mapping[str, Any], values: Mapping[str, Any], words: Words, **places: str
) -> dict[str, Any]:
    """Converts values by name, each to its type.

    Args:
        hints: the types by name, see `field_types`.
        values: by name, all or some of them.
        words: tell a mistake.
        **places: what stands in further places of their sentence.

    Raises:
        ValueError: a value is not of its type or not in its range, in the caller's words.
    """
    converted = {}
    for name, value in values.items():
        try:
            converted[name] = convert(value, hints[name])
        except Mismatch as wrong:
            raise ValueError(words.tell(name, wrong, **places)) from None
    return converted


def field_types(cls: Any) -> Mapping[str, Any]:
    """Gives the types of a dataclass's fields by name, with their ranges."""
    # mypy takes no class for hashable, which a cached function's arguments must be.
    return _field_types(cls)


def unboxed(value: Any) -> Any:
    """Turns a number or an array of NumPy, JAX or PyTorch into Python's; leaves anything else."""
    return value.tolist() if hasattr(value, "tolist") else value


def plain(value: Any) -> Any:
    """Does what `unboxed` does, also inside lists and tuples, which become lists."""
    return list(map(plain, value)) if isinstance(value, list | tuple) else unboxed(value)


def shortened(value: Any) -> str:
    """Writes a value as Python does, in one line of at most 80 characters."""
    shown = " ".join(repr(value).split())
    return shown if len(shown) <= 80 else f"{shown[:77]}..."


def alternatives(values: Sequence[Any], between: str = ", ", last: str = " or ") -> str:
    """Writes values in a row, such as 'a', 'b' or 'c'."""
    *first, end = map(repr, values)
    return f"{between.join(first)}{last}{end}" if first else end


def message(wrong: Mismatch) -> str:
    """Says it as msgspec does."""
    return str(wrong)


def reason(wrong: Mismatch) -> str:
    """Says it as msgspec does, to stand inside a sentence, without the place."""
    text = wrong.reason.replace("`", "")
    return text[:1].lower() + text[1:]


def limit(wrong: Mismatch) -> str | None:
    """Says which limit of its range a number is beyond, such as "at least 1"."""
    found = re.match(r"Expected `\w+` (>=|<=) (\S+)", wrong.reason)
    if found is None:
        return None
    return f"at {'least' if found[1] == '>=' else 'most'} {found[2].removesuffix('.0')}"


def number(wrong: Mismatch) -> str:
    """Says whether an integer or a number is asked for, or a list; for types of nothing else."""
    kind = "an integer" if "`int" in wrong.reason else "a number"
    return f"{kind} or a list of them" if "array" in wrong.reason.partition(", got")[0] else kind


def choice(text: str, *joints: str, none_first: bool = False, same_type: bool = False) -> Rule:
    """Makes a rule that lists the choices of a `Literal`, of one that may be None, or of a list.

    Args:
        text: with a place {} for the choices.
        *joints: what stands between them, see `alternatives`.
        none_first: whether None comes first and not last.
        same_type: whether the rule has words only for values of the choices' type.
    """

    def rule(wrong: Mismatch) -> str | None:
        found = _choices(wrong.hint)
        if not found or (same_type and not wrong.reason.startswith("Invalid enum value")):
            return None
        if none_first:
            found = tuple(sorted(found, key=lambda value: value is not None))
        return text.format(alternatives(found, *joints))

    return rule


def by_type(texts: Mapping[Any, str]) -> Rule:
    """Makes a rule that has a text for each whole type."""
    return lambda wrong: texts.get(wrong.hint)


def in_words(names: Mapping[Any, str]) -> Rule:
    """Makes a rule that describes types and their ranges, given names for plain types."""

    def describe(hint: Any) -> str:
        origin, args = typing.get_origin(hint), typing.get_args(hint)
        if dataclasses.is_dataclass(hint):
            return f"a group of options, such as {hint.group}{dataclasses.fields(hint)[0].name}"  # type: ignore[union-attr]
        if origin in (types.UnionType, typing.Union):
            return " or ".join(map(describe, args))
        if origin is Literal:
            return f"one of {', '.join(map(str, args))}"
        if origin is tuple:
            return f"a list, and each of it {describe(args[0])}"
        if origin is Annotated:
            ranges = (_range(meta) for meta in args[1:] if isinstance(meta, Meta))
            return " ".join([describe(args[0]), *filter(None, ranges)])
        return names[hint]

    return lambda wrong: describe(wrong.hint)


def checked_texts(texts: Any, name: str = "prompt") -> list[str]:
    """Returns `texts` as a list. name: the argument that an error names.

    Raises:
        ValueError: it is neither a string nor a non-empty list of strings that can be encoded.
    """
    texts = [texts] if isinstance(texts, str) else texts
    if not isinstance(texts, Sequence) or isinstance(texts, bytes):
        raise ValueError(
            f"{name} must be a string or a list of strings, not {type(texts).__name__} ({texts!r})"
        )
    if not texts:
        raise ValueError(f"{name} must not be an empty list; give at least one string")
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise ValueError(
                f"{name} must be a string or a list of strings, but number {i} is of type "
                f"{type(text).__name__} ({text!r})"
            )
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} must be valid Unicode, but {text!r} has half a surrogate pair at position "
                f"{error.start}; remove it"
            ) from None
    return list(texts)


@functools.cache
def _field_types(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, include_extras=True)
    return types.MappingProxyType({f.name: hints[f.name] for f in dataclasses.fields(cls)})


def _choices(hint: Any) -> tuple[Any, ...]:
    """All values of the `Literal`s in a type, and None after them where it may be that."""
    args = typing.get_args(hint)
    if typing.get_origin(hint) is Literal:
        return args
    nested = [value for arg in args for value in _choices(arg)]
    return (*nested, None) if nested and type(None) in args else tuple(nested)


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
    if meta.max_length is not None:
        bounds.append(f"of length {meta.max_length} at most")
    return " ".join(bounds)
