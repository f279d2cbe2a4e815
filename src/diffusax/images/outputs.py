"""The result of a pipeline's call."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

from diffusax.images.conversion import to_html


class PipelineOutput:
    """A result whose fields can be taken by name and by position, as in diffusers."""

    def __getitem__(self, index: int | str) -> Any:
        """Returns a field by position or by name, like diffusers."""
        if isinstance(index, str):
            return getattr(self, index)
        return self.to_tuple()[index]

    def __iter__(self) -> Iterator[Any]:
        """Yields the fields of `to_tuple()`."""
        return iter(self.to_tuple())

    def to_tuple(self) -> tuple[Any, ...]:
        """Returns the fields that are not None."""
        fields = (getattr(self, field.name) for field in dataclasses.fields(cast(Any, self)))
        return tuple(field for field in fields if field is not None)


@dataclasses.dataclass
class ImagePipelineOutput(PipelineOutput):
    """The result of a call: its `images`, which are also the first entry of `to_tuple()`.

    images: PIL images, or an array: b h w 3 in [0, 1] ("pt": b 3 h w), or latents b c h w.
    nsfw_content_detected: None, because there is no safety checker.
    kept: what the call's hooks have kept by the names of points, trees of arrays n ... for n rows
    of the sampler; None without hooks.
    """

    images: Any
    nsfw_content_detected: list[bool] | None = None
    kept: Any = None

    def _repr_html_(self) -> str | None:
        """Shows the images in a notebook."""
        images = self.images
        are_pil = isinstance(images, Sequence) and all(hasattr(image, "save") for image in images)
        return to_html(images) if are_pil else None


@dataclasses.dataclass
class VideoPipelineOutput(PipelineOutput):
    """The result of a call that generates videos: its `frames`, the first entry of `to_tuple()`.

    frames: for each video a list of PIL images, or an array: b f h w 3 in [0, 1] ("pt": b f 3 h w),
    or latents b c f h w.
    kept: what the call's hooks have kept, as in `ImagePipelineOutput`.
    """

    frames: Any
    kept: Any = None
