"""How long a row of a running batch takes, measured while it runs."""

import weakref

from diffusax.pipelines.batch_run import Kind

_CHANGE = 0.3
"""The weight of a row's latest seconds in their mean."""
_FAR = 2.0
"""A measurement that is so many times the mean says more of something else, such as a program that
is compiled once more: it counts as this much, and the next one well below the mean replaces it."""


class RowSeconds:
    """The seconds of a row by the kind of batch and its size.

    Each is a moving mean. The first measurement of a size is left out, which includes compiling it.
    """

    def __init__(self) -> None:
        self._means: weakref.WeakKeyDictionary[Kind, dict[int, float | None]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, kind: Kind, size: int, seconds: float) -> None:
        """Notes how long a row has taken in a batch of a kind and size."""
        means = self._means.setdefault(kind, {})
        if size not in means:
            means[size] = None
            return
        mean = means[size]
        if mean is None or _FAR * seconds < mean:
            means[size] = seconds
        else:
            means[size] = mean + _CHANGE * (min(seconds, _FAR * mean) - mean)

    def measured(self, kind: Kind, size: int) -> float | None:
        """Returns the seconds of a row in a batch of a kind and size, if they were measured."""
        return self._means.get(kind, {}).get(size)
