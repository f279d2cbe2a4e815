"""The queue, ordered by priority and by what each client has had."""

import bisect
import itertools

from diffusax.serving.engine.parts import Part


class FairQueue:
    """The parts of jobs in the order in which they may begin.

    Higher priorities come first. Among equal ones each client has a share of the device, however
    many jobs it sends: a part's tag is the work of the client's parts up to it, counted from where
    the queue stands when the first of them comes, and the smallest tag begins first (self-clocked
    fair queueing, Golestani 1994). A client's own parts, and those of nobody in particular, begin
    in the order in which they came. Not for several threads at once.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[int, float, int, Part]] = []
        """The parts after their priority, tag and number, in the order in which they may begin."""
        self._numbers = itertools.count()
        self._clock: dict[int, float] = {}
        self._last: dict[tuple[int, str], float] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, part: Part, work: float) -> None:
        """Adds a part. work: about what it costs, in any unit that all parts share."""
        job = part.job
        flow = job.priority, job.client
        begin = max(self._clock.get(job.priority, 0.0), self._last.get(flow, 0.0))
        self._last[flow] = begin + work
        entry = -job.priority, begin + work, next(self._numbers), part
        bisect.insort(self._entries, entry)

    def ordered(self) -> list[Part]:
        """Returns the parts, the next one first."""
        return [entry[-1] for entry in self._entries]

    def remove(self, part: Part, *, served: bool) -> None:
        """Removes a part. served: whether it begins, which moves the clock on."""
        index = next(i for i, entry in enumerate(self._entries) if entry[-1] is part)
        priority, tag = -self._entries[index][0], self._entries[index][1]
        del self._entries[index]
        if served:
            self._clock[priority] = max(self._clock.get(priority, 0.0), tag)
        if not self._entries:
            # Nobody waits: all start from the same again.
            self._last.clear()
