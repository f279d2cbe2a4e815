"""Images to look at, for families of text to image that learn to look at them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusax.images.references import rounded_reference
from diffusax.pipelines.families import policies
from diffusax.pipelines.plan.plan import Conditions

_PREFIX = "references"


@dataclasses.dataclass(frozen=True)
class Learned(policies.References):
    """Images to look at of networks that have learned it, which inpainting does without.

    Each has the area of 1024x1024 pixels at most.
    """

    read: Callable[[Any, int], np.ndarray] = rounded_reference

    def inpainted(self, latents: Any) -> Sequence[Any]:
        return ()


def references(conditions: Conditions) -> tuple[Any, ...]:
    """Returns the latents of images to look at, of which there may be none."""
    found: tuple[Any, ...] = (conditions.added or {}).get("references", ())
    return found


def with_prefix(conditions: Conditions, read: Any) -> Conditions:
    """Returns conditions with what steps read of images to look at, beside other keys."""
    return conditions._replace(keys={**(conditions.keys or {}), _PREFIX: read})


def looked_at(conditions: Conditions) -> dict[str, Any]:
    """Returns the arguments of a network that looks at images; none where there are none."""
    read = (conditions.keys or {}).get(_PREFIX)
    if read is not None:
        return {"prefix": read}
    images = references(conditions)
    return {"references": images} if images else {}
