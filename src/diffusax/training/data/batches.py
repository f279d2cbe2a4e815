"""Makes batches of rows with Grain: shuffled, split over hosts, prefetched and resumable."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta

from diffusax.extras import require_extra
from diffusax.training.data.sources import Source, SourceFailed
from diffusax.training.data.streaming import StreamedSource, WindowOrder
from diffusax.training.signals import follow_parent
from diffusax.typed.options import Options

log = logging.getLogger(__name__)

MAX_BROKEN = 0.01
"""The share of broken rows above which a run stops."""
BROKEN_WINDOW = 1000
"""The least number of rows that the share is taken of, if the data set has as many."""


@dataclasses.dataclass(frozen=True)
class DataConfig(Options):
    """Where examples come from and how images are prepared."""

    group: ClassVar[str] = "data."

    path: str = ""
    """The data set: a folder or glob of Parquet shards, a folder of images, a Hub data-set id, or a
    folder that cache-latents wrote."""
    own_part: bool = False
    """Read the data as this process's own part, which download --part wrote to the machine's disk;
    by default all processes see the same data and share its rows."""
    streaming: bool = False
    """Read a Hub data set of Parquet files row group by row group instead of downloading it."""
    streaming_cache: Annotated[float, Meta(gt=0, le=1e6)] = 20.0
    """The gigabytes of row groups to keep on disk while streaming."""
    streaming_window: Annotated[int, Meta(ge=0, le=2**20)] = 0
    """The number of row groups to mix at a time while streaming; each process reads its own. 0
    mixes all rows, which is good for data sets that fit into the cache."""
    resolution: Annotated[int, Meta(ge=8, le=8192)] | None = None
    """The height and width of the training images in pixels; by default the model's own."""
    center_crop: bool = False
    """Crop in the middle instead of anywhere."""
    random_flip: bool = False
    """Mirror half of the images."""
    workers: Annotated[int, Meta(ge=0, le=1024)] = 0
    """The number of processes that decode images; 0 decodes in threads of this one."""
    threads: Annotated[int, Meta(ge=1, le=1024)] = 4
    """The number of threads that read rows, in each process."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row that could not be used."""

    name: str
    reason: str
    fatal: bool = False
    """Whether the row is not at fault, and the run has to stop."""


