"""Small sources whose images stay in memory, and pairs of their rows."""

import dataclasses
import functools
from typing import Any

import jax

from diffusax.training.data.buckets import Buckets, buckets_of
from diffusax.training.data.examples import read_image
from diffusax.training.data.sources import Source

INSTANCE, CLASS = "instance", "class"
"""The names of a pair's rows."""


@dataclasses.dataclass(frozen=True)
class KeptImages:
    """The rows of a source; images stay in memory once they are read, as long as they fit.

    A data set of five images is read a hundred times in a run.
    """

    source: Source
    column: str
    """The column with the images."""
    limit: int = 2**30
    """The number of bytes that the images may take in each process."""
    kept: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict, compare=False)
    """The rows that were read, by their index."""

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if (row := self.kept.get(index)) is not None:
            return row
        row = dict(self.source[index])
        row[self.column] = image = read_image(row[self.column])
        if (len(self.kept) + 1) * 3 * image.width * image.height <= self.limit:
            self.kept[index] = row
        return row

    def name(self, index: int) -> str:
        return self.source.name(index)

    @property
    def buckets(self) -> Buckets | None:
        """The sizes of the images, where there are several."""
        return buckets_of(self.source)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "kept": {}}


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Rows of a subject, each with one of its class; the shorter of both is repeated.

    Upstream: diffusers examples/dreambooth/train_dreambooth.py, DreamBoothDataset.
    """

    instances: Source
    classes: Source

    def __len__(self) -> int:
        return max(len(self.instances), len(self.classes))

    def __getitem__(self, index: int) -> dict[str, Any]:
        instance = self.instances[index % len(self.instances)]
        return {INSTANCE: instance, CLASS: self.classes[index % len(self.classes)]}

    def name(self, index: int) -> str:
        """Returns where both rows come from, for messages."""
        instance = self.instances.name(index % len(self.instances))
        return f"{instance} with {self.classes.name(index % len(self.classes))}"

    @functools.cached_property
    def buckets(self) -> Buckets | None:
        """The sizes of the subject's images, where there are several."""
        buckets = buckets_of(self.instances)
        return None if buckets is None else buckets.repeated(len(self))


@dataclasses.dataclass(frozen=True)
class Repeated:
    """The rows of a source, again and again until each process has one."""

    source: Source
    processes: int = dataclasses.field(default_factory=jax.process_count)
    """The number of processes, which those that prepare examples could not find out."""

    def __len__(self) -> int:
        count = len(self.source)
        return count * -(-self.processes // count)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.source[index % len(self.source)]

    def name(self, index: int) -> str:
        return self.source.name(index % len(self.source))

    @functools.cached_property
    def buckets(self) -> Buckets | None:
        """The sizes of the images, where there are several."""
        buckets = buckets_of(self.source)
        return None if buckets is None else buckets.repeated(len(self))
