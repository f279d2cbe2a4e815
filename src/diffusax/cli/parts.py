"""Finds out which part of the work a process does."""

import re

import jax

from diffusax.runtime.compat import forget_joining, joined_part
from diffusax.runtime.devices.processes import initialize


def jax_part() -> tuple[int, int]:
    """Returns the number of this JAX process and of all; call it before using JAX otherwise.

    The processes then disconnect, because they compute nothing together, and one must neither wait
    for the others at its end nor end with them. Afterwards this process sees only its own devices.
    """
    initialize()
    part = joined_part()
    jax.distributed.shutdown()
    forget_joining()
    return part


def parse_part(option: str, text: str | None) -> tuple[int, int] | None:
    """Reads i/n as two numbers.

    Raises:
        ValueError: the text does not have this form; names the option.
    """
    if text is None:
        return None
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not int(found[1]) < int(found[2]):
        raise ValueError(
            f"{option} must be i/n with i from 0 to n - 1, such as 0/4 for the first of four "
            f"(got {text})"
        )
    return int(found[1]), int(found[2])
