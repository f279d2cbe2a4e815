"""A running batch on the host: its lanes, what is in it, at which row, and when it leaves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from diffusax.batch import programs
from diffusax.batch.image import (
    Image,
    Kind,
    PreparedImage,
    count_shares,
    kind_of,
    networks_in_batch,
)
from diffusax.lora.lora import Lora
from diffusax.lora.stacks import WeightGroups, stack_shapes
from diffusax.pipelines.components.adapters import adaptable_networks
from diffusax.pipelines.components.components import Components
from diffusax.pipelines.plan.branches import ScatteredLanes
from diffusax.pipelines.run.sample import load_denoiser
from diffusax.runtime.programs.program import Request
from diffusax.runtime.switches import in_mesh


@dataclasses.dataclass(frozen=True)
class Seat:
    """A place of a running batch and the lanes of its branches, the first branch's lane first."""

    place: int
    lanes: tuple[int, ...]


class Lanes:
    """The places and lanes of a batch that are taken.

    There are as many places as lanes. On a mesh both are split over its devices in order, and the
    lanes of an image lie on the device of its place.
    """

    def __init__(self, size: int, branches: int, devices: int = 1):
        """Starts without images.

        Args:
            size: the number of lanes, which is that of places.
            branches: the most branches of an image.
            devices: the number of devices that split the batch, which divides the size.
        """
        self.size, self.branches, self._share = size, branches, size // devices
        self._owner = np.zeros(size, np.int32)
        self._branch = np.zeros(size, np.int32)
        self._of_place = np.full((size, branches), size, np.int32)
        self._taken = np.zeros(size, bool)
        self._seats: dict[int, Seat] = {}

    @property
    def taken(self) -> int:
        """The number of lanes that are taken."""
        return int(self._taken.sum())

    @property
    def seats(self) -> dict[int, Seat]:
        """The seats that are taken, by place."""
        return dict(self._seats)

    def find(self, count: int) -> Seat | None:
        """Returns a free seat with this many lanes, on the device with the most free; else None."""
        free = (~self._taken).reshape(-1, self._share)
        device = int(free.sum(1).argmax())
        first = device * self._share
        lanes = first + np.flatnonzero(free[device])[:count]
        if len(lanes) < count:
            return None
        places = range(first, first + self._share)
        place = next((p for p in places if p not in self._seats), None)
        return None if place is None else Seat(place, tuple(map(int, lanes)))

    def is_free(self, seat: Seat) -> bool:
        """Returns whether a seat's place and lanes are free."""
        return seat.place not in self._seats and not self._taken[list(seat.lanes)].any()

    def take(self, seat: Seat) -> None:
        """Takes a free seat."""
        lanes = list(seat.lanes)
        self._seats[seat.place] = seat
        self._taken[lanes] = True
        self._owner[lanes], self._branch[lanes] = seat.place, range(len(lanes))
        self._of_place[seat.place, : len(lanes)] = lanes

    def keep_first(self, place: int) -> None:
        """Frees all lanes of a place but that of its first branch."""
        seat = self._seats[place]
        self._give_back(place, seat.lanes[1:])
        self._seats[place] = dataclasses.replace(seat, lanes=seat.lanes[:1])

    def leave(self, place: int) -> None:
        """Frees a seat."""
        self._give_back(place, self._seats.pop(place).lanes)

    def indices(self) -> ScatteredLanes:
        """Returns the indices for the programs, which count from each device's first."""
        first = np.arange(self.size, dtype=np.int32) // self._share * self._share
        missing = self._of_place == self.size
        local = np.where(missing, self._share, self._of_place - first[:, None])
        return ScatteredLanes(
            self._owner % self._share, self._branch.copy(), local.astype(np.int32)
        )

    def compacted(self, size: int, devices: int = 1) -> tuple["Lanes", np.ndarray, np.ndarray]:
        """Returns lanes of another size with the same images on the first places.

        Also returns, for each new place and each new lane, the old one that it takes.

        Raises:
            ValueError: the images do not fit.
        """
        new = Lanes(size, self.branches, devices)
        places, lanes = np.zeros((2, size), np.int32)
        # Wide seats first, which narrow ones could leave no room on a device.
        for seat in sorted(self._seats.values(), key=lambda seat: -len(seat.lanes)):
            found = new.find(len(seat.lanes))
            if found is None:
                raise ValueError(f"{self.taken} lanes do not fit {size}")
            new.take(found)
            places[found.place] = seat.place
            lanes[list(found.lanes)] = seat.lanes
        return new, places, lanes

    def moved(self, places: np.ndarray) -> dict[int, int]:
        """Returns the new place of each old one, after `compacted` gave these old places."""
        return {int(places[new]): new for new in self._seats}

    def _give_back(self, place: int, lanes: tuple[int, ...]) -> None:
        self._taken[list(lanes)] = False
        row = self._of_place[place]
        row[np.isin(row, lanes)] = self.size


