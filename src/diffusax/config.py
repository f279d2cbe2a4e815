"""Config dataclasses <-> diffusers' and transformers' config.json."""

import dataclasses
from typing import Any, ClassVar, Protocol, TypeVar


class Config(Protocol):
    """A frozen dataclass whose fields are the options of a config.json that its network reads.

    `class_name` is the upstream class. `fixed` gives the options that exist upstream but have only
    one supported value (a tuple lists several); `ignored` those that change nothing in the result.
    """

    __dataclass_fields__: ClassVar[dict[str, Any]]
    class_name: ClassVar[str]
    fixed: ClassVar[dict[str, Any]]
    ignored: ClassVar[frozenset[str]]


C = TypeVar("C", bound=Config)


def config_from_dict(cls: type[C], data: dict[str, Any], *, source: str = "config.json") -> C:
    """The dataclass `cls` filled from a parsed config.json; lists become tuples.

    Raises:
        ValueError: an option that is unknown, or that has a value the network does not support.
    """
    names = {field.name for field in dataclasses.fields(cls)}
    values = {}
    for key, value in data.items():
        if key.startswith("_") or key in cls.ignored:
            continue
        if key in names:
            values[key] = _freeze(value)
        elif key not in cls.fixed:
            raise ValueError(f"{source}: {cls.class_name} has no option {key!r} in diffusax")
        elif value not in (supported := _supported(cls.fixed[key])):
            allowed = " or ".join(map(repr, supported))
            raise ValueError(
                f"{source}: {key}={value!r} is not supported by diffusax's {cls.class_name} "
                f"(only {allowed})"
            )
    return cls(**values)


def config_to_dict(config: Config) -> dict[str, Any]:
    """The config.json of `config`, as diffusers or transformers would read it."""
    fields = {f.name: _thaw(getattr(config, f.name)) for f in dataclasses.fields(config)}
    fixed = {key: _supported(value)[0] for key, value in config.fixed.items()}
    return {"_class_name": config.class_name, **fixed, **fields}


def per_level(value: Any, levels: int) -> tuple[Any, ...]:
    """`value` for each level: a tuple as it is, a single value repeated.

    Raises:
        ValueError: the tuple has not `levels` entries.
    """
    if not isinstance(value, tuple):
        return (value,) * levels
    if len(value) != levels:
        raise ValueError(f"config has {len(value)} values for {levels} levels: {value}")
    return value


def _supported(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _freeze(value: Any) -> Any:
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def _thaw(value: Any) -> Any:
    return list(map(_thaw, value)) if isinstance(value, tuple) else value
