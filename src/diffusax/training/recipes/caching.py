"""Computes latents and text embeddings once, so that training needs neither of their networks."""

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta
from tqdm.auto import tqdm

from diffusax.boundary.files import write_json, written_whole
from diffusax.boundary.messages import require_extra
from diffusax.boundary.options import Count, Options, Seed
from diffusax.models.network import Params
from diffusax.runtime.devices.layouts import in_order
from diffusax.runtime.devices.mesh import batch_sharding, make_mesh, replicated
from diffusax.runtime.devices.processes import of_all_processes
from diffusax.training.data.batches import Broken, Element, Tally
from diffusax.training.data.buckets import Buckets, buckets_of
from diffusax.training.data.examples import (
    ALONE,
    EMPTY,
    EMPTY_LENGTHS,
    LATENTS,
    PIXELS,
    SEEN_PIXELS,
    image_size,
    is_text,
)
from diffusax.training.data.opening import open_clips, open_images, own_share
from diffusax.training.data.options import ControlDataConfig, EditDataConfig, VideoDataConfig
from diffusax.training.data.sources import Source
from diffusax.training.options import ComputeDtype, require_options
from diffusax.training.recipes.base_model import BaseModel
from diffusax.training.recipes.cached import EDITS, EMPTY_FILE, INDEX, VIDEOS, fingerprint
from diffusax.training.recipes.row_examples import (
    caption_example,
    check_references,
    clip_example,
    control_example,
    edit_example,
    reference_policy,
)
from diffusax.training.recipes.video_model import VideoModel, given_of
from diffusax.training.step.encoding import (
    embedding_entries,
    encode_captions,
    encode_pixels,
    reference_sizes,
)
from diffusax.training.step.given_frames import IMAGE_ENCODER


class _Kind(NamedTuple):
    """What a recipe reads of a row."""

    columns: tuple[str, ...]
    """The options that name columns; first that of the images to learn, of edits the last."""
    example: Any
    """The function that makes an example of a row."""


_CAPTIONED = ("image_column", "caption_column")
_KINDS = {
    "text-to-image": _Kind(_CAPTIONED, caption_example),
    EDITS: _Kind(
        ("original_image_column", "edit_prompt_column", "edited_image_column"), edit_example
    ),
    "controlnet": _Kind((*_CAPTIONED, "conditioning_image_column"), control_example),
    VIDEOS: _Kind(_CAPTIONED, clip_example),
}
_OF_CLIPS = ("num_frames", "fps", "frame_extraction", "frame_samples")
"""The options that are for clips alone."""


@dataclasses.dataclass(frozen=True)
class CacheDataConfig(VideoDataConfig, ControlDataConfig, EditDataConfig):
    """Images with captions, perhaps with images that steer, images before and after an edit, or
    clips.
    """

    random_flip: bool = False
    """Mirror half of the images, or pairs."""


