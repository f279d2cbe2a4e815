"""What a pipeline's call gives."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from diffusax.images.pictures import to_html


@dataclasses.dataclass
class ImagePipelineOutput:
    """What a call gives: `images`, also as the first of a tuple.

    images: PIL images, or an array: b h w 3 in [0, 1] ("pt": b 3 h w), or latents b c h w.
    nsfw_content_detected: None, for there is no safety checker.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None

    def __getitem__(self, index: int | str) -> Any:
        """As in diffusers: by position or by name."""
        if isinstance(index, str):
            return getattr(self, index)
        return self.to_tuple()[index]

    def to_tuple(self) -> tuple[Any, ...]:
        """The fields that are there."""
        fields = (self.images, self.nsfw_content_detected)
        return tuple(field for field in fields if field is not None)

    def _repr_html_(self) -> str | None:
        """The pictures, in a notebook."""
        images = self.images
        pictures = isinstance(images, Sequence) and all(hasattr(image, "save") for image in images)
        return to_html(images) if pictures else None
