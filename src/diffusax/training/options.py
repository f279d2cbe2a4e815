"""Reads options from YAML files and key=value pairs."""

import difflib
import operator
import types
import typing
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from diffusax.boundary.convert import field_types
from diffusax.boundary.options import Options, is_group

ComputeDtype = Literal["float32", "bfloat16"]

O = TypeVar("O", bound="Options")  # noqa: E741


def from_values(cls: type[O], values: dict[Any, Any]) -> O:
    """Makes options from a file's values, where texts may be numbers: YAML reads 1e-4 as a text.

    values: the values by name; that of a group of options, such as ema, is a mapping.

    Raises:
        ValueError: an option is unknown, or not of its type or in its range.
    """
    return _from_values(cls, values, cls)


def read_config(cls: type[O], path: Path | None, pairs: Sequence[str] = ()) -> O:
    """Reads the options of a YAML file, then those of "name=value" pairs, such as "ema.start=0.9".

    Raises:
        ValueError: the file cannot be read, or an option is unknown or its value is not valid.
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
        names = name.strip().replace("-", "_").split(".")
        _put(values, names, _parse(text, f"--set {pair}"))
    return from_values(cls, values)


def to_yaml(options: Options) -> str:
    """Writes all options as YAML, from which `read_config` makes the same options."""
    import yaml

    return yaml.safe_dump(msgspec.to_builtins(options), sort_keys=False, allow_unicode=True)


def by_name(options: Options) -> dict[str, Any]:
    """Returns all options by their names on the command line, such as ema.start."""
    found: dict[str, Any] = {}
    for name, value in vars(options).items():
        nested = isinstance(value, Options)
        found.update(by_name(value) if nested else {f"{options.group}{name}": value})
    return found


def require_options(options: Options, names: Iterable[str]) -> None:
    """Checks that the options have been given.

    Raises:
        ValueError: an option is empty.
    """
    for name in names:
        if not operator.attrgetter(name)(options):
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} must be given, or {name} in the --config file")


def _from_values(cls: type[O], values: dict[Any, Any], root: type[Options]) -> O:
    """root: the options that these belong to, which a mistake's mend is looked for in."""
    kinds = field_types(cls)
    converted: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            raise ValueError(_unknown(cls, name, root))
        kind = kinds[name]
        if is_group(kind) and isinstance(value, dict | None):
            converted[name] = _from_values(kind, value or {}, root)
        else:
            converted[name] = _from_text(value, kind)
    return cls(**converted)


def _unknown(cls: type[Options], name: Any, root: type[Options]) -> str:
    """Returns the error for an unknown option, with the name that may have been meant."""
    known = list(_names(root))
    # The last part of a name also matches, and underscores in the place of points.
    spellings = {name.rpartition(".")[2]: name for name in reversed(known)}
    spellings |= {name.replace(".", "_"): name for name in known} | {name: name for name in known}
    wanted = f"{cls.group}{name}"
    close = difflib.get_close_matches(wanted, spellings, 1)
    mend = f"; did you mean {spellings[close[0]]}?" if close else ""
    return f"{root.__name__} has no option {wanted!r}{mend}"


def _names(cls: Any) -> Iterator[str]:
    """Options and groups of them."""
    for name, kind in field_types(cls).items():
        yield f"{cls.group}{name}"
        if is_group(kind):
            yield from _names(kind)


def _put(values: dict[Any, Any], names: Sequence[str], value: Any) -> None:
    """Sets values[names[0]][names[1]]... to the value."""
    *groups, last = names
    for group in groups:
        inner = values.get(group)
        if not isinstance(inner, dict | None):
            raise ValueError(f"{group} must be a mapping of options to values (got {inner!r})")
        values[group] = inner = inner or {}
        values = inner
    values[last] = value


def _parse(text: str, source: str) -> Any:
    import yaml

    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(f"{source} is not YAML: {' '.join(str(error).split())}") from None


def _from_text(value: Any, hint: Any) -> Any:
    """Converts a value of a file towards its type: texts to numbers, one value to a list."""
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
    """Returns the types that a value may have, without their ranges."""
    if isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union:
        return set().union(*map(_kinds, typing.get_args(hint)))
    if typing.get_origin(hint) is Annotated:
        return _kinds(typing.get_args(hint)[0])
    return {hint}
