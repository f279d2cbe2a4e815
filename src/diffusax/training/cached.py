"""Latents and text embeddings computed once, so that training needs neither network for them."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from msgspec import Meta
from tqdm.auto import tqdm

from diffusax.extras import require_extra
from diffusax.files import load_json, write_json
from diffusax.models.latents import from_bytes
from diffusax.models.network import Model, Params
from diffusax.options import Count, Seed
from diffusax.runtime.mesh import batch_sharding, make_mesh, replicated
from diffusax.training.base_model import BaseModel
from diffusax.training.data import (
    Broken,
    DataConfig,
    Element,
    Tally,
    caption_ids,
    choose_caption,
    picture_size,
    read_pixels,
)
from diffusax.training.denoising import encode_captions
from diffusax.training.opening import open_data, own_share
from diffusax.training.options import require_options
from diffusax.training.sources import ArrowSource, Source

_INDEX = "cache.json"


@dataclasses.dataclass(frozen=True)
class CacheConfig(DataConfig):
    """Encode a data set once; `train text-to-image --data OUTPUT` then uses the result."""

    model: str = ""
    """The checkpoint whose autoencoder and text encoder are used."""
    output: Annotated[str, Meta(min_length=1)] = "out/cache"
    """The folder to write."""
    text_embeddings: bool = False
    """Store what the text encoder makes of the captions, not only their tokens."""
    copies: Count = 1
    """How often to store each picture, each time cropped and mirrored anew."""
    batch_size: Count = 16
    """The number of pictures encoded at a time."""
    seed: Seed = 0
    """The random seed of crops, mirroring and the choice among several captions."""


@dataclasses.dataclass(frozen=True)
class CachedSource:
    """Rows as arrays: moments (h w 2z, mean and log variance) and what stands for the caption."""

    rows: ArrowSource
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, str]

    @classmethod
    def open(cls, folder: str, load: Callable[[str], Model]) -> "CachedSource":
        """The cache in a folder.

        load: gives a network of the checkpoint, with its parameters, by its name there.

        Raises:
            ValueError: it was made with another autoencoder or, where it holds text embeddings,
                another text encoder, or it is not whole.
        """
        index = load_json(Path(folder) / _INDEX)
        networks = [("latents", "autoencoder", "vae")]
        if "encoder_hidden_states" in index["shapes"]:
            networks.append(("text embeddings", "text encoder", "text_encoder"))
        for what, made_by, name in networks:
            if index.get(made_by) != fingerprint(load(name).params):
                raise ValueError(
                    f"the {what} in {folder} are of another {made_by} than the checkpoint's; "
                    "write them again with cache-latents"
                )
        files = tuple(str(Path(folder) / name) for name in index["files"])
        missing = [file for file in files if not Path(file).is_file()]
        if missing:
            raise ValueError(f"{missing[0]} is missing; write the cache again with cache-latents")
        shapes = {name: tuple(shape) for name, shape in index["shapes"].items()}
        return cls(ArrowSource(files, files), shapes, index["dtypes"])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            name: np.frombuffer(value, self.dtypes[name]).reshape(self.shapes[name])
            for name, value in self.rows[index].items()
        }

    def name(self, index: int) -> str:
        """The file and the row in it."""
        return self.rows.name(index)


def is_cache(path: str) -> bool:
    """Whether `cache_latents` wrote this folder."""
    return (Path(path) / _INDEX).is_file()


def fingerprint(params: Params) -> str:
    """A digest of the parameters, rounded to float16, so that their dtype does not matter."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(params):
        digest.update(np.asarray(leaf).astype(np.float16).tobytes())
    return digest.hexdigest()


