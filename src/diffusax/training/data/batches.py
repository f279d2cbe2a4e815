"""Makes batches of rows with Grain: shuffled, split over hosts, prefetched and resumable."""

import dataclasses
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from diffusax.boundary.messages import require_extra
from diffusax.runtime.signals import STOP_SIGNALS
from diffusax.training.data.buckets import BucketOrder, buckets_of
from diffusax.training.data.edits import beneath
from diffusax.training.data.sources import MAX_BROKEN, Source, SourceFailed
from diffusax.training.data.streaming import StreamedSource, WindowOrder

log = logging.getLogger(__name__)

Element = dict[str, np.ndarray]
Prepare = Callable[[dict[str, Any], np.random.Generator], Element]

BROKEN_WINDOW = 1000
"""The least number of rows that `MAX_BROKEN` is taken of, if the data set has as many."""


@dataclasses.dataclass(frozen=True)
class Broken:
    """A row that could not be used."""

    name: str
    reason: str
    fatal: bool = False
    """Whether the row is not at fault, and the run has to stop."""
    instead: dict[str, np.ndarray] | None = None
    """The example of another row of the same size, where batches are of one size."""


class Tally:
    """Counts and logs the rows that cannot be used, and stops the run if there are too many."""

    def __init__(self, rows: int):
        """Starts with no rows counted. rows: the number of rows of the whole data set."""
        self.rows, self.seen, self.broken = rows, 0, 0
        self._named: set[str] = set()

    def count(self, element: Any) -> None:
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
    """Makes examples of rows; in buckets, a broken row brings another of its size."""

    source: Source
    prepare: Prepare

    def __call__(self, row: Any, rng: np.random.Generator) -> Element | Broken:
        example = self._example(row, rng)
        if not isinstance(example, Broken) or example.fatal:
            return example
        buckets = buckets_of(self.source)
        for other in () if buckets is None else buckets.others(row[0]):
            instead = self._example(_Rows(self.source)[other], rng)
            if not isinstance(instead, Broken):
                return dataclasses.replace(example, instead=instead)
        return example

    def _example(self, row: Any, rng: np.random.Generator) -> Element | Broken:
        index, values = row
        if isinstance(values, Broken):
            return values
        try:
            return self.prepare(values, rng)
        except Exception as error:
            return Broken(self.source.name(index), f"{type(error).__name__}: {error}")


@dataclasses.dataclass(frozen=True)
class _Bucketed:
    """A process's examples in batches of one size, each with the index of its size."""

    examples: Sequence[Element | Broken]
    """The examples in the order of the rows."""
    order: BucketOrder
    process_index: int
    process_count: int

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, Element | Broken]:
        own = self.order.batch_size // self.process_count
        number, i = divmod(index, own)
        bucket, places = self.order.batch(number)
        # Side by side, the processes' examples are the batch of a single one.
        return bucket, self.examples[int(places[self.process_index * own + i])]


