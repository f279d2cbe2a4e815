"""A run over many prompts in this process."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm.auto import tqdm

from diffusax._version import __version__
from diffusax.offline.folder import Folder
from diffusax.offline.prompts import Prompts, Source, open_prompts
from diffusax.offline.requests import Settings
from diffusax.offline.stages import Drawing, Order
from diffusax.runtime.signals import StopRequest, receiving, signal_name


class Stopped(Exception):
    """A signal asked the run to stop; the batches that were begun are written."""

    def __init__(self, number: int, out: Path):
        """number: of the signal. out: the folder."""
        self.exit_code = 128 + number
        """As of a process that the signal ended."""
        super().__init__(
            f"stopped by {signal_name(number)}; what was begun is in {out}: start the same again "
            "to go on"
        )


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a run has done. drawn: pictures in this call. errors: in all shards that are finished.

    finished: whether all shards are, also those of other processes.
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
    """Draws the pictures of many prompts into a folder; called again, goes on where it stopped.

    However often it is killed, each picture is in the folder once, and it is the same picture.

    Args:
        pipe: of a text-to-image class; its scheduler draws where no sampler is named.
        prompts: a .txt, .jsonl or .parquet file, or a list of texts and dictionaries.
        out: the folder.
        settings: what decides the pictures besides pipeline and prompts.
        shard: (i, n), to draw each n-th shard from i on, which starts at 0; by default the number
            of this JAX process and how many there are.
        source: what the pipeline was loaded from, such as {"model": ..., "revision": ...}: noted
            in the folder, compared when a run goes on, and named in the PNG files.
        progress: show a bar.
        lookahead: how many batches the device may be ahead of the PNG files; with 0 nothing is done
            at the same time.

    Raises:
        ValueError: the prompts, the settings or the folder cannot be used; says why.
        OSError: the disk is full.
        Stopped: after SIGTERM or Ctrl-C, when what was begun is written; the second one ends the
            process.
    """
    settings = settings or Settings()
    rows = open_prompts(prompts)
    index, count = checked_shard(shard or (jax.process_index(), jax.process_count()))
    order = make_order(rows, out, settings, source, lookahead)
    stop = StopRequest("the batches that were begun are finished")
    drawing = Drawing(pipe, order, stop)
    folder = order.folder
    folder.claim(manifest(pipeline_facts(pipe), rows, settings, source))
    with folder.part(index, count), receiving(stop):
        folder.clean()
        shards = range(index, count_shards(rows, settings), count)
        todo = {k for k in shards if not folder.is_done(k)}
        with progress_bar(rows, settings, shards, todo, progress) as bar:
            parts = rows.parts(settings.lines_per_shard, todo.__contains__)
            drawn = sum(drawing.run(parts, bar.update))
        return summary(folder, rows, settings, drawn, stop)


def make_order(
    rows: Prompts,
    out: str | Path,
    settings: Settings,
    source: Mapping[str, Any] | None,
    lookahead: int,
) -> Order:
    """What every process that draws is told."""
    model = (source or {}).get("model")
    name = None if model is None else Path(str(model)).name
    return Order(Path(out), settings, rows.name, rows.row, name, lookahead)


def summary(
    folder: Folder, rows: Prompts, settings: Settings, drawn: int, stop: StopRequest
) -> Summary:
    """The end of a run. drawn: pictures.

    Raises:
        Stopped: it was asked to stop.
    """
    errors = folder.gather_errors()
    if stop.number is not None:
        raise Stopped(stop.number, folder.path)
    return Summary(drawn, errors, all(map(folder.is_done, range(count_shards(rows, settings)))))


def pipeline_facts(pipe: Any) -> dict[str, Any]:
    """What decides the pictures of a pipeline, besides its parameters."""
    return {
        "pipeline": type(pipe).__name__,
        "dtypes": {name: str(jax.tree.leaves(p)[0].dtype) for name, p in pipe.params.items()},
        "scheduler": dict(pipe.scheduler.config),
        "vae_tiling": pipe.vae.tiling,
        "freeu": None if pipe.parts.freeu is None else list(pipe.parts.freeu),
    }


def manifest(
    facts: Mapping[str, Any],
    prompts: Prompts,
    settings: Settings,
    source: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """What decides the pictures of a run. facts: of the pipeline."""
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
    """The part (i, n) of a run.

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
    """How many shards there are in all."""
    return -(-prompts.count // settings.lines_per_shard)


def progress_bar(
    prompts: Prompts, settings: Settings, shards: Sequence[int], todo: set[int], shown: bool
) -> Any:
    """A progress bar over the pictures of these shards; those not to do are done."""
    done = sum(count_pictures(prompts, settings, k) for k in shards if k not in todo)
    total = sum(count_pictures(prompts, settings, k) for k in shards)
    return tqdm(total=total, initial=done, unit="image", desc="pictures", disable=not shown)


def count_pictures(prompts: Prompts, settings: Settings, shard: int) -> int:
    """How many pictures the lines of a shard ask for."""
    size = settings.lines_per_shard
    return (min((shard + 1) * size, prompts.count) - shard * size) * settings.num_images
