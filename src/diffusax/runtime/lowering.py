"""How an operation is lowered: as is best on the platform that is compiled for, or plainly."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
"""JAX's names of the platforms that lowerings are chosen for."""

_PLAIN = contextvars.ContextVar("plain", default=False)


def by_platform(
    choose: Callable[[str], str], lowerings: Mapping[str, Callable[..., Any]], *args: Any
) -> Any:
    """The result of the lowering that is chosen for the platform that the program is compiled for.

    That platform need not be this machine's: the same trace is exported to others. Where two
    platforms choose differently, all their lowerings are traced, and only one is lowered.

    Args:
        choose: the name of the lowering for one of `PLATFORMS`; others lower like "rocm".
        lowerings: by name.
        *args: what the lowering takes, arrays.
    """
    names = {platform: choose(platform) for platform in PLATFORMS}
    default = names.pop("rocm")
    others = {p: lowerings[name] for p, name in names.items() if name != default}
    if not others:
        return lowerings[default](*args)
    return jax.lax.platform_dependent(*args, default=lowerings[default], **others)


def known_sizes(shape: Sequence[Any]) -> tuple[int, ...]:
    """The shape, with 2 for sizes that an exported program leaves open, to choose lowerings by."""
    return tuple(n if isinstance(n, int) else 2 for n in shape)


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
