"""The scores of images, one for each image, and the networks that they need."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffusax.evaluation.edits import Edit
from diffusax.evaluation.features import CLIP, DINO
from diffusax.evaluation.metrics import (
    direction_similarity,
    image_similarity,
    pixel_distances,
    text_image_similarity,
)
from diffusax.evaluation.preferences import CLIP_L, Aesthetic, HPSv2, PickScore

Score = Literal["clip", "dino", "pixels", "pickscore", "hps", "aesthetic"]
TITLES = {
    "image_similarity": "CLIP image similarity",
    "direction_similarity": "CLIP text-image direction similarity",
    "text_similarity": "CLIP text-image similarity",
    "dino_similarity": "DINO similarity",
    "l1": "L1",
    "l2": "L2",
    "target_image_similarity": "CLIP image similarity to the target",
    "target_dino_similarity": "DINO similarity to the target",
    "target_l1": "L1 to the target",
    "target_l2": "L2 to the target",
    "clip_score": "CLIP score",
    "pickscore": "PickScore",
    "hps": "HPSv2.1",
    "aesthetic": "aesthetic score",
}
"""The scores by their names in results, in the order of tables."""


@dataclasses.dataclass(frozen=True)
class Measures:
    """The networks that measure; None for those that are not asked for. pixels: whether L1 and L2
    are.
    """

    clip: CLIP | None = None
    dino: DINO | None = None
    pixels: bool = False
    pickscore: PickScore | None = None
    hps: HPSv2 | None = None
    aesthetic: Aesthetic | None = None

    @classmethod
    def load(
        cls, scores: Sequence[Score], sources: Mapping[str, str], *, batch_size: int = 8
    ) -> "Measures":
        """Loads the networks of some scores.

        Args:
            scores: the scores.
            sources: folders or Hub repositories by score, for those that are not the usual ones; of
                the aesthetic score, that of the layers, and "aesthetic_clip" for its CLIP;
                "hps_processor" for the config and tokenizer of HPSv2 and PickScore.
            batch_size: the size over all devices.

        Raises:
            ValueError: a network cannot be found or read.
        """
        found: dict[str, Any] = {}
        for name in dict.fromkeys(scores):
            if name == "pixels":
                found[name] = True
                continue
            options: dict[str, Any] = {"batch_size": batch_size}
            if name == "aesthetic":
                own = sources.get("aesthetic_clip", CLIP_L)
                # Most often it is the CLIP that is there already.
                shared = "clip" in found and own == sources.get("clip", CLIP_L)
                options["clip"] = found["clip"] if shared else own
            elif name in ("pickscore", "hps") and "hps_processor" in sources:
                options["processor"] = sources["hps_processor"]
            source = [sources[name]] if name in sources else [CLIP_L] if name == "clip" else []
            found[name] = _LOADERS[name](*source, **options)
        return cls(**found)

    def edits(self, edits: Sequence[Edit], edited: Sequence[Image.Image]) -> dict[str, np.ndarray]:
        """Returns the scores of images after edits, b float32 each, by the names in `TITLES`.

        A score is missing where the edits have no caption or target for it. They all have one, or
        none.
        """
        found: dict[str, Any] = {}
        after = None if edits[0].after is None else [edit.after or "" for edit in edits]
        target = None if edits[0].target is None else [edit.target for edit in edits]
        originals: list[Any] = [edit.image for edit in edits]
        if self.clip is not None:
            found |= self._clip(self.clip, edits, edited)
        if self.dino is not None:
            features = self.dino.images(edited)
            found["dino_similarity"] = image_similarity(self.dino.images(originals), features)
            if target is not None:
                kept = self.dino.images(target)
                found["target_dino_similarity"] = image_similarity(kept, features)
        if self.pixels:
            found["l1"], found["l2"] = pixel_distances(edited, originals).T
            if target is not None:
                distances: Any = pixel_distances(edited, target)  # type: ignore[arg-type]
                found["target_l1"], found["target_l2"] = distances.T
        found |= self._preferences(edited, after)
        return {name: np.asarray(found[name], np.float32) for name in TITLES if name in found}

    def images(self, images: Sequence[Any], prompts: Sequence[str] | None) -> dict[str, np.ndarray]:
        """Returns what PickScore, HPSv2 and the aesthetic score say of images, b float32 each.

        prompts: None for images without, which have an aesthetic score alone.
        """
        found = self._preferences(images, prompts)
        return {name: np.asarray(found[name], np.float32) for name in TITLES if name in found}

    def _clip(
        self, clip: CLIP, edits: Sequence[Edit], edited: Sequence[Image.Image]
    ) -> dict[str, Any]:
        features, originals = clip.images(edited), clip.images(edit.image for edit in edits)
        found: dict[str, Any] = {"image_similarity": image_similarity(originals, features)}
        if edits[0].after is not None:
            after = clip.texts(edit.after or "" for edit in edits)
            found["text_similarity"] = text_image_similarity(features, after)
            if edits[0].before is not None:
                before = clip.texts(edit.before or "" for edit in edits)
                found["direction_similarity"] = direction_similarity(
                    originals, features, before, after
                )
        if edits[0].target is not None:
            targets = clip.images(edit.target for edit in edits)
            found["target_image_similarity"] = image_similarity(targets, features)
        return found

    def _preferences(
        self, images: Sequence[Any], prompts: Sequence[str] | None
    ) -> dict[str, np.ndarray]:
        found = {}
        if self.pickscore is not None and prompts is not None:
            found["pickscore"] = self.pickscore.score(images, prompts)
        if self.hps is not None and prompts is not None:
            found["hps"] = self.hps.score(images, prompts)
        if self.aesthetic is not None:
            found["aesthetic"] = self.aesthetic.score(images)
        return found


_LOADERS: dict[str, Callable[..., Any]] = {
    "clip": CLIP.from_pretrained,
    "dino": DINO.from_pretrained,
    "pickscore": PickScore.from_pretrained,
    "hps": HPSv2.from_pretrained,
    "aesthetic": Aesthetic.from_pretrained,
}
