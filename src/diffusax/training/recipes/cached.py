"""Reads latents and text embeddings that were computed before a training."""

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diffusax.boundary.files import load_json
from diffusax.models.network import Params
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.training.data.buckets import Buckets
from diffusax.training.data.examples import LATENTS, SEEN
from diffusax.training.data.opening import log_buckets
from diffusax.training.data.options import DataConfig
from diffusax.training.data.sources import ArrowSource
from diffusax.training.data.summary import log_summary
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.step.given_frames import IMAGE_ENCODER

INDEX = "cache.json"
_STEERING = "conditioning_pixel_values"
EDITS, VIDEOS = "instruct-pix2pix", "text-to-video"
EMPTY_FILE = "empty.npz"


_OF_ROWS = frozenset(
    [
        *("path", "own_part", "workers", "threads", "reference_dropout"),
        *("streaming", "streaming_cache", "streaming_window"),
    ]
)
"""The options of a data set that say nothing of its images or captions."""


@dataclasses.dataclass(frozen=True)
class CachedSource:
    """The rows of a cache as arrays, by the names in a batch of `DenoisingLoss`."""

    rows: ArrowSource
    shapes: dict[str, tuple[int, ...]]
    """The shape of each array of a row; where there are buckets, of a row of the first size."""
    dtypes: dict[str, str]
    buckets: Buckets | None = None
    """The sizes of the images that the latents are of, where there are several."""
    shapes_by_size: tuple[dict[str, tuple[int, ...]], ...] = ()
    """The shapes for each of the sizes."""
    empty: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    """The embeddings of an empty caption without images by their names in a batch, without the axis
    b; none where there are no embeddings, and in caches of earlier versions."""

    @classmethod
    def open(
        cls, folder: str, base: BaseModel, *, recipe: str, check: bool = True
    ) -> "CachedSource":
        """Opens the cache in a folder to train a checkpoint with.

        Args:
            folder: the folder.
            base: the checkpoint.
            recipe: the recipe of `CacheConfig` that the cache has to be written for.
            check: whether the weights of the checkpoint's networks are read, and compared with
                those that the cache was made with.

        Raises:
            ValueError: the cache holds something else, is not whole, or was made with another
                autoencoder or, if it holds text embeddings, with other text encoders.
        """
        index = load_json(Path(folder) / INDEX)
        if _recipe_of(index) != recipe:
            raise ValueError(
                f"{folder} was not written for {recipe}; write it again with cache-latents "
                f"--recipe {recipe}"
            )
        if check:
            _check_networks(folder, index, base)
        files = tuple(str(Path(folder) / name) for name in index["files"])
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing; write the cache again with cache-latents")
        shapes, rows = _shapes(index), ArrowSource(files, files)
        empty = _read_empty(Path(folder))
        if "buckets" not in index:
            return cls(rows, shapes, index["dtypes"], empty=empty)
        parts = [tuple(str(Path(folder) / n) for n in b["files"]) for b in index["buckets"]]
        counts = [len(ArrowSource(part, part)) for part in parts]
        sizes = tuple((height, width) for height, width in (b["size"] for b in index["buckets"]))
        of_row = np.repeat(np.arange(len(sizes), dtype=np.int16), counts)
        by_size = tuple(map(_shapes, index["buckets"]))
        references = tuple(b["references"] for b in index["buckets"] if "references" in b)
        found = (b["reference_sizes"] for b in index["buckets"] if "reference_sizes" in b)
        own = tuple(tuple((height, width) for height, width in shape) for shape in found)
        frames = tuple(b["frames"] for b in index["buckets"] if "frames" in b)
        buckets = Buckets(sizes, of_row, references, own, frames)
        return cls(rows, shapes, index["dtypes"], buckets, by_size, empty)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        shapes = self.shapes
        if self.buckets is not None:
            shapes = self.shapes_by_size[self.buckets.of_row[index]]
        return {
            name: np.frombuffer(value, self.dtypes[name]).reshape(shapes[name])
            for name, value in self.rows[index].items()
        }

    def name(self, index: int) -> str:
        """Returns the file and the row in it, for messages."""
        return self.rows.name(index)


def _check_networks(folder: str, index: Mapping[str, Any], base: BaseModel) -> None:
    """Raises ValueError where a cache was made with other networks than the checkpoint's."""
    made_by = {base.autoencoder: ("latents", "autoencoder")}
    if base.family.embedding_columns[0] in index["shapes"]:
        made_by |= dict.fromkeys(base.text_encoders, ("text embeddings", "text encoder"))
    if SEEN in index["shapes"]:
        made_by[IMAGE_ENCODER] = ("images' embeddings", "image encoder")
    for name, (what, network) in made_by.items():
        if index.get("networks", {}).get(name) != fingerprint(base.load(name, "float16").params):
            raise ValueError(
                f"the {what} in {folder} are of another {network} than the checkpoint's; "
                "write them again with cache-latents"
            )


def _read_empty(folder: Path) -> dict[str, np.ndarray]:
    if not (folder / EMPTY_FILE).is_file():
        return {}
    with np.load(folder / EMPTY_FILE, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def is_cache(path: str) -> bool:
    """Returns whether `cache_latents` wrote this folder."""
    return (Path(path) / INDEX).is_file()


def fingerprint(params: Params) -> str:
    """Computes a digest of the parameters in float16, so that their own dtype does not matter."""
    digest = hashlib.sha256()
    for _, leaf in ordered_leaves(params):
        digest.update(np.asarray(leaf).astype(np.float16).tobytes())
    return digest.hexdigest()


def _recipe_of(index: Mapping[str, Any]) -> str:
    """Returns the recipe that a cache was written for."""
    names = {LATENTS: EDITS, _STEERING: "controlnet"}
    # Earlier versions wrote no recipe.
    found = next((names[k] for k in names if k in index["shapes"]), "text-to-image")
    return str(index.get("recipe", found))


def _shapes(index: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(shape) for name, shape in index["shapes"].items()}


def open_cache(
    data: DataConfig, base: BaseModel, *, recipe: str, check: bool = True
) -> CachedSource:
    """Opens the cache that the options of a data set name, and logs what it holds.

    The arguments are otherwise those of `CachedSource.open`.

    Raises:
        ValueError: it cannot be read, or does not suit the checkpoint or the options.
    """
    _check_without_images(data)
    cache = CachedSource.open(data.path, base, recipe=recipe, check=check)
    log_summary(cache, tuple(cache.shapes), {}, place=f"{data.path}, latents")
    _check_parts(data, cache)
    return cache


def _check_parts(data: DataConfig, cache: CachedSource) -> None:
    """Raises ValueError where processes would step through sizes of their own; logs the sizes."""
    if cache.buckets is None:
        return
    if data.own_part:
        raise ValueError(
            f"data.own_part cannot be with {data.path}, as all processes step through the same "
            "sizes; put the cache where all of them see it"
        )
    log_buckets(cache.buckets)


def _check_without_images(data: DataConfig) -> None:
    """Raises ValueError where options for images are given with a cache of latents."""
    names = [field.name for field in dataclasses.fields(data) if field.name not in _OF_ROWS]
    given = [data.group + n for n in names if getattr(data, n) != getattr(type(data), n)]
    if given:
        raise ValueError(
            f"{data.path} holds latents, on which {' and '.join(given)} can do nothing; give "
            "them to cache-latents"
        )