def cache_latents(config: CacheConfig) -> int:
    """Writes the cache, this process's part of it, and returns its number of rows.

    Broken rows are left out, with a warning.

    Raises:
        ValueError: the checkpoint or the data set cannot be used, or more than one row in a hundred
            is broken; says why.
    """
    require_options(config, ("model", "data"))
    pyarrow = require_extra("pyarrow", "train")
    base = BaseModel.open(config.model)
    size = picture_size(config, base.default_size, base.factor)
    source = open_data(config, (config.image_column, config.caption_column))
    folder = Path(config.output)
    folder.mkdir(parents=True, exist_ok=True)
    # A cache is whole once it has its index; an earlier one's would vouch for half of this.
    (folder / _INDEX).unlink(missing_ok=True)
    params = {name: base.load(name).params for name in ("vae", "text_encoder")}
    encode = _encoder(base, params, config.text_embeddings)
    count, writer, specs = 0, None, {}
    file = _part(jax.process_index())
    for batch in _batches(source, base, config, size):
        arrays = encode(batch)
        if writer is None:
            specs = {k: (v.shape[1:], str(v.dtype)) for k, v in arrays.items()}
            schema = pyarrow.schema([(name, pyarrow.binary()) for name in arrays])
            writer = pyarrow.ipc.new_file(str(folder / file), schema)
        columns = [[row.tobytes() for row in arrays[name]] for name in arrays]
        writer.write_batch(pyarrow.record_batch(columns, schema=schema))
        count += len(columns[0])
    if writer is None:
        raise ValueError(f"{config.data} has no row that can be used")
    writer.close()
    if jax.process_index() == 0:
        index = {
            "files": [_part(i) for i in range(jax.process_count())],
            "shapes": {name: list(shape) for name, (shape, _) in specs.items()},
            "dtypes": {name: dtype for name, (_, dtype) in specs.items()},
            "autoencoder": fingerprint(params["vae"]),
        }
        if config.text_embeddings:
            index["text encoder"] = fingerprint(params["text_encoder"])
        write_json(folder / _INDEX, index)
    return count


def _part(process: int) -> str:
    return f"part-{process:05}.arrow"


def _batches(
    source: Source, base: BaseModel, config: CacheConfig, size: int
) -> Iterator[dict[str, np.ndarray]]:
    """Pictures and tokens of this process's rows, in order."""

    def prepare(job: int) -> Element | Broken:
        copy, index = divmod(job, len(source))
        rng = np.random.default_rng((config.seed, copy, index))
        try:
            row = source[index]
            pixels = read_pixels(config, size, row, rng)
            caption = choose_caption(row[config.caption_column], rng)
        except Exception as error:
            return Broken(source.name(index), f"{type(error).__name__}: {error}")
        return {"pixel_values": pixels, "input_ids": caption_ids(base.tokenizer, caption)}

    tally = Tally(len(source))
    first, every = own_share(config)
    jobs = range(first, len(source) * config.copies, every)
    with ThreadPoolExecutor(config.threads) as pool:
        for start in tqdm(range(0, len(jobs), config.batch_size), desc="caching", unit="batch"):
            chunk = jobs[start : start + config.batch_size]
            elements: list[Element] = []
            for element in pool.map(prepare, chunk):
                tally.count(element)
                if not isinstance(element, Broken):
                    elements.append(element)
            if elements:
                yield {key: np.stack([e[key] for e in elements]) for key in elements[0]}


def _encoder(base: BaseModel, params: Params, text_embeddings: bool) -> Any:
    """The networks over this process's devices; the last batch is filled up to the same shape."""
    mesh = make_mesh(devices=jax.local_devices())
    params = jax.device_put(params, replicated(mesh))

    @functools.partial(jax.jit, out_shardings=replicated(mesh))
    def run(params: Params, pixels: jax.Array, ids: jax.Array) -> dict[str, jax.Array]:
        vae = base.networks["vae"]
        mean, logvar = vae.apply(params["vae"], from_bytes(pixels), method="encode")
        moments = jnp.concatenate([mean, logvar], axis=-1)
        if not text_embeddings:
            return {"moments": moments, "input_ids": ids}
        hidden = encode_captions(base.family, base.networks, params, ids)
        return {"moments": moments, "encoder_hidden_states": hidden}

    size = 0

    def encode(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        nonlocal size
        n = len(batch["pixel_values"])
        size = max(size, n + -n % mesh.size)
        padded = {k: np.concatenate([v, np.repeat(v[:1], size - n, 0)]) for k, v in batch.items()}
        put = jax.device_put(padded, batch_sharding(mesh))
        result = run(params, put["pixel_values"], put["input_ids"])
        return {name: np.asarray(value)[:n] for name, value in result.items()}

    return encode
