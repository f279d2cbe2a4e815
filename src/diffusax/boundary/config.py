"""Config dataclasses <-> diffusers' and transformers' config.json, typed and bounded.

The annotations of a config's fields are its checks: types, ranges (`msgspec.Meta`) and choices
(`Literal`). Every range is closed, so NaN, infinities and sizes that no machine holds are errors.
"""

import dataclasses
import reprlib
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Protocol, TypeVar, cast

from msgspec import Meta

from diffusax.boundary.convert import (
    Words,
    alternatives,
    choice,
    convert_fields,
    field_types,
    message,
)

Channels = Annotated[int, Meta(ge=1, le=65536)]
"""A width, a size of an embedding or of a vector."""
Heads = Annotated[int, Meta(ge=1, le=1024)]
Layers = Annotated[int, Meta(ge=1, le=64)]
"""Layers of a text encoder."""
Repeats = Annotated[int, Meta(ge=1, le=16)]
"""Blocks of one resolution. Building a network takes milliseconds for each of its blocks."""
Pixels = Annotated[int, Meta(ge=1, le=16384)]
"""A side of an image or of a latent map."""
# A tuple of fixed length in a union with a bounded int crashes msgspec 0.22.
Size = Pixels | Annotated[tuple[Pixels, ...], Meta(min_length=2, max_length=2)]
"""One number for a square, or height and width."""
Positive = Annotated[float, Meta(ge=1e-12, le=1e6)]
Epsilon = Annotated[float, Meta(ge=0, le=1)]
Shift = Annotated[float, Meta(ge=-1e6, le=1e6)]
MAX_LEVELS = 10
Widths = Annotated[tuple[Channels, ...], Meta(min_length=1, max_length=MAX_LEVELS)]
"""The channels of each level."""
Bool = bool | tuple[bool, ...]
EMA_OPTIONS = frozenset(
    [
        "decay",
        "inv_gamma",
        "min_decay",
        "optimization_step",
        "power",
        "update_after_step",
        "use_ema_warmup",
    ]
)
"""The options that diffusers' EMAModel writes into the config of the weights that it averaged."""


class Keyed(Mapping[str, Any]):
    """A config that is a read-only mapping of its options, as diffusers' configs are.

    `config["sample_size"]`, `config.get`, `in`, `len`, `dict(config)` and `**config` work; the
    class is under "_class_name". Options with one supported value are attributes, too. A config is
    still a frozen dataclass: hashable, and equal to configs of its class alone.
    """

    def __getattr__(self, name: str) -> Any:
        """Returns the value of an option that the network does not read."""
        fixed = getattr(type(self), "fixed", {})
        if name in fixed:
            return _supported(fixed[name])[0]
        if name == "_class_name":
            return getattr(type(self), "class_name", type(self).__name__)
        raise AttributeError(f"the config {type(self).__name__} has no option {name!r}")

    def __getitem__(self, name: str) -> Any:
        """Returns an option.

        Raises:
            KeyError: there is no such option.
        """
        told = self.to_dict()[name]
        # An option of one's own is an attribute without the underscore that files have before it.
        return getattr(self, name, told)

    def __iter__(self) -> Iterator[str]:
        """Yields the names of the options."""
        return iter(self.to_dict())

    def __len__(self) -> int:
        """Returns the number of options."""
        return len(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        """Returns the contents of config.json, under `_class_name` the class."""
        return config_to_dict(cast(Any, self))


class Config(Protocol):
    """A frozen dataclass whose fields are the options of a config.json that its network reads.

    `class_name` is the upstream class. `fixed` gives the options that exist upstream but have only
    one supported value (a tuple lists several); `ignored` those that change nothing in the result.
    A static method `upgrade`, where there is one, puts the options of old files into newer words.
    A set `own`, where there is one, names options that upstream does not have. Files have them with
    an underscore before their names, which upstream skips, and only where they say something.
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
    if not isinstance(data, dict):
        raise ValueError(f"{source} must hold a JSON object (got {reprlib.repr(data)})")
    data = getattr(cls, "upgrade", dict)(data)
    names = {field.name for field in dataclasses.fields(cls)}
    own = {f"_{name}": name for name in getattr(cls, "own", ())}
    values = {}
    for key, value in data.items():
        if key in own:
            values[own[key]] = value
        if key.startswith("_") or key in cls.ignored:
            continue
        if key in names:
            values[key] = value
        elif key not in cls.fixed:
            raise ValueError(f"{source}: {cls.class_name} has no option {key!r} in diffusax")
        elif value not in (supported := _supported(cls.fixed[key])):
            refusal = _REFUSAL.format(
                name=key,
                value=reprlib.repr(value),
                owner=cls.class_name,
                must=_ONLY.format(alternatives(supported, " or ")),
            )
            raise ValueError(f"{source}: {refusal}")
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error


def config_to_dict(config: Config) -> dict[str, Any]:
    """The config.json of `config`, as diffusers or transformers would read it."""
    fields = {f.name: _thaw(getattr(config, f.name)) for f in dataclasses.fields(config)}
    own = {name: fields.pop(name) for name in getattr(config, "own", ())}
    told = {f"_{name}": value for name, value in own.items() if value is not None}
    fixed = {key: _supported(value)[0] for key, value in config.fixed.items()}
    return {"_class_name": config.class_name, **fixed, **fields, **told}


def check_types(config: Config) -> None:
    """Holds a config's options against their annotations; lists become tuples, 1 becomes 1.0.

    For `__post_init__`, so that a config built in Python passes the same door as one from a file.

    Raises:
        ValueError: an option has another type, is out of its range or not one of its choices.
    """
    hints = field_types(type(config))
    values = {name: getattr(config, name) for name in hints}
    converted = convert_fields(hints, values, _WORDS, owner=config.class_name)
    for name, value in converted.items():
        object.__setattr__(config, name, value)


def per_level(name: str, value: Any, count: int) -> tuple[Any, ...]:
    """The option `name` for each of `count` levels (or layers): a single value repeated.

    Raises:
        ValueError: it is a tuple that has not `count` entries.
    """
    if not isinstance(value, tuple):
        return (value,) * count
    if len(value) != count:
        raise ValueError(f"{name} must have {count} entries or be one value (got {value})")
    return value


def check_groups(widths: tuple[int, ...], groups: int, name: str = "block_out_channels") -> None:
    """Raises a ValueError unless `norm_num_groups` divides all of the option `name`."""
    for width in widths:
        if width % groups:
            raise ValueError(f"{name}={widths} must be divisible by norm_num_groups={groups}")


_REFUSAL = "{name}={value} is not supported by diffusax's {owner} ({must})"
_ONLY = "only {}"
_WORDS = Words(_REFUSAL, (choice(_ONLY, " or ", same_type=True), message), reprlib.repr)


def _supported(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _thaw(value: Any) -> Any:
    """What JSON has for it; a config within another has no class name of its own there."""
    if dataclasses.is_dataclass(value):
        return {k: v for k, v in config_to_dict(value).items() if k != "_class_name"}  # type: ignore[arg-type]
    return list(map(_thaw, value)) if isinstance(value, tuple) else value
