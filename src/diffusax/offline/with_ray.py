"""Runs many prompts in the workers of a Ray cluster.

Each shard is a task. The driver reads the prompts; a worker loads the pipeline once, generates
shards and writes them to the output folder, which all machines must see. When a worker dies, Ray
gives its shard to another one, which continues after the last finished batch.
"""

import functools
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from diffusax.boundary.messages import require_extra
from diffusax.offline.prompts import Part, Source, open_prompts
from diffusax.offline.requests import Settings
from diffusax.offline.run import (
    Summary,
    count_images,
    count_shards,
    make_order,
    manifest,
    pipeline_facts,
    progress_bar,
    summary,
)
from diffusax.offline.stages import Order, ShardGenerator
from diffusax.runtime.signals import StopRequest, receiving

_RETRIES = 5
"""The number of times that a shard whose worker has died is given to another one."""


def generate_with_ray(
    load: Callable[[], Any],
    prompts: Source,
    out: str | Path,
    settings: Settings | None = None,
    *,
    workers: int = 2,
    resources: Mapping[str, float] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: bool = True,
    lookahead: int = 2,
) -> Summary:
    """Runs `generate` in the workers of the Ray cluster that `ray.init()` finds or starts.

    Args:
        load: returns the pipeline; called once in each worker process.
        prompts: see `generate`; only this process reads them.
        out: a folder that this process and all workers see.
        settings: see `generate`.
        workers: the number of shards that are generated at the same time.
        resources: the resources of each worker, such as {"GPU": 1} or {"TPU": 4}; by default one
            CPU.
        source: see `generate`.
        progress: see `generate`.
        lookahead: see `generate`.

    Raises:
        ValueError: the prompts, the settings or the folder cannot be used; says why.
        ImportError: Ray is not installed.
        OSError: the disk is full, or a shard has ended one worker after the other.
        Stopped: SIGTERM or Ctrl-C came, and the batches that were begun are written.
    """
    ray = require_extra("ray", "ray")
    settings = settings or Settings()
    rows = open_prompts(prompts)
    order = make_order(rows, Path(out).absolute(), settings, source, lookahead)
    folder, stop = order.folder, StopRequest("the batches that were begun are finished")
    started = not ray.is_initialized()
    if started:
        ray.init()
    try:
        options = {**_options(resources or {"CPU": 1}), "max_retries": _RETRIES}
        pickled = ray.cloudpickle.dumps(load)
        facts = ray.remote(_check).options(**options).remote(pickled, order)
        folder.claim(manifest(_result(ray, facts), rows, settings, source))
        with folder.part(0, 1), receiving(stop):
            folder.clean()
            folder.stop_file.unlink(missing_ok=True)
            shards = range(count_shards(rows, settings))
            todo = {k for k in shards if not folder.is_done(k)}
            parts = rows.parts(settings.lines_per_shard, todo.__contains__)
            generate = ray.remote(_generate).options(**options)
            tasks = ((part[0], generate.remote(pickled, order, part)) for part in parts)
            generated = 0
            with progress_bar(rows, settings, shards, todo, progress) as bar:
                for shard, added in _results(ray, tasks, workers, stop, folder.stop_file):
                    generated += added
                    bar.update(count_images(rows, settings, shard))
            return summary(folder, rows, settings, generated, stop)
    finally:
        if started:
            ray.shutdown()


def _results(
    ray: Any, tasks: Iterator[tuple[int, Any]], workers: int, stop: StopRequest, file: Path
) -> Iterator[tuple[int, int]]:
    """Yields each shard and the number of its new images, `workers` tasks at a time."""
    running: dict[Any, int] = {}
    more = True
    while more or running:
        if stop.number is not None:
            file.touch()
            more = False
        while more and len(running) < workers:
            shard, task = next(tasks, (0, None))
            more = task is not None
            if more:
                running[task] = shard
        # The timeout lets Python handle signals.
        done, _ = ray.wait(list(running), timeout=0.5) if running else ([], [])
        for task in done:
            yield running.pop(task), _result(ray, task)


def _result(ray: Any, task: Any) -> Any:
    """Returns the result of a task, or raises its own error."""
    try:
        return ray.get(task)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None
    except ray.exceptions.RayError as error:
        reason = str(error).splitlines()[0]
        raise OSError(
            f"a worker has died {_RETRIES + 1} times over one shard ({reason}); is there memory "
            "enough for the batch size?"
        ) from None


def _options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Returns resources under Ray's names."""
    own = {"CPU": "num_cpus", "GPU": "num_gpus"}
    named = {own[name]: amount for name, amount in resources.items() if name in own}
    others = {name: amount for name, amount in resources.items() if name not in own}
    return {"num_cpus": 0, **named, "resources": others}


@functools.lru_cache(1)
def _pipeline(pickled: bytes) -> Any:
    """Loads the pipeline of a worker process."""
    return require_extra("ray", "ray").cloudpickle.loads(pickled)()


def _check(pickled: bytes, order: Order) -> dict[str, Any]:
    """Checks in a worker that the settings suit the pipeline; returns what decides its images."""
    pipe = _pipeline(pickled)
    ShardGenerator(pipe, order, StopRequest(""))
    return pipeline_facts(pipe)


def _generate(pickled: bytes, order: Order, part: Part) -> int:
    """Generates a shard in a worker, and returns the number of images."""
    folder = order.folder
    # Ray may think that a worker is dead that only cannot be reached.
    with folder.alone_with(part[0]):
        if folder.is_done(part[0]):
            return 0
        generator = ShardGenerator(_pipeline(pickled), order, _StopFile(folder.stop_file))
        return sum(generator.run([part], lambda settled: None))


class _StopFile(StopRequest):
    """A request to stop that the driver makes with a file."""

    def __init__(self, file: Path):
        super().__init__("")
        self._file = file

    @property
    def number(self) -> int | None:  # type: ignore[override]
        """The number of a signal once the file exists, and None before."""
        return signal.SIGTERM if self._file.exists() else None
