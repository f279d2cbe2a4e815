"""Reads, checks and shows a sampler's options."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta

from diffusax.boundary.convert import (
    Words,
    alternatives,
    choice,
    convert_fields,
    field_types,
    reason,
    shortened,
)
from diffusax.runtime.switches import check_untraced

Prediction = Literal["epsilon", "v_prediction", "sample"]
NoisePrediction = Literal["epsilon", "v_prediction"]
AnyPrediction = Literal["epsilon", "v_prediction", "sample", "flow_prediction"]
Spacing = Literal["linspace", "leading", "trailing"]
BetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2"]
DDPMBetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2", "sigmoid", "laplace"]
HeunBetaSchedule = Literal["linear", "scaled_linear", "squaredcos_cap_v2", "exp"]
SigmaSchedule = Literal["karras", "exponential"]
FinalSigma = Literal["zero", "sigma_min"]
TimeShift = Literal["exponential", "linear"]
Order = Literal[1, 2, 3]
Count = Annotated[int, Meta(ge=1, le=100_000)]
Offset = Annotated[int, Meta(ge=0, le=100_000)]
Seed = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Seeds = Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=100_000)]
Beta = Annotated[float, Meta(ge=0, lt=1)]
Betas = Annotated[tuple[Beta, ...], Meta(min_length=1, max_length=100_000)]
Positive = Annotated[float, Meta(gt=0, le=1e6)]
Quantile = Annotated[float, Meta(ge=0, le=1)]
Terminal = Annotated[float, Meta(ge=0, lt=1)]
# -inf is allowed, NaN is not.
UpperBounded = Annotated[float, Meta(le=1e6)]


NO_OPTIONS = frozenset({"given_options", "given_ends"})
"""The fields of a scheduler that are no options of its own."""


class Options(Mapping[str, Any]):
    """A read-only mapping whose values are also attributes."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_values", {}):
            return self._values[name]
        raise AttributeError(f"the config has no option {name!r}")

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"Options({self._values!r})"


def check_options(scheduler: Any) -> dict[str, Any]:
    """Converts the fields of a scheduler, a frozen dataclass, to their declared types.

    Raises:
        ValueError: a value is not of its field's type, or out of its range.
    """
    hints = _hints(type(scheduler))
    values = {name: getattr(scheduler, name) for name in hints}
    check_untraced(values, "schedulers are made of numbers, outside of traced functions")
    return convert_fields(hints, values, _WORDS, owner=type(scheduler).__name__)


def adopt(scheduler: Any, name: str, foreign: tuple[str, ...], own: str) -> None:
    """Replaces a value that only other samplers know by one of this sampler's, like diffusers."""
    if getattr(scheduler, name) in foreign:
        object.__setattr__(scheduler, name, own)


def fitting(
    cls: Any, config: Mapping[str, Any], others: frozenset[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits the options of a config into those that are fields of `cls`, and the others.

    Options that the config lists as never given are left out. `others` are the options of other
    samplers. A config that names another sampler may hold unknown options too.

    Raises:
        ValueError: an option is unknown, or its value is not supported.
    """
    if not isinstance(config, Mapping):
        raise ValueError(f"config must be a mapping of options (got {type(config).__name__})")
    never = config.get("_use_default_values", ())
    names = _hints(cls)
    values, kept = {}, {}
    for key, value in config.items():
        if key.startswith("_") or key in never:
            continue
        if key in names:
            values[key] = value
            continue
        if key in cls.fixed and value not in cls.fixed[key]:
            raise ValueError(
                f"{key}={value!r} is not supported by diffusax's {cls.class_name}; use "
                f"{alternatives(cls.fixed[key])}"
            )
        known = key in cls.fixed or key in cls.ignored or key in others
        if not known and config.get("_class_name", cls.class_name) == cls.class_name:
            raise ValueError(
                f"{cls.class_name} has no option {key!r} in diffusax; it has "
                f"{', '.join(sorted(names))}"
            )
        kept[key] = value
    return values, kept


def given_ends(scheduler: Any) -> tuple[float | None, float | None]:
    """Returns the options sigma_min and sigma_max, or what a config holds for other samplers.

    diffusers looks for both in the config, whichever class has the options
    (`_convert_to_karras` in most of its schedulers).

    Raises:
        ValueError: one that is kept for other samplers is no sigma.
    """
    values = {name: getattr(scheduler, name) for name in _hints(type(scheduler))}
    if scheduler.heeds_ends:
        hints = dict.fromkeys(_ENDS, Positive | None)
        kept = {name: scheduler.given_options.get(name) for name in _ENDS}
        values = convert_fields(hints, kept, _WORDS, owner=type(scheduler).__name__) | values
    return values.get("sigma_min"), values.get("sigma_max")


def _hints(cls: Any) -> dict[str, Any]:
    return {name: hint for name, hint in field_types(cls).items() if name not in NO_OPTIONS}


_ENDS = ("sigma_min", "sigma_max")
_WORDS = Words(
    "{name}={value} is not supported by diffusax's {owner}; {must}",
    (choice("use {}", none_first=True), reason),
    shortened,
)