Element = dict[str, np.ndarray]
Prepare = Callable[[dict[str, Any], np.random.Generator], Element]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A source in the form that Grain reads: reading and preparing a row never raises."""

    source: Source
    order: WindowOrder | None = None

    def __len__(self) -> int:
        return len(self.source if self.order is None else self.order)

    def __getitem__(self, index: int) -> Any:
        if self.order is not None:
            index = self.order[index]
        try:
            return index, self.source[index]
        except Exception as error:
            name, fatal = self.source.name(index), isinstance(error, SourceFailed)
            return index, Broken(name, str(error), fatal)


@dataclasses.dataclass(frozen=True)
class _Prepared:
    source: Source
    prepare: Prepare

    def __call__(self, row: Any, rng: np.random.Generator) -> Element | Broken:
        index, values = row
        if isinstance(values, Broken):
            return values
        try:
            return self.prepare(values, rng)
        except Exception as error:
            return Broken(self.source.name(index), f"{type(error).__name__}: {error}")


class Tally:
    """Counts and names the rows that cannot be used, and stops the run where there are too many."""

    def __init__(self, rows: int):
        """Starts with no rows counted. rows: the number of rows of the whole data set."""
        self.rows, self.seen, self.broken = rows, 0, 0
        self._named: set[str] = set()

    def count(self, element: Element | Broken) -> None:
        """Counts the element; the first time that a row is broken, names it in the log.

        Raises:
            ValueError: more than one row in a hundred is broken, or the source cannot be read.
        """
        self.seen += 1
        if not isinstance(element, Broken):
            return
        if element.fatal:
            raise ValueError(element.reason)
        self.broken += 1
        if element.name not in self._named:
            self._named.add(element.name)
            log.warning("skipped %s: %s", element.name, element.reason)
        if self.broken > MAX_BROKEN * max(self.seen, min(BROKEN_WINDOW, self.rows)):
            raise ValueError(
                f"{self.broken} of {self.seen} rows are broken, more than {MAX_BROKEN:.0%}; the "
                f"last is {element.name}: {element.reason}"
            )

    def get_state(self) -> dict[str, int]:
        """Returns the counts."""
        return {"seen": self.seen, "broken": self.broken}

    def set_state(self, state: dict[str, int]) -> None:
        """Continues from the counts of `get_state`."""
        self.seen, self.broken = state["seen"], state["broken"]


class Batches:
    """An endless iterator of batches, whose position can be saved and restored.

    The order depends only on the seed, the batch size of a process and the number of processes.
    """

    def __init__(
        self,
        source: Source,
        prepare: Prepare,
        *,
        batch_size: int,
        seed: int,
        workers: int = 0,
        threads: int = 4,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Starts at the first batch.

        Args:
            source: the rows.
            prepare: makes an example of a row; may raise where the row cannot be used.
            batch_size: the number of examples in a batch of this process.
            seed: the seed of the order and of the numbers that `prepare` draws.
            workers: the number of processes that prepare examples; 0 uses threads of this one.
            threads: the number of threads that read rows, in each process.
            process_index: the number of this process.
            process_count: the number of processes that share the rows.

        Raises:
            ValueError: there are fewer rows than processes.
        """
        grain = require_extra("grain", "train")
        if len(source) < process_count:
            raise ValueError(f"{len(source)} rows are not enough for {process_count} processes")
        self.batch_size, self.rows = batch_size, len(source)
        self.tally = Tally(self.rows)
        order = None
        if isinstance(source, StreamedSource):
            order = source.order(seed, process_index, process_count)
        rows = grain.MapDataset.source(_Rows(source, order)).seed(seed)
        if order is None:
            rows = rows.shuffle()[process_index::process_count].repeat()
        self._by_index = rows.random_map(_Prepared(source, prepare))
        dataset = self._by_index.to_iter_dataset(
            grain.ReadOptions(
                num_threads=threads, prefetch_buffer_size=max(2 * batch_size, threads)
            )
        )
        if workers:
            flags = require_extra("absl.flags", "train").FLAGS
            if not flags.is_parsed():
                # Grain's worker processes read absl flags, which only absl programs parse.
                flags.mark_as_parsed()
            options = grain.MultiprocessingOptions(
                num_workers=workers, per_worker_buffer_size=2 * batch_size
            )
            dataset = dataset.mp_prefetch(options, worker_init_fn=follow_parent)
        self._elements = iter(dataset)

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Element:
        """Returns the next batch; each array has batch_size rows.

        Raises:
            ValueError: more than one row in a hundred is broken.
        """
        elements: list[Element] = []
        while len(elements) < self.batch_size:
            element = next(self._elements)
            self.tally.count(element)
            if not isinstance(element, Broken):
                elements.append(element)
        return {key: np.stack([e[key] for e in elements]) for key in elements[0]}

    def example(self) -> Element:
        """Returns one of the next examples; reads only its row, which will be read again.

        Raises:
            ValueError: too many rows are broken.
        """
        # Worker processes keep no common index; any example has the shapes of theirs.
        index = self._elements.get_state().get("next_index", 0)
        tries = int(MAX_BROKEN * BROKEN_WINDOW) + 1
        for i in range(tries):
            element = self._by_index[index + i]
            if not isinstance(element, Broken):
                return element
            if element.fatal:
                raise ValueError(element.reason)
        raise ValueError(
            f"{tries} of {tries} rows are broken, more than {MAX_BROKEN:.0%}; the last is "
            f"{element.name}: {element.reason}"
        )

    def close(self) -> None:
        """Ends the worker processes."""
        self._elements.close()

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON values."""
        return {"grain": self._elements.get_state(), **self.tally.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position from `get_state`."""
        self._elements.set_state(state["grain"])
        self.tally.set_state(state)
