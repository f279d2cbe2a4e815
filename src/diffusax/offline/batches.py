"""Images with a prompt, seed, sampler, steps and guidance of their own, in a running batch."""

import collections
import dataclasses
import logging
from typing import Any

import jax
import numpy as np

from diffusax.batch.image import Image, PreparedImage, count_shares, kind_of, prepare_images
from diffusax.batch.run import BatchRun, Lanes, check_local
from diffusax.lora.stacks import WeightGroups
from diffusax.offline.requests import CheckedImage
from diffusax.offline.seating import Seated
from diffusax.pipelines.components.adapters import adaptable_networks
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.tasks.setup import set_up
from diffusax.pipelines.tasks.tasks import (
    most_branches,
    prepare_run,
    pure_noise,
    text_to_image,
)
from diffusax.pipelines.tasks.text_cache import TextCache
from diffusax.runtime.random.noise import JaxNoise, image_keys
from diffusax.runtime.switches import in_mesh

log = logging.getLogger(__name__)

_PREPARED = 4
"""The images that are encoded while the device runs others."""


def new_lanes(c: Components, images: int) -> Lanes:
    """Returns the free lanes of a batch of so many guided images, a few more on some meshes."""
    devices = count_shares(c.mesh)
    branches = most_branches(c, text_to_image)
    return Lanes(-(-images // devices) * devices * branches, branches, devices)


def prepare(c: Components, image: CheckedImage) -> PreparedImage:
    """Encodes an image's prompt and draws its noise, to join a running batch."""
    c = c.variant(scheduler=image.scheduler)
    call = image.call
    keys = image_keys(np.array([call.seed], np.uint32), np.array([image.number], np.uint32))
    with in_mesh(c.local_mesh):
        setup = set_up(c, call, image.kind[:2])
        setup = dataclasses.replace(setup, noise=JaxNoise(keys))
        run = prepare_run(setup, pure_noise(setup))
    prepared = prepare_images(c, text_to_image, run)[0]
    # All images of a batch have the same adapters in the same order, some with a weight of zero.
    groups = WeightGroups(adaptable_networks(c)).count
    zeros = np.zeros(groups, np.float32)
    stacked = (c.adapters.adapters[name] for name in image.adapters)
    return dataclasses.replace(
        prepared, adapters={one: prepared.adapters.get(one, zeros) for one in stacked}
    )


class Batches:
    """Runs seated images in one running batch for each kind.

    An image begins as soon as its seat is free and no image that comes before it waits for a part
    of that seat. The images of other shards follow without a gap.
    """

    def __init__(self, c: Components, images: int):
        """Starts without images. images: see `new_lanes`.

        Raises:
            ValueError: the mesh has devices of several processes.
        """
        check_local(c.mesh)
        self._c = c.variant(text_cache=TextCache())
        self._images = images
        self._waiting: dict[Any, collections.deque[Seated]] = {}
        self._prepared: dict[Seated, Image] = {}
        self._runs: dict[Any, BatchRun] = {}
        self.live, self.all = 0, 0
        """The lanes that had an image, and all lanes, summed over the rows that ran."""

    def add(self, images: list[Seated]) -> None:
        """Adds images of a shard, which begin in the order of their turns."""
        for one in sorted(images, key=lambda one: one.turn):
            kind = one.request.image.kind
            self._waiting.setdefault(kind, collections.deque()).append(one)

    def keep(self, wanted: set[Seated]) -> None:
        """Drops the images that wait and are not among these."""
        for kind, queue in self._waiting.items():
            self._waiting[kind] = collections.deque(one for one in queue if one in wanted)

    def log_use(self) -> None:
        """Logs how full the batches were."""
        if self.all:
            log.info("%.1f%% of the lanes had an image", 100 * self.live / self.all)

    @property
    def waiting(self) -> bool:
        """Whether images have not begun."""
        return any(self._waiting.values())

    @property
    def running(self) -> set[Seated]:
        """The images that have begun and not ended."""
        return {image.request for run in self._runs.values() for image in run.images.values()}

    def step(self) -> list[tuple[Seated, jax.Array]]:
        """Runs rows of a batch until an image ends or gives lanes back.

        Returns the images that have ended, with their latents 1 h w c.
        """
        kind = self._next_kind()
        self._admit(kind)
        run = self._runs[kind]
        rows = run.rows_until_change()
        self.live += rows * run.lanes.taken
        self.all += rows * run.size
        ended = []
        for place in run.advance(rows):
            ended.append((run.images[place].request, run.latents(place)))
            run.leave(place)
        # The device is busy: what comes next is prepared meanwhile.
        for one in list(self._waiting.get(kind, ()))[:_PREPARED]:
            self._prepare(one)
        if not len(run) and not self._waiting.get(kind):
            # The arrays of a batch in which no image is left are freed.
            del self._runs[kind], self._waiting[kind]
        return ended

    def _next_kind(self) -> Any:
        """Returns the kind of a batch for which images wait, or else of one in which some run.

        The last images of a batch so wait for those of the next shard.
        """
        found = next((kind for kind, queue in self._waiting.items() if queue), None)
        if found is not None:
            return found
        return next(kind for kind, run in self._runs.items() if len(run))

    def _admit(self, kind: Any) -> None:
        queue = self._waiting.setdefault(kind, collections.deque())
        if kind not in self._runs:
            first = self._prepare(queue[0])
            size = new_lanes(self._c, self._images).size
            self._runs[kind] = BatchRun(self._c, first.prepared, size, first.kind)
        run = self._runs[kind]
        places: set[int] = set()
        lanes: set[int] = set()
        left: collections.deque[Seated] = collections.deque()
        while queue and len(lanes) < run.size:
            one = queue.popleft()
            seat = one.seat
            free = seat.place not in places and lanes.isdisjoint(seat.lanes)
            if free and run.lanes.is_free(seat):
                run.join(self._prepare(one), seat)
                del self._prepared[one]
            else:
                places.add(seat.place)
                lanes.update(seat.lanes)
                left.append(one)
        queue.extendleft(reversed(left))

    def _prepare(self, one: Seated) -> Image:
        if one not in self._prepared:
            prepared = prepare(self._c, one.request.image)
            self._prepared[one] = Image(one, 0, prepared, kind_of(self._c, prepared))
        return self._prepared[one]