class Batches:
    """An endless iterator of batches, whose position can be saved and restored.

    The order of the examples depends only on the seed and the number of processes, not on the
    workers. Where the source has buckets, it depends on the batch size too: each batch is of one
    size, the same in all processes, which share its rows; see `BucketOrder`.
    """

    bucket: str = ""
    """The size of the last batch's images, or before the first one the largest; an empty text where
    the source has no buckets."""

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
        order, rows_of = None, beneath(source)
        if isinstance(rows_of, StreamedSource):
            order = rows_of.order(seed, process_index, process_count)
        self._prepared = _Prepared(source, prepare)
        self._buckets = buckets_of(source)
        # Processes share the batches of buckets, otherwise the rows.
        own = slice(process_index, None, process_count)
        share = own if self._buckets is None else slice(None)

        def in_order(rows: Any) -> Any:
            return grain.MapDataset.source(rows).seed(seed).shuffle()[share].repeat()

        if order is None:
            rows = in_order(_Rows(source))
        else:
            rows = grain.MapDataset.source(_Rows(source, order)).seed(seed)
        self._by_index = examples = rows.random_map(self._prepared)
        if self._buckets is not None:
            self.bucket = self._buckets.name(self._buckets.of_row[self._buckets.largest_row()])
            sizes = BucketOrder(
                self._buckets, in_order(range(self.rows)), batch_size * process_count
            )
            bucketed = _Bucketed(examples, sizes, process_index, process_count)
            examples = grain.MapDataset.source(bucketed)
        self._examples, self._workers, self._threads = examples, workers, threads
        self._elements: Any = None

    def __iter__(self) -> "Batches":
        return self

    def __next__(self) -> Element:
        """Returns the next batch; each array has batch_size rows.

        Raises:
            ValueError: more than one row in a hundred is broken.
        """
        elements: list[Element] = []
        while len(elements) < self.batch_size:
            element = self._next()
            self.tally.count(element)
            if not isinstance(element, Broken):
                elements.append(element)
            elif element.instead is not None:
                elements.append(element.instead)
            elif self._buckets is not None:
                raise ValueError(
                    f"no image of {self.bucket} can be read; the last is {element.name}: "
                    f"{element.reason}"
                )
        return {key: np.stack([e[key] for e in elements]) for key in elements[0]}

    def example(self) -> Element:
        """Returns one of the next examples; reads only its row, which will be read again.

        Where the source has buckets, it is one of the largest examples instead.

        Raises:
            ValueError: too many rows are broken.
        """
        if self._buckets is not None:
            return self._largest(self._buckets.largest_row())
        tries = int(MAX_BROKEN * BROKEN_WINDOW) + 1
        for i in range(tries):
            element = self._by_index[self.tally.seen + i]
            if not isinstance(element, Broken):
                return element
            if element.fatal:
                raise ValueError(element.reason)
        raise ValueError(
            f"{tries} of {tries} rows are broken, more than {MAX_BROKEN:.0%}; the last is "
            f"{element.name}: {element.reason}"
        )

    def _next(self) -> Element | Broken:
        """Returns the next example, and notes its size."""
        if self._elements is None:
            self._elements = self._open(self.tally.seen)
        if self._buckets is None:
            return next(self._elements)  # type: ignore[no-any-return]
        bucket, element = next(self._elements)
        self.bucket = self._buckets.name(bucket)
        return element  # type: ignore[no-any-return]

    def _open(self, start: int) -> Any:
        """Opens Grain's iterator of the examples, from a place in their order."""
        grain = require_extra("grain", "train")
        ahead = max(2 * self.batch_size, self._threads)
        dataset = self._examples[start:].to_iter_dataset(
            grain.ReadOptions(num_threads=self._threads, prefetch_buffer_size=ahead)
        )
        if self._workers:
            flags = require_extra("absl.flags", "train").FLAGS
            if not flags.is_parsed():
                # Grain's worker processes read absl flags, which only absl programs parse.
                flags.mark_as_parsed()
            options = grain.MultiprocessingOptions(
                num_workers=self._workers, per_worker_buffer_size=2 * self.batch_size
            )
            dataset = dataset.mp_prefetch(options, worker_init_fn=follow_parent)
        return iter(dataset)

    def _largest(self, row: int) -> Element:
        element = self._prepared(_Rows(self._prepared.source)[row], np.random.default_rng(0))
        if not isinstance(element, Broken):
            return element
        if element.instead is None:
            raise ValueError(f"no image of {self.bucket} can be read: {element.reason}")
        return element.instead

    def close(self) -> None:
        """Ends the worker processes."""
        if self._elements is not None:
            self._elements.close()
            self._elements = None

    def get_state(self) -> dict[str, Any]:
        """Returns the position as JSON values: the number of examples taken, and of broken ones.

        Grain's own state is no part of it, because that is another with other workers.
        """
        return self.tally.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a position from `get_state`, also of other workers.

        In buckets, with another batch size, it is the start of the last batch that begins there or
        before; a few rows of that epoch may then come twice, or not at all.
        """
        self.close()
        self.tally.set_state(state)
        if self._buckets is not None:
            self.tally.seen -= self.tally.seen % self.batch_size


def follow_parent(index: int, count: int) -> None:
    """Makes a worker process leave signals to its parent, and end when the parent ends.

    A terminal sends Ctrl-C to all processes, and the parent still needs data for its last step.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
