"""Texts that speak of images, as vision-language encoders read them in training.

In a batch the images have the same sizes in all rows, so that their tokens stand at the same places
in all texts, behind a beginning that is the same. Each row has images of its own, and is encoded by
itself.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from diffusax.models.network import Network, Params
from diffusax.pipelines.families import Family
from diffusax.pipelines.plan.arguments import Call
from diffusax.pipelines.plan.plan import HiddenLayers, ImageSpans, Prompt, TextImages, Tokens
from diffusax.training.data.buckets import Size
from diffusax.training.data.examples import LENGTHS, TEXT_IMAGES, ids_name, numbered_names

_CAPTION = 512
"""The most tokens of a caption, besides those of its images."""
_PLACES, _POSITIONS, _PATCHES = (f"{TEXT_IMAGES}_{x}" for x in ("places", "positions", "patches"))


@dataclasses.dataclass(frozen=True, eq=False)
class SeenImages:
    """Where the texts of a batch speak of images."""

    family: Family
    tokenizers: tuple[Any, ...]
    sizes: tuple[Size, ...]
    """The heights and widths of k images in pixels."""
    grids: np.ndarray
    """The rows and columns of patches of k images, k 2."""
    spans: ImageSpans
    least: int
    """The tokens of an empty caption with its images."""

    @classmethod
    def of(
        cls, family: Family, tokenizers: tuple[Any, ...], sizes: tuple[Size, ...]
    ) -> "SeenImages":
        """Returns where texts speak of images of these heights and widths in pixels."""
        blank = [Image.new("RGB", (width, height)) for height, width in sizes]
        tokens = family.tokenize(tokenizers, (("",),), _call("", blank))
        images = tokens.images
        assert images is not None
        grids, least = np.asarray(images.grids[0]), int(tokens.lengths[0])
        return cls(family, tokenizers, sizes, grids, images.spans, least)

    @property
    def length(self) -> int:
        """The tokens that texts are filled up to."""
        return self.least + _CAPTION

    @property
    def tail(self) -> int:
        """The tokens of an empty caption that stand behind the last image."""
        return self.least - self.spans.spans[-1][1]

    def tokenize(self, caption: str, pixels: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        """Returns what stands for a caption and its images in a batch, without the axis b.

        pixels: the images, h w 3 uint8 each.

        Raises:
            ValueError: the caption has more than 512 tokens.
        """
        images = [Image.fromarray(own) for own in pixels]
        call = _call(caption, images)
        tokens = self.family.tokenize(self.tokenizers, ((caption,),), call, self.length)
        (encoder,), read = self.family.text_encoders, tokens.images
        assert read is not None
        patches = zip(numbered_names(_PATCHES, len(images)), read.patches, strict=True)
        return {
            ids_name(encoder.tokenizer): tokens.ids[0][0],
            LENGTHS: tokens.lengths[0],
            _PLACES: read.places[0],
            _POSITIONS: read.positions[0],
            **{name: own[0] for name, own in patches},
        }

    @functools.cached_property
    def empty(self) -> dict[str, np.ndarray]:
        """What stands for an empty caption of a row's own images; see `tokenize`."""
        found = self.tokenize("", [np.zeros((*size, 3), np.uint8) for size in self.sizes])
        return {name: own for name, own in found.items() if not name.startswith(_PATCHES)}

    def patches(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the patches of images in a batch, by their names."""
        return {name: batch[name] for name in batch if name.startswith(_PATCHES)}

    def encode(
        self,
        networks: Mapping[str, Network],
        params: Params,
        batch: Mapping[str, jax.Array],
        layers: HiddenLayers | None,
    ) -> Prompt:
        """Encodes captions with their images to embeddings, b ....

        Args:
            networks: the networks by name.
            params: their parameters.
            batch: what `tokenize` returns, for b rows.
            layers: see `encode_captions`.
        """
        (encoder,) = self.family.text_encoders
        names = numbered_names(_PATCHES, len(self.grids))
        rows = {k: batch[k] for k in (ids_name(encoder.tokenizer), LENGTHS, _PLACES, _POSITIONS)}
        rows |= {name: batch[name] for name in names}

        def one(row: dict[str, jax.Array]) -> Prompt:
            own = {name: x[None] for name, x in row.items()}
            images = TextImages(
                own[_PLACES],
                own[_POSITIONS],
                tuple(own[name] for name in names),
                jnp.asarray(self.grids)[None],
                self.spans,
            )
            ids = (own[ids_name(encoder.tokenizer)],)
            tokens = Tokens(ids, lengths=own[LENGTHS], layers=layers, images=images)
            given = (networks[encoder.name],), (params[encoder.name],)
            found: Prompt = self.family.encode(*given, tokens)
            return jax.tree.map(lambda x: x[0], found)

        return jax.lax.map(one, rows)

    def encode_empty(
        self,
        networks: Mapping[str, Network],
        params: Params,
        batch: Mapping[str, jax.Array],
        layers: HiddenLayers | None,
    ) -> tuple[jax.Array, jax.Array]:
        """Encodes empty captions of rows' images; the arguments are those of `encode`.

        Returns:
            The embeddings of what stands behind the last image, b `tail` d, as what stands before
            does not read it; and the number of all embeddings that are no padding, b.
        """
        b = len(batch[_PLACES])
        empty = {
            name: jnp.broadcast_to(own, (b, *np.shape(own))) for name, own in self.empty.items()
        }
        found = self.encode(networks, params, {**empty, **self.patches(batch)}, layers)
        places = found.lengths[:, None] - self.tail + jnp.arange(self.tail)
        return jnp.take_along_axis(found.context, places[..., None], axis=1), found.lengths


# All rows of a batch ask for the same.
@functools.lru_cache(64)
def seen_images(
    family: Family, tokenizers: tuple[Any, ...], sizes: tuple[Size, ...]
) -> SeenImages | None:
    """Returns where texts speak of images of these sizes; None where they speak of none."""
    if not sizes or not family.edits.reads_with_text:
        return None
    return SeenImages.of(family, tokenizers, sizes)


def with_tail(context: jax.Array, tail: jax.Array, lengths: jax.Array) -> jax.Array:
    """Returns embeddings of texts, b t d, with another caption behind the last image.

    tail, lengths: see `SeenImages.encode_empty`.
    """
    behind = jnp.arange(context.shape[1]) - (lengths[:, None] - tail.shape[1])
    places = jnp.clip(behind, 0, tail.shape[1] - 1)
    found = jnp.take_along_axis(tail, places[..., None], axis=1)
    return jnp.where((behind >= 0)[..., None], found, context)


def _call(caption: str, images: Sequence[Image.Image]) -> Call:
    """Returns a call whose images are read in their own size, where a call says the area."""
    area = np.mean([image.width * image.height for image in images])
    return Call(prompt=caption, image=list(images), output_resolution=round(float(area) ** 0.5))
