"""A running batch on the host: what is in it, at which row, and when it leaves."""

import dataclasses

import jax
import numpy as np
from jax.sharding import Mesh

from diffusax.pipelines import batch as programs
from diffusax.pipelines.components import Components
from diffusax.pipelines.entries import Picture
from diffusax.pipelines.lanes import Lanes, Seat
from diffusax.runtime.mesh import batch_size, in_mesh


@dataclasses.dataclass
class _Member:
    """An image in the batch."""

    picture: Picture
    at: int = 0
    """The next row of its run."""


def check_local(mesh: Mesh | None) -> None:
    """Raises ValueError for a mesh of several processes, which would have to run alike."""
    if mesh is not None and mesh != mesh.local_mesh:
        raise ValueError(
            "a running batch needs a mesh within one process; load the pipeline with a mesh of "
            "jax.local_devices()"
        )


def count_shares(mesh: Mesh | None) -> int:
    """Returns the number of parts into which a mesh splits a batch."""
    return 1 if mesh is None else batch_size(mesh)


class BatchRun:
    """A running batch of images with one key, which join and leave it at any row.

    The host computes at which row each image is, and so never waits for the device.
    """

    def __init__(self, c: Components, picture: Picture, size: int):
        """Makes a batch without images.

        Args:
            c: the components whose denoiser runs.
            picture: an image like those that will join.
            size: the lanes of the network's batch, a multiple of the mesh's devices.
        """
        self.key = picture.key
        self._c, self._params = c, c.denoiser_params
        self._devices = count_shares(c.mesh)
        branches = picture.entry.step_inputs.weights.shape[1] + 1
        self.lanes = Lanes(size, branches, self._devices)
        self._members: dict[int, _Member] = {}
        self.done: jax.Array | None = None
        """An array that is ready when the rows that were dispatched last are computed."""
        with in_mesh(c.mesh):
            self._batch = programs.empty(picture.entry, size, size, c.mesh)

    @property
    def size(self) -> int:
        """The number of lanes."""
        return self.lanes.size

    def __len__(self) -> int:
        return len(self._members)

    def position(self, place: int) -> int:
        """Returns the next row of the image at a place."""
        return self._members[place].at

    def join(self, picture: Picture, seat: Seat) -> None:
        """Puts an image into a free seat, which has as many lanes as the image has branches."""
        lanes = np.full(self.lanes.branches, self.size, np.int32)
        lanes[: len(seat.lanes)] = seat.lanes
        with in_mesh(self._c.mesh):
            place = np.int32(seat.place)
            self._batch = programs.insert(self._batch, picture.entry, place, lanes)
        self.lanes.take(seat)
        self._members[seat.place] = _Member(picture)

    def leave(self, place: int) -> None:
        """Frees the place of an image, whether its run has ended or not."""
        self.lanes.leave(place)
        del self._members[place]

    def rows_until_change(self) -> int:
        """Returns the number of rows after which an image ends or gives lanes back."""
        return min(map(self._rows_until_change, self._members))

    def advance(self, rows: int) -> list[int]:
        """Dispatches rows of all images, and returns the places of those that end with them.

        rows: at most `rows_until_change`.
        """
        at, stop = np.zeros((2, self.size), np.int32)
        for place, member in self._members.items():
            at[place], stop[place] = member.at, member.picture.rows
        state, rest = self._batch.state, self._batch._replace(state=None)
        with in_mesh(self._c.mesh):
            state, self.done = programs.advance_batch(
                self._c.denoiser,
                self._params,
                state,
                rest,
                self.lanes.indices(),
                at,
                stop,
                np.int32(rows),
            )
        self._batch = rest._replace(state=state)
        for place, member in self._members.items():
            member.at = min(member.at + rows, member.picture.rows)
            if len(self.lanes.seats[place].lanes) > 1 and member.at >= member.picture.guided_until:
                self.lanes.keep_first(place)
        return [p for p, member in self._members.items() if member.at == member.picture.rows]

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
        self._members = {moved[place]: member for place, member in self._members.items()}
        return moved

    def _rows_until_change(self, place: int) -> int:
        member = self._members[place]
        end = member.picture.rows
        if len(self.lanes.seats[place].lanes) > 1:
            end = min(end, member.picture.guided_until)
        return end - member.at
