"""Options from YAML files and key=value pairs."""

import difflib
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from diffusax.options import Options, option_types

ComputeDtype = Literal["float32", "bfloat16"]

O = TypeVar("O", bound="Options")  # noqa: E741


def from_values(cls: type[O], values: dict[Any, Any]) -> O:
    """The options with the values of a file, whose texts may be numbers: YAML reads 1e-4 as a text.

    Raises:
        ValueError: an option is unknown, or not of its type or in its range.
    """
    hints = option_types(cls)
    unknown = [name for name in values if name not in hints]
    if unknown:
        close = difflib.get_close_matches(str(unknown[0]), hints, 1)
        mend = f"; did you mean {close[0]}?" if close else ""
        raise ValueError(f"{cls.__name__} has no option {unknown[0]!r}{mend}")
    return cls(**{name: _from_text(value, hints[name]) for name, value in values.items()})


def read_config(cls: type[O], path: Path | None, pairs: Sequence[str] = ()) -> O:
    """The options of a YAML file, then those of "name=value" pairs.

    Raises:
        ValueError: the file cannot be read, or an option is unknown or cannot have its value.
    """
    values: dict[Any, Any] = {}
    if path is not None:
        try:
            values = _parse(path.read_text("utf-8"), f"--config {path}") or {}
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--config {path}: {error}") from None
        if not isinstance(values, dict):
            raise ValueError(f"--config {path} must be a mapping of options to values")
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes name=value (got {pair!r})")
        values[name.strip().replace("-", "_")] = _parse(text, f"--set {pair}")
    return from_values(cls, values)


def to_yaml(options: Options) -> str:
    """All options, so that `read_config` gives the same ones."""
    import yaml

    values = {k: list(v) if isinstance(v, tuple) else v for k, v in vars(options).items()}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def require_options(options: Options, names: Iterable[str]) -> None:
    """Checks that the options have been given.

    Raises:
        ValueError: one is empty.
    """
    for name in names:
        if not getattr(options, name):
            raise ValueError(f"--{name} must be given, or {name} in the --config file")


def _parse(text: str, source: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{source} is not YAML: {' '.join(str(error).split())}") from None


def _from_text(value: Any, hint: Any) -> Any:
    """A value from a file, closer to its type: numbers in texts, one value for a list of them."""
    kinds = _kinds(hint)
    if any(typing.get_origin(kind) is tuple for kind in kinds):
        return value if isinstance(value, list | tuple) or value is None else (value,)
    if isinstance(value, str) and str not in kinds and {int, float} & kinds:
        for number in (int, float):
            try:
                value = number(value)
                break
            except ValueError:
                pass
    if isinstance(value, float) and float not in kinds and int in kinds and value.is_integer():
        return int(value)
    return value


def _kinds(hint: Any) -> set[Any]:
    """The types that a value may have, without their ranges."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*map(_kinds, typing.get_args(hint)))
    if typing.get_origin(hint) is Annotated:
        return _kinds(typing.get_args(hint)[0])
    return {hint}
