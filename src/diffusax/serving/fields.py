"""The types and ranges of a drawing's fields."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from diffusax.boundary.convert import Words, convert_fields, field_types, in_words, shortened
from diffusax.serving.drawing import SEEDS, ControlSettings, Drawing, Settings, Weights
from diffusax.serving.errors import Refused

FIELDS: Mapping[str, Any] = field_types(Settings)
"""The types of the fields that are no images, by name."""
CONTROL_FIELDS: Mapping[str, Any] = field_types(ControlSettings)
"""Those of a ControlNet."""
_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    Weights: "weights by name",
    type(None): "nothing",
}
_WORDS = Words("{where}{name} must be {must} (got {value})", (in_words(_NAMES),), shortened)


def typed(drawing: Drawing) -> Drawing:
    """Returns a drawing whose fields have their types.

    Raises:
        Refused: one has another type or is out of its range; names it, its value and what is valid.
    """
    fields = _converted(FIELDS, drawing, "", None)
    check_seed(fields["seed"])
    controls = tuple(
        dataclasses.replace(
            control, **_converted(CONTROL_FIELDS, control, "controls: ", "controls")
        )
        for control in drawing.controls
    )
    return dataclasses.replace(drawing, **fields, controls=controls)


def check_seed(seed: int | None) -> None:
    """Raises Refused for a seed of more than 64 bits, a bound that msgspec cannot express."""
    if seed is not None and seed >= SEEDS:
        raise Refused(
            f"seed must be a whole number up to {SEEDS - 1} (got {shortened(seed)})", param="seed"
        )


def _converted(
    hints: Mapping[str, Any], given: Any, where: str, param: str | None
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in hints:
        value = getattr(given, name)
        values = {name: dict(value) if isinstance(value, Mapping) else value}
        try:
            found |= convert_fields(hints, values, _WORDS, where=where)
        except ValueError as error:
            raise Refused(str(error), param=param or name) from None
    return found