@dataclasses.dataclass(frozen=True)
class CacheConfig(Options):
    """Encode a data set once; `train RECIPE --data.path OUTPUT` then uses the result."""

    recipe: Literal["text-to-image", "text-to-video", "instruct-pix2pix", "edit", "controlnet"] = (
        "text-to-image"
    )
    """What will be trained: images with captions, also for dreambooth and textual-inversion; clips;
    images before and after an edit (edit is another name of instruct-pix2pix); or images with
    captions and with images that steer."""
    model: str = ""
    """The checkpoint whose autoencoder and text encoders are used."""
    output: Annotated[str, Meta(min_length=1)] = "out/cache"
    """The folder to write."""
    text_embeddings: bool = False
    """Store the text encoders' outputs for the captions, not only the tokens."""
    text_dtype: ComputeDtype = "float32"
    """The dtype of the text encoders and of their outputs; bfloat16 halves the memory and the
    cache."""
    copies: Count = 1
    """The number of times to store each row, each time cropped and mirrored anew."""
    batch_size: Count = 16
    """The number of images encoded at a time; few for clips."""
    seed: Seed = 0
    """The random seed of crops, mirroring and the choice among several captions."""
    distributed: bool = False
    """Run as one of several processes, which find each other as those of train do; each encodes a
    share of the rows, and writes it to the same folder."""
    data: CacheDataConfig = dataclasses.field(default_factory=CacheDataConfig)
    """The options of the data set."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.recipe == "edit":
            object.__setattr__(self, "recipe", EDITS)


def cache_latents(config: CacheConfig) -> int:
    """Writes this process's part of the cache, and returns its number of rows.

    Broken rows are left out, with a warning.

    Raises:
        ValueError: the checkpoint or the data set cannot be used, or more than one row in a hundred
            is broken; says why.
    """
    require_options(config, ("model", "data.path"))
    require_extra("pyarrow", "train")
    base: BaseModel
    if config.recipe == VIDEOS:
        base = VideoModel.open_videos(config.model, trained=False)
    else:
        base = BaseModel.open(config.model, edits=config.recipe == EDITS)
    size = image_size(config.data, base.default_size, base.multiple)
    source = _open(config, base, size)
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    # The index says that a cache is whole, so that of an earlier cache has to go first.
    (folder / INDEX).unlink(missing_ok=True)
    names = [base.autoencoder, *(base.text_encoders if config.text_embeddings else ())]
    given = given_of(base)
    names += [IMAGE_ENCODER] if given is not None and given.seen else []
    dtypes = dict.fromkeys(base.text_encoders, config.text_dtype)
    params = {name: base.load(name, dtypes.get(name, "float32")).params for name in names}
    encode = _encoder(base, params, config.text_embeddings)
    tally, parts = Tally(len(source)), []
    for bucket, rows in _rows_by_size(source).items():
        batches = _batches(source, base, config, size, rows, tally)
        parts.append(_write(folder, bucket, map(encode, batches)))
    # Of a size, this process may have no row, or only broken ones, where others have some.
    written = [_Part(*part) for own in of_all_processes(parts) for part in own if _Part(*part).rows]
    if not written:
        raise ValueError(f"{config.data.path} has no row that can be used")
    if jax.process_index() == 0:
        networks = {name: fingerprint(base.load(name, "float16").params) for name in names}
        if config.text_embeddings:
            _write_empty(folder, base, params)
        index = _index(written, buckets_of(source), networks)
        write_json(folder / INDEX, {"recipe": config.recipe, **index})
    return sum(part.rows for part in parts)


def _open(config: CacheConfig, base: BaseModel, size: int) -> Source:
    """Opens the data set. size: the side of the images, or of the square that has their area."""
    columns, data = _columns(config), config.data
    if isinstance(base, VideoModel):
        fps = base.fps if data.fps is None else data.fps
        return open_clips(data, columns, side=size, factor=base.multiple, step=base.step, fps=fps)
    edits = config.recipe == EDITS
    if edits:
        check_references(base.family, data)
    if edits and base.family.edits.reads_with_text and not config.text_embeddings:
        raise ValueError(
            f"text_embeddings must be on for {base.family.name}, whose texts speak of the images "
            "before the edit"
        )
    return open_images(
        data,
        columns,
        image_column=columns[-1] if edits else columns[0],
        side=size,
        factor=base.multiple,
        references=base.family.edits.most if edits else 1,
        policy=reference_policy(base.family, data) if edits else None,
    )


def _write_empty(folder: Path, base: BaseModel, params: Params) -> None:
    """Writes the embeddings of an empty caption."""
    tokens = {name: ids[None] for name, ids in base.tokenize("").items()}
    run = jax.jit(functools.partial(_embedded, base))
    found = run({name: params[name] for name in base.text_encoders}, tokens)
    with written_whole(folder / EMPTY_FILE) as partial, partial.open("wb") as file:
        # NumPy's files know no bfloat16.
        arrays: dict[str, Any] = {
            name: np.asarray(own[0], np.float32 if own.dtype == jnp.bfloat16 else own.dtype)
            for name, own in found.items()
        }
        np.savez(file, **arrays)


class _Part(NamedTuple):
    """What a process has written of the images of one size."""

    file: str
    """The name of the file; there is none where there is no row."""
    bucket: int | None
    """The index of the size; None where all images have one."""
    rows: int
    specs: dict[str, tuple[tuple[int, ...], str]]
    """The shape and dtype of each array."""


def _write(folder: Path, bucket: int | None, batches: Iterator[dict[str, np.ndarray]]) -> _Part:
    """Writes a file of rows; none where there are no rows."""
    pyarrow = require_extra("pyarrow", "train")
    count, specs, writer = 0, {}, None
    file = f"part-{jax.process_index():05}{'' if bucket is None else f'-{bucket:03}'}.arrow"
    for arrays in batches:
        if writer is None:
            specs = {k: (v.shape[1:], str(v.dtype)) for k, v in arrays.items()}
            schema = pyarrow.schema([(name, pyarrow.binary()) for name in arrays])
            writer = pyarrow.ipc.new_file(str(folder / file), schema)
        columns = [[row.tobytes() for row in arrays[name]] for name in arrays]
        writer.write_batch(pyarrow.record_batch(columns, schema=schema))
        count += len(columns[0])
    if writer is not None:
        writer.close()
    return _Part(file, bucket, count, specs)


def _index(
    parts: Sequence[_Part], buckets: Buckets | None, networks: dict[str, str]
) -> dict[str, Any]:
    """Returns what the index says of a cache, whose files are sorted by size.

    parts: what all processes have written, each with rows.
    """

    def bucket(part: _Part) -> int:
        return part.bucket or 0

    by_size = [list(own) for _, own in itertools.groupby(sorted(parts, key=bucket), key=bucket)]
    files = [[part.file for part in own] for own in by_size]
    shapes = [{k: list(shape) for k, (shape, _) in own[0].specs.items()} for own in by_size]
    index: dict[str, Any] = {
        "files": [name for names in files for name in names],
        "shapes": shapes[0],
        "dtypes": {name: dtype for own in parts for name, (_, dtype) in own.specs.items()},
        "networks": networks,
    }
    if buckets is not None:
        numbers = [bucket(own[0]) for own in by_size]
        index["buckets"] = [
            {**_size_of(buckets, number), "shapes": shape, "files": names}
            for number, shape, names in zip(numbers, shapes, files, strict=True)
        ]
    return index


def _size_of(buckets: Buckets, number: int) -> dict[str, Any]:
    """Returns what the index says of a size, with the images to look at where rows differ."""
    count = {"references": buckets.references[number]} if buckets.references else {}
    own = {"reference_sizes": buckets.shapes[number]} if buckets.shapes else {}
    frames = {"frames": buckets.frames[number]} if buckets.frames else {}
    return {"size": buckets.sizes[number], **count, **own, **frames}


def _columns(config: CacheConfig) -> tuple[str, ...]:
    """Returns the columns that the recipe reads.

    Raises:
        ValueError: a column, or an option for captions, is given that it does not read.
    """
    used = _KINDS[config.recipe].columns
    unused = [name for kind in _KINDS.values() for name in kind.columns if name not in used]
    if "caption_column" not in used:
        unused += ["caption_lines", "trigger", "shuffle_tags", "keep_tags", "tag_separator"]
    unused += _OF_CLIPS if config.recipe != VIDEOS else ()
    for name in unused:
        if getattr(config.data, name) != getattr(CacheDataConfig, name):
            raise ValueError(f"data.{name} is nothing that recipe={config.recipe} reads")
    return tuple(getattr(config.data, name) for name in used)


def _rows_by_size(source: Source) -> dict[int | None, Sequence[int]]:
    """Returns the rows of each size by its index, which is None where there is one size."""
    buckets = buckets_of(source)
    if buckets is None:
        return {None: range(len(source))}
    used = np.flatnonzero(buckets.counts)
    return {int(i): np.flatnonzero(buckets.of_row == i).tolist() for i in used}


def _batches(
    source: Source,
    base: BaseModel,
    config: CacheConfig,
    size: int,
    rows: Sequence[int],
    tally: Tally,
) -> Iterator[dict[str, np.ndarray]]:
    """Yields batches of examples of this process's share of rows, in order."""
    example = _KINDS[config.recipe].example

    def prepare(job: int) -> Element | Broken:
        copy, place = divmod(job, len(rows))
        index = rows[place]
        rng = np.random.default_rng((config.seed, copy, index))
        try:
            return example(config.data, base, size, source[index], rng)
        except Exception as error:
            return Broken(source.name(index), f"{type(error).__name__}: {error}")

    first, every = own_share(config.data)
    jobs = range(first, len(rows) * config.copies, every)
    with ThreadPoolExecutor(config.data.threads) as pool:
        for start in tqdm(range(0, len(jobs), config.batch_size), desc="caching", unit="batch"):
            chunk = jobs[start : start + config.batch_size]
            elements: list[Element] = []
            for element in pool.map(prepare, chunk):
                tally.count(element)
                if not isinstance(element, Broken):
                    elements.append(element)
            if elements:
                yield {key: np.stack([e[key] for e in elements]) for key in elements[0]}


