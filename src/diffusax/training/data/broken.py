"""Rows that cannot be used: they are counted and named, and too many of them stop a run."""

import dataclasses
import logging
from typing import Any

import numpy as np

log = logging.getLogger(__name__)

MAX_BROKEN = 0.01
"""The share of broken rows above which a run stops."""
BROKEN_WINDOW = 1000
"""The least number of rows that the share is taken of, if the data set has as many."""


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
    """Counts and names the rows that cannot be used, and stops the run where there are too many."""

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
