"""Whether networks are traced in their plain form, to be counted, or in the platform's fastest."""

import contextlib
import contextvars
from collections.abc import Iterator

_PLAIN = contextvars.ContextVar("plain", default=False)


@contextlib.contextmanager
def plain_lowerings() -> Iterator[None]:
    """Inside, convolutions and attention are traced as the operations that they stand for.

    For a function that is traced anew; what JAX has traced before keeps its form.
    """
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def is_plain() -> bool:
    """Whether `plain_lowerings` is in force."""
    return _PLAIN.get()
