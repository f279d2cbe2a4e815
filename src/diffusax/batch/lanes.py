"""The places and lanes of a running batch that are free, and those of each image."""

import dataclasses

import numpy as np

from diffusax.pipelines.plan.branches import ScatteredLanes


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