def _embedded(base: BaseModel, params: Params, batch: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the embeddings of a batch's captions by their names.

    Where texts speak of images also those of empty captions, and of captions without the images if
    the batch has these.
    """
    options = base.family, base.networks, params
    seen = base.seen_images(reference_sizes(batch))
    encoded = encode_captions(*options, batch, base.hidden_layers, seen)
    found = embedding_entries(base.family, encoded)
    if seen is not None:
        empty = seen.encode_empty(base.networks, params, batch, base.hidden_layers)
        found |= dict(zip((EMPTY, EMPTY_LENGTHS), empty, strict=True))
    alone = {name.removeprefix(ALONE): x for name, x in batch.items() if name.startswith(ALONE)}
    if alone:
        entries = embedding_entries(
            base.family, encode_captions(*options, alone, base.hidden_layers)
        )
        found |= {ALONE + name: own for name, own in entries.items()}
    return found


def encode_batch(
    base: BaseModel, params: Params, batch: Mapping[str, jax.Array], *, text_embeddings: bool
) -> dict[str, jax.Array]:
    """Returns what a cache holds of a batch of examples.

    Args:
        base: the checkpoint.
        params: the parameters of its autoencoder, and of the text encoders where texts are encoded.
        batch: the examples, stacked.
        text_embeddings: whether texts are encoded.
    """
    vae = base.autoencoder
    encode = functools.partial(encode_pixels, base.networks[vae], params[vae])
    arrays = dict(batch)
    arrays["moments"] = jnp.concatenate(encode(arrays.pop("pixel_values")), axis=-1)
    if (given := given_of(base)) is not None:
        arrays |= given.entries(base.networks, params, vae, batch)
        arrays.pop(SEEN_PIXELS, None)
    for name in [name for name in arrays if name.startswith(PIXELS)]:
        arrays[name.replace(PIXELS, LATENTS)], _ = encode(arrays.pop(name))
    if text_embeddings:
        arrays = {k: v for k, v in arrays.items() if not is_text(k)}
        arrays |= _embedded(base, params, batch)
    return arrays


def _encoder(base: BaseModel, params: Params, text_embeddings: bool) -> Any:
    """Returns a function that encodes batches, padded to one shape, on this process's devices."""
    mesh = make_mesh(devices=jax.local_devices())
    params = in_order(jax.device_put(params, replicated(mesh)))

    def encoded(params: Params, batch: dict[str, jax.Array]) -> dict[str, jax.Array]:
        return encode_batch(base, params, batch, text_embeddings=text_embeddings)

    run = jax.jit(encoded, out_shardings=replicated(mesh))
    size = 0

    def encode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal size
        n = len(batch["pixel_values"])
        size = max(size, n + -n % mesh.size)
        padded = {k: np.concatenate([v, np.repeat(v[:1], size - n, 0)]) for k, v in batch.items()}
        result = run(params, jax.device_put(padded, batch_sharding(mesh)))
        return {name: np.asarray(value)[:n] for name, value in result.items()}

    return encode