def check_local(mesh: Mesh | None) -> None:
    """Raises ValueError for a mesh of several processes, which would have to run alike."""
    if mesh is not None and mesh != mesh.local_mesh:
        raise ValueError(
            "a running batch needs a mesh within one process; load the pipeline with a mesh of "
            "jax.local_devices()"
        )


class BatchRun:
    """A running batch of images with one key, which join and leave it at any row.

    The host computes at which row each image is, and so never waits for the device.
    """

    def __init__(self, c: Components, prepared: PreparedImage, size: int, kind: Kind | None = None):
        """Makes a batch without images.

        Args:
            c: the components whose denoiser runs.
            prepared: an image like those that will join.
            size: the lanes of the network's batch, a multiple of the mesh's devices.
            kind: a kind of batch that the image fits; by default its own with the least rank.
        """
        self.key, self.kind = prepared.key, kind or kind_of(c, prepared)
        self._c, self._params = c, load_denoiser(c, None, prepared.ip_adapters).params
        self._columns: tuple[Lora, ...] = ()
        self._devices = count_shares(c.mesh)
        branches = prepared.entry.step_inputs.weights.shape[1] + 1
        self.lanes = Lanes(size, branches, self._devices)
        self._images: dict[int, Image] = {}
        self.done: jax.Array | None = None
        """An array that is ready when the rows that were dispatched last are computed."""
        with in_mesh(c.mesh):
            self._batch = programs.empty(prepared.entry, size, size, c.mesh)
            if prepared.entry.cache is not None:
                *given, _, _, _, adapters, _ = self._advance_arguments(0)
                memory = programs.empty_memory(*given, adapters)
                self._batch = self._batch._replace(memory=memory)

    @property
    def size(self) -> int:
        """The number of lanes."""
        return self.lanes.size

    def __len__(self) -> int:
        return len(self._images)

    @property
    def images(self) -> dict[int, Image]:
        """The images in the batch by place."""
        return dict(self._images)

    def has_shapes_for(self, prepared: PreparedImage) -> bool:
        """Returns whether the batch's programs have room for the adapters of an image."""
        return not prepared.adapters or self._has_room_for(tuple(prepared.adapters))

    def has_ranks_for(self, prepared: PreparedImage) -> bool:
        """Returns whether an image's adapters fit beside those of the images in the batch."""
        return not prepared.adapters or self._has_room_for(self._live_adapters(prepared))

    def make_room(self, prepared: PreparedImage) -> None:
        """Puts an image's adapters beside those of the images in the batch, unless they are there.

        What it raises leaves the batch as it is; what `join` raises may not, whose program uses the
        memory of the batch's arrays.

        Raises:
            ValueError: an adapter does not fit its network.
        """
        if not set(prepared.adapters) <= set(self._columns):
            self._stack(self._live_adapters(prepared))

    def join(self, image: Image, seat: Seat) -> None:
        """Puts an image into a free seat, which has as many lanes as the image has branches."""
        self.make_room(image.prepared)
        entry, place = image.prepared.entry, np.int32(seat.place)
        with in_mesh(self._c.mesh):
            self._batch = programs.insert(self._batch, entry, place, self._lanes_of(seat))
        self.lanes.take(seat)
        self._images[seat.place] = image

    def leave(self, place: int) -> None:
        """Frees the place of an image, whether its run has ended or not."""
        self.lanes.leave(place)
        del self._images[place]

    def rows_until_change(self) -> int:
        """Returns the number of rows after which an image ends or gives lanes back."""
        return min(map(self._rows_until_change, self._images))

    def advance(self, rows: int) -> list[int]:
        """Dispatches rows of all images, and returns the places of those that end with them.

        rows: at most `rows_until_change`.
        """
        given = self._advance_arguments(rows)
        with in_mesh(self._c.mesh):
            state, self.done, memory = programs.advance_batch(*given)
        self._batch = self._batch._replace(state=state, memory=memory)
        self._move(rows)
        return [place for place, image in self._images.items() if not image.rows]

    def _move(self, rows: int) -> None:
        """Notes that rows are dispatched: lanes that images give back, prompts that change."""
        for place, image in self._images.items():
            image.at = min(image.at + rows, image.prepared.rows)
            if len(self.lanes.seats[place].lanes) > image.lanes:
                self.lanes.keep_first(place)
            if image.at in image.prepared.later:
                self._change_prompt(place, image)

    def _change_prompt(self, place: int, image: Image) -> None:
        """Puts the conditions of an image's next rows into its lanes, by the program of `join`."""
        prepared = image.prepared
        entry = prepared.entry._replace(conditions=prepared.later[image.at])
        # No place is the image's, so that its state and all else stay as they are.
        with in_mesh(self._c.mesh):
            self._batch = programs.insert(
                self._batch, entry, np.int32(self.size), self._lanes_of(self.lanes.seats[place])
            )

    def _lanes_of(self, seat: Seat) -> np.ndarray:
        """Returns the lanes of all branches that an image may have, k."""
        lanes = np.full(self.lanes.branches, self.size, np.int32)
        lanes[: len(seat.lanes)] = seat.lanes
        return lanes

    def latents(self, place: int) -> jax.Array:
        """Returns the latents of the image at a place, 1 h w c."""
        with in_mesh(self._c.mesh):
            latents: jax.Array = programs.latents_at(self._batch.state, np.int32(place))
        return latents

    def resize(self, size: int) -> dict[int, int]:
        """Changes the number of lanes, and returns the new place of each image by its old one.

        Raises:
            ValueError: the images do not fit.
        """
        new, places, lanes = self.lanes.compacted(size, self._devices)
        with in_mesh(self._c.mesh):
            self._batch = programs.rearrange(self._batch, places, lanes)
        moved = new.moved(places)
        self.lanes = new
        self._images = {moved[place]: image for place, image in self._images.items()}
        return moved

    def requests(self, prepared: PreparedImage, others: Sequence[int] = ()) -> list[Request]:
        """Returns the programs of this size of the batch, and those that lead to other sizes.

        The small ones that are not listed, which make an empty batch and read latents, run once.

        Args:
            prepared: an image like those that will join.
            others: the sizes to change to.
        """
        lanes = np.full(self.lanes.branches, self.size, np.int32)
        with in_mesh(self._c.mesh):
            programs.latents_at(self._batch.state, np.int32(0))
        found = [
            programs.insert.request(self._batch, prepared.entry, np.int32(0), lanes),
            programs.advance_batch.request(*self._advance_arguments(0)),
        ]
        for size in others:
            order = np.zeros(size, np.int32)
            found.append(programs.rearrange.request(self._batch, order, order))
        return found

    def _advance_arguments(self, rows: int) -> tuple[Any, ...]:
        """Returns the arguments of the program that runs rows of all images."""
        at, stop = np.zeros((2, self.lanes.size), np.int32)
        for place, image in self._images.items():
            at[place], stop[place] = image.at, image.prepared.rows
        rest = self._batch._replace(state=None, memory=None)
        return (
            self._c.denoiser,
            self._params,
            self._batch.state,
            rest,
            self.lanes.indices(),
            at,
            stop,
            np.int32(rows),
            self._adapter_weights(),
            self._batch.memory,
        )

    def _has_room_for(self, adapters: tuple[Lora, ...]) -> bool:
        return self.kind.has_room_for(adapters, stack_shapes(adapters, networks_in_batch(self._c)))

    def _live_adapters(self, prepared: PreparedImage) -> tuple[Lora, ...]:
        """Returns the adapters of the images in the batch and of one more."""
        every = [*(image.prepared for image in self._images.values()), prepared]
        return tuple(dict.fromkeys(adapter for one in every for adapter in one.adapters))

    def _stack(self, adapters: tuple[Lora, ...]) -> None:
        """Puts other adapters side by side, in the same shapes."""
        named = {str(i): adapter for i, adapter in enumerate(adapters)}
        layers = self._c.adapters.stacked(self._c, named, self.kind.shapes)
        self._params = {**self._params, "adapters": layers}
        self._columns = adapters

    def _adapter_weights(self) -> np.ndarray | None:
        if not self.kind.shapes:
            return None
        if not self._columns:
            self._stack(())
        groups = WeightGroups(adaptable_networks(self._c)).count
        weights = np.zeros((self.size, self.kind.adapters, groups), np.float32)
        for place, image in self._images.items():
            for adapter, weight in image.prepared.adapters.items():
                weights[place, self._columns.index(adapter)] = weight
        return weights.reshape(self.size, -1)

    def _rows_until_change(self, place: int) -> int:
        image = self._images[place]
        end = image.prepared.guided_until if image.lanes > 1 else image.prepared.rows
        later = (row for row in image.prepared.later if row > image.at)
        return min([end, *later]) - image.at
