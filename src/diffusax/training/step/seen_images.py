"""Texts that speak of images, as vision-language encoders read them in training.

The images of all rows have one size, so that their tokens stand at the same places in all texts,
behind a beginning that is the same. Each row has images of its own, and is encoded by itself.
"""

import dataclasses
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
from diffusax.training.data.examples import LENGTHS, TEXT_IMAGES, ids_name, numbered_names

_CAPTION = 512
"""The most tokens of a caption, besides those of its images."""
_PLACES, _POSITIONS, _PATCHES = (f"{TEXT_IMAGES}_{x}" for x in ("places", "positions", "patches"))


@dataclasses.dataclass(frozen=True, eq=False)
class SeenImages:
    """Where all texts of a training speak of images."""

    grids: np.ndarray
    """The rows and columns of patches of k images, k 2."""
    spans: ImageSpans
    length: int
    """The tokens that texts are filled up to."""

    @classmethod
    def of(cls, family: Family, tokenizers: Sequence[Any], size: int, count: int) -> "SeenImages":
        """Returns where texts speak of so many squares. size: their side in pixels."""
        blank = [Image.new("RGB", (size, size))] * count
        tokens = family.tokenize(tokenizers, (("",),), _call("", blank))
        length, images = int(tokens.lengths[0]) + _CAPTION, tokens.images
        assert images is not None
        return cls(np.asarray(images.grids[0]), images.spans, length)

    def tokenize(
        self, family: Family, tokenizers: Sequence[Any], caption: str, pixels: Sequence[np.ndarray]
    ) -> dict[str, np.ndarray]:
        """Returns what stands for a caption and its images in a batch, without the axis b.

        pixels: the images, h w 3 uint8 each.

        Raises:
            ValueError: the caption has more than 512 tokens.
        """
        images = [Image.fromarray(own) for own in pixels]
        call = _call(caption, images)
        tokens = family.tokenize(tokenizers, ((caption,),), call, self.length)
        (encoder,), read = family.text_encoders, tokens.images
        assert read is not None
        patches = zip(numbered_names(_PATCHES, len(images)), read.patches, strict=True)
        return {
            ids_name(encoder.tokenizer): tokens.ids[0][0],
            LENGTHS: tokens.lengths[0],
            _PLACES: read.places[0],
            _POSITIONS: read.positions[0],
            **{name: own[0] for name, own in patches},
        }

    def empty(self, family: Family, tokenizers: Sequence[Any], size: int) -> dict[str, np.ndarray]:
        """Returns what stands for an empty caption of a row's own images; see `tokenize`.

        size: the side of the images in pixels.
        """
        blank = [np.zeros((size, size, 3), np.uint8)] * len(self.grids)
        found = self.tokenize(family, tokenizers, "", blank)
        return {name: own for name, own in found.items() if not name.startswith(_PATCHES)}

    def patches(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the patches of images in a batch, by their names."""
        return {name: batch[name] for name in batch if name.startswith(_PATCHES)}

    def encode(
        self,
        family: Family,
        networks: Mapping[str, Network],
        params: Params,
        batch: Mapping[str, jax.Array],
        layers: HiddenLayers | None,
    ) -> Prompt:
        """Encodes captions with their images to embeddings, b ....

        Args:
            family: the family.
            networks: the networks by name.
            params: their parameters.
            batch: what `tokenize` returns, for b rows.
            layers: see `encode_captions`.
        """
        (encoder,) = family.text_encoders
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
            found: Prompt = family.encode(*given, tokens)
            return jax.tree.map(lambda x: x[0], found)

        return jax.lax.map(one, rows)


def _call(caption: str, images: Sequence[Image.Image]) -> Call:
    """Returns a call whose images are read in their own size, where a call says the size."""
    return Call(prompt=caption, image=list(images), output_resolution=images[0].height)
