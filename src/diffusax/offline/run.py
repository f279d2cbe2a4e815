"""Runs many prompts in this process."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from diffusax._version import __version__
from diffusax.models.arranged import unwrapped
from diffusax.models.parameter_tree import ordered_leaves
from diffusax.models.quantized import Quantized
from diffusax.offline.folder import Folder
from diffusax.offline.prompts import Prompts, Source, open_prompts
from diffusax.offline.requests import Settings
from diffusax.offline.stages import Order, ShardGenerator
from diffusax.runtime.signals import StopRequest, receiving, signal_name


class Stopped(Exception):
    """A signal asked the run to stop; the batches that were begun are written."""

    def __init__(self, number: int, out: Path):
        """Takes the signal's number, and the output folder."""
        self.exit_code = 128 + number
        """The exit code of a process that the signal ended."""
        super().__init__(
            f"stopped by {signal_name(number)}; what was begun is in {out}: start the same again "
            "to go on"
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of a run. drawn: the images of this call. errors: those in all finished shards.

    finished: whether all shards are finished, those of other processes included.
    """

    drawn: int
    errors: int
    finished: bool


def generate(
    pipe: Any,
    prompts: Source,
    out: str | Path,
    settings: Settings | None = None,
    *,
    shard: tuple[int, int] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: bool = True,
    lookahead: int = 2,
) -> Summary:
    """Generates the images of many prompts into a folder; another call continues where it stopped.

    However often it is killed, the folder has each image once, and it is the same image.

    Args:
        pipe: a text-to-image pipeline; its scheduler is used for lines that name no sampler.
        prompts: a .txt, .jsonl, .csv or .parquet file, or a list of texts and dictionaries.
        out: the folder.
        settings: the settings that decide the images, besides pipeline and prompts.
        shard: (i, n), to generate each n-th shard from i on, counted from 0; by default the number
            of this JAX process and that of all processes.
        source: what the pipeline was loaded from, such as {"model": ..., "revision": ...}; it is
            saved in the folder, compared when a run continues, and written into the PNG files.
        progress: whether to show a bar.
        lookahead: the number of batches that the device may be ahead of the PNG files; with 0
            nothing is done at the same time.

    Raises:
        ValueError: the prompts, the settings or the folder cannot be used; says why.
        OSError: the disk is full.
        Stopped: SIGTERM or Ctrl-C came, and the batches that were begun are written; a second
            signal ends the process.
    """
    settings = settings or Settings()
    rows = open_prompts(prompts)
    index, count = checked_shard(shard or (jax.process_index(), jax.process_count()))
    order = make_order(rows, out, settings, source, lookahead)
    stop = StopRequest("the batches that were begun are finished")
    generator = ShardGenerator(pipe, order, stop)
    folder = order.folder
    folder.claim(manifest(pipeline_facts(pipe), rows, settings, source))
    with folder.part(index, count), receiving(stop):
        folder.clean()
        shards = range(index, count_shards(rows, settings), count)
        todo = {k for k in shards if not folder.is_done(k)}
        with progress_bar(rows, settings, shards, todo, progress) as bar:
            parts = rows.parts(settings.lines_per_shard, todo.__contains__)
            generated = sum(generator.run(parts, bar.update))
        return summary(folder, rows, settings, generated, stop)


def make_order(
    rows: Prompts,
    out: str | Path,
    settings: Settings,
    source: Mapping[str, Any] | None,
    lookahead: int,
) -> Order:
    """Returns what every process that generates images needs to know."""
    model = (source or {}).get("model")
    name = None if model is None else Path(str(model)).name
    return Order(Path(out), settings, rows.name, rows.row, name, lookahead)


def summary(
    folder: Folder, rows: Prompts, settings: Settings, generated: int, stop: StopRequest
) -> Summary:
    """Finishes a run. generated: the number of images generated.

    Raises:
        Stopped: a signal asked the run to stop.
    """
    errors = folder.gather_errors()
    if stop.number is not None:
        raise Stopped(stop.number, folder.path)
    return Summary(generated, errors, all(map(folder.is_done, range(count_shards(rows, settings)))))


def pipeline_facts(pipe: Any) -> dict[str, Any]:
    """Returns what decides the images of a pipeline, besides its parameters."""
    return {
        "pipeline": type(pipe).__name__,
        "dtypes": {name: _dtype_fact(p) for name, p in pipe.params.items() if p},
        "scheduler": dict(pipe.scheduler.config),
        "vae_tiling": pipe.vae.tiling,
        "freeu": None if pipe.parts.freeu is None else list(pipe.parts.freeu),
        **_cache_facts(pipe),
        **_adapter_facts(pipe),
    }


def _dtype_fact(params: Any) -> str:
    """Returns the dtype of computation, and those of kernels of eight bits: "bfloat16, int8"."""
    leaves = [leaf for _, leaf in ordered_leaves(unwrapped(params))]
    eight = {str(leaf.values.dtype) for leaf in leaves if isinstance(leaf, Quantized)}
    return ", ".join([str(leaves[0].dtype), *sorted(eight)])


def _cache_facts(pipe: Any) -> dict[str, Any]:
    """Returns the options of the caches of steps that are on."""
    names = pipe.parts.denoiser.predicting
    configs = [pipe.parts.models[name].switches.cache for name in names]
    if configs == [None] * len(names):
        return {}
    return {"step cache": ", ".join(map(repr, configs))}


def _adapter_facts(pipe: Any) -> dict[str, Any]:
    """Returns the digests of the pipeline's LoRAs, and which of them calls use by default."""
    if not pipe.adapters:
        return {}
    store = pipe.parts.adapters
    digests = {name: adapter.digest for name, adapter in pipe.adapters.items()}
    return {"adapters": digests, "active adapters": store.active if store.enabled else {}}


def manifest(
    facts: Mapping[str, Any],
    prompts: Prompts,
    settings: Settings,
    source: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns what decides the images of a run. facts: those of the pipeline."""
    found = {
        "diffusax": __version__,
        **(source or {}),
        **facts,
        "lines of prompts": prompts.count,
        "sha256 of prompts": prompts.digest,
        **vars(settings),
    }
    return json.loads(json.dumps(found, default=str))


def checked_shard(shard: tuple[int, int]) -> tuple[int, int]:
    """Checks and returns the part (i, n) of a run.

    Raises:
        ValueError: there is no such part.
    """
    index, count = shard
    if not 0 <= index < count:
        raise ValueError(
            f"shard must be i/n with i from 0 to n - 1, such as 0/4 for the first of four "
            f"(got {index}/{count})"
        )
    return index, count


def count_shards(prompts: Prompts, settings: Settings) -> int:
    """Returns the number of all shards."""
    return -(-prompts.count // settings.lines_per_shard)


def progress_bar(
    prompts: Prompts, settings: Settings, shards: Sequence[int], todo: set[int], shown: bool
) -> Any:
    """Returns a progress bar over the images of these shards; those not in `todo` count as done."""
    done = sum(count_images(prompts, settings, k) for k in shards if k not in todo)
    total = sum(count_images(prompts, settings, k) for k in shards)
    return tqdm(total=total, initial=done, unit="image", desc="images", disable=not shown)


def count_images(prompts: Prompts, settings: Settings, shard: int) -> int:
    """Returns the number of images that the lines of a shard ask for."""
    size = settings.lines_per_shard
    return (min((shard + 1) * size, prompts.count) - shard * size) * settings.num_images
